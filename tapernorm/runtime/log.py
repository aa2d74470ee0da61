"""log"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tapernorm.config.schema import (
    ConfigError,
)

Say = Callable[[str], None]


class InUse(ConfigError):
    """Another process works in this run's directory."""


@contextmanager
def open_log(directory: Path) -> Iterator[Say]:
    """Yield `say`, which prints a line and appends it to run.log.

    The log is locked as long as the run lasts, so that no second process goes on with the same run. The lock goes
    away with its process, also when that is killed.
    """
    try:
        file = (directory / "run.log").open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}") from None
    lost = False
    with closing_quietly(file):
        if not _lock(file.fileno()):
            time.sleep(0.2)  # whoever only asks, in `in_use`, holds the lock for a moment, too
        if not _lock(file.fileno()):
            raise InUse(f"{directory} is in use by another process")

        def say(text: str) -> None:
            nonlocal lost
            try:
                file.write(text + "\n")
                file.flush()
            except OSError as error:  # the log is no part of the results
                if not lost:
                    lost = True
                    say(f"warning: {directory / 'run.log'} cannot be written: {error.strerror}; the run goes on")
            with suppress(OSError):  # whoever read along has gone; the run goes on, and its log
                print(text, flush=True)

        yield say


@contextmanager
def closing_quietly(file: IO[str]) -> Iterator[None]:
    """Close a file at the end; what a full disk did not take is let go."""
    try:
        yield
    finally:
        with suppress(OSError):
            file.close()


def append_log(directory: Path, text: str) -> None:
    """Append to run.log if that is possible: what is told there has been, or will be, told in one line, too."""
    with suppress(OSError), (directory / "run.log").open("a", encoding="utf-8") as file:
        file.write(text.rstrip("\n") + "\n")


def _lock(handle: int) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows: no lock
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def in_use(directory: Path) -> bool:
    """Whether a process works in this run's directory; creates nothing."""
    try:
        with (directory / "run.log").open("r+") as file:
            return not _lock(file.fileno())
    except OSError:
        return False
