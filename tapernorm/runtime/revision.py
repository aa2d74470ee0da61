"""Which code runs."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

__version__ = "0.1.0"


@cache
def git_revision() -> str | None:
    """The commit of this source tree, with -dirty if files differ from it; None when it is not a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # installed somewhere inside another project's checkout, perhaps
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
