"""tapernorm: train transformers whose normalization layers can be tapered away, and see what they do."""

from __future__ import annotations

import importlib
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapernorm.cli.api import Run, RunFailed, compose, load, report, sweep, train
    from tapernorm.config.schema import ConfigError
    from tapernorm.conversion.convert import convert

_LAZY = {  # not before they are asked for: torch takes a second
    "convert": "tapernorm.conversion.convert",
    "ConfigError": "tapernorm.config.schema",
    **dict.fromkeys(("Run", "RunFailed", "compose", "load", "report", "sweep", "train"), "tapernorm.cli.api"),
}
__all__ = [
    "ConfigError",
    "Run",
    "RunFailed",
    "__version__",
    "compose",
    "convert",
    "git_revision",
    "load",
    "report",
    "sweep",
    "train",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'tapernorm' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


@cache
def git_revision() -> str | None:
    """The commit of this source tree, with -dirty if files differ from it; None when it is not a checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():  # installed somewhere inside another project's checkout, perhaps
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
