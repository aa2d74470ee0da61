"""What the check-up of a machine finds, in one line without secrets; and processes that may crash or hang."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", flags=re.IGNORECASE)


@dataclass(frozen=True)
class Finding:
    """One line of the report. A problem stops ordinary use; a warning limits, slows or endangers some of it."""

    mark: Literal["ok", "warning", "problem"]
    topic: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.mark:<8} {self.topic}: {self.text}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Options:
    """Where to look, and which modules turned out not to be importable."""

    runs_dir: str = "runs"
    cache_dir: str | None = None
    broken: Mapping[str, str] = field(default_factory=dict)


Check = Callable[[Options], Iterable[Finding]]
ok, warning, problem = (partial(Finding, mark) for mark in ("ok", "warning", "problem"))


def ok_if(fine: object, topic: str, text: str, remedy: str, otherwise: Callable[..., Finding] = warning) -> Finding:
    return ok(topic, text) if fine else otherwise(topic, text, remedy)


def redact(text: str) -> str:
    """`text` in one line without secrets of the environment, passwords of addresses and the home directory's name."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) > 5:
            text = text.replace(value, "***")
    text = re.sub(r"(\w+://)[^/\s@]*@", r"\1***@", text)
    home = os.path.expanduser("~")  # noqa: PTH111  (Path.home() raises where there is none)
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?=/|\W|$)", "~", text)
    return " ".join(text.split())


_children: set[subprocess.Popen[str]] = set()


def in_child(code: str, *arguments: str, seconds: float, **environment: str) -> tuple[int | None, str, str]:
    """Run Python code in a process of its own: (status, None past the time limit; standard output; standard error)."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", **environment},
        start_new_session=True,  # so that its own children end with it
    )
    _children.add(child)
    try:
        out, said = child.communicate(timeout=seconds)
        return child.returncode, out, said
    except subprocess.TimeoutExpired:
        _end(child)
        return None, *child.communicate()
    finally:
        _end(child)
        _children.discard(child)


def _end(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        with suppress(OSError):  # it has ended meanwhile
            os.killpg(child.pid, signal.SIGKILL) if os.name == "posix" else child.kill()


def end_children() -> None:
    for child in list(_children):
        _end(child)


def last_line(said: str, code: int | None) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"status {code}"
