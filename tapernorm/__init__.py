"""tapernorm: train transformers whose normalization layers can be tapered away, and see what they do."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tapernorm.runtime.revision import __version__, git_revision

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


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'tapernorm' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
