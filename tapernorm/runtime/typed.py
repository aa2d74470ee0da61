"""Commands for the user to paste: as this program was started, and quoted for the shell and for Hydra."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

FACES = {  # of a checkout
    "train": "train.py",
    "evaluate": "evaluate.py",
    "generate": "scripts/generate.py",
    "report": "scripts/report.py",
    "export": "scripts/export_hf.py",
    "benchmark": "scripts/benchmark_decode.py",
    "doctor": "scripts/doctor.py",
}


def command(program: str) -> str:
    """`tapernorm train` where that was typed, or where there is no checkout; else `python train.py`, from here."""
    face = Path(__file__).resolve().parents[2] / FACES[program]
    if typed := os.environ.get("TAPERNORM_COMMAND") or (None if face.is_file() else "tapernorm"):
        return f"{typed} {program}"
    return f"python {shlex.quote(os.path.relpath(face))}"


def line(program: str, **keys: object) -> str:
    """A whole command: `python train.py resume=runs/RUN`."""
    words = [f"{key}={quoted(str(value))}" for key, value in keys.items()]
    return " ".join([command(program), *(word_of_shell(word) for word in words)])


def word_of_shell(text: str) -> str:
    """In double quotes where single ones are part of it and nothing else needs care; easier to read."""
    return f'"{text}"' if "'" in text and not set(text) & set('"$`\\!') else shlex.quote(text)


def quoted(value: str) -> str:
    """A text as Hydra reads it back: in quotes, unless it is plainly a word or a path."""
    if re.fullmatch(r"[\w./+-]*[A-Za-z_/.][\w./+-]*", value, flags=re.ASCII) and not RESERVED.fullmatch(value):
        return value
    # A backslash counts before a quote, at the end, and before ${, which would be looked up.
    value = re.sub(r"(\\*)('|$|\$\{)", lambda found: 2 * found[1] + "\\" * bool(found[2]) + found[2], value)
    return f"'{value}'"


RESERVED = re.compile(r"null|true|false|nan|[+-]?inf|[+-]?\.?\d.*", flags=re.IGNORECASE)
