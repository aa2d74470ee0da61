"""The command: `tapernorm train`, `evaluate`, ... and the programs of a checkout, which are the same functions.

Only the standard library is imported here: `doctor` has to work where nothing else does.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tapernorm.runtime.revision import __version__, git_revision
from tapernorm.runtime.typed import command

# What each program is, in the list that `tapernorm --help` prints.
PROGRAMS = {
    "train": "train a model, or with -m a sweep of them",
    "evaluate": "losses of checkpoints, folded and compared",
    "generate": "continue a text",
    "report": "a page, tables and figures of runs and sweeps",
    "export": "write a checkpoint as a model for transformers",
    "benchmark": "how fast decoding is, with norms and without",
    "doctor": "what this machine has of what is needed",
}


def main() -> None:
    """The console command and `python -m tapernorm`."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        width = max(map(len, PROGRAMS))
        rows = "\n".join(f"  {program:<{width}}  {about}" for program, about in PROGRAMS.items())
        print(f"usage: tapernorm PROGRAM key=value ...\n\n{rows}\n\ntapernorm PROGRAM --help lists its keys.")
    elif name == "--version":
        print(version())
    elif name not in PROGRAMS:
        print(f"error: tapernorm has no program {name}; it has {', '.join(PROGRAMS)}", file=sys.stderr)
        sys.exit(2)
    else:
        module = Path(sys.argv[0]).name == "__main__.py"
        os.environ["TAPERNORM_COMMAND"] = "python -m tapernorm" if module else "tapernorm"
        sys.argv[1:] = arguments
        start(name)


def start(name: str) -> None:
    """Run a program with the arguments in sys.argv: what train.py, evaluate.py and scripts/ do, too."""
    if "--version" in sys.argv[1:]:
        print(version())
    elif name in ("report", "doctor"):
        importlib.import_module(f"tapernorm.cli.{name}_command").main()
    else:
        importlib.import_module("tapernorm.cli.main").launch(name)


def parser_of(name: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of a program that is not Hydra's; COMMAND in `about` is what starts it."""
    about = (about or "").replace("COMMAND", command(name))
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=command(name), description=about, formatter_class=formatter)


def spelled(arguments: Sequence[str] | None, *keys: str) -> list[str]:
    """key=value as the option that argparse knows: report and doctor take both."""
    arguments = sys.argv[1:] if arguments is None else arguments
    pairs = [argument.partition("=") for argument in arguments]
    return [f"--{key.replace('_', '-')}={value}" if key in keys else key + is_ + value for key, is_, value in pairs]


def version() -> str:
    """Which code runs."""
    return f"tapernorm {__version__} ({git_revision() or 'installed'}), in {Path(__file__).resolve().parents[2]}"
