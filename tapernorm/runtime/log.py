"""run.log, what a run says; and run.lock beside it, which keeps a second process out of a run's directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from tapernorm.config.schema import ConfigError

Say = Callable[[str], None]
LOCK_FILE = "run.lock"


class InUse(ConfigError):
    """Another process works in this run's directory."""


@contextmanager
def open_log(directory: Path) -> Iterator[Say]:
    """Yield `say`, which prints a line and appends it to run.log, with the directory locked inside."""
    try:
        file = (directory / "run.log").open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}") from None
    lost = False

    def say(text: str) -> None:
        nonlocal lost
        try:
            file.write(text + "\n")
            file.flush()
        except OSError as error:  # the log is no part of the results
            if not lost:
                lost = True
                say(f"warning: {directory / 'run.log'} cannot be written: {error.strerror}; the run goes on")
        with suppress(OSError):  # stdout was closed, e.g. by head
            print(text, flush=True)

    try:
        with _locked(directory, seconds=0.2):  # `in_use` holds the lock for a moment, too
            yield say
    finally:
        with suppress(OSError):  # what a full disk did not take
            file.close()


@contextmanager
def _locked(directory: Path, seconds: float) -> Iterator[None]:
    """Hold the lock of a run's directory, which goes away with its process. Raises InUse if another one holds it."""
    lock = FileLock(directory / LOCK_FILE)
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        raise InUse(f"{directory} is in use by another process") from None
    except (OSError, NotImplementedError):  # a file system without locks
        pass
    try:
        yield
    finally:
        lock.release()


def in_use(directory: Path) -> bool:
    """Whether a process works in this run's directory; creates nothing."""
    if not (directory / LOCK_FILE).exists():
        return False
    try:
        with _locked(directory, seconds=0):
            return False
    except InUse:
        return True


def append_log(directory: Path, text: str) -> None:
    """Append to run.log if that is possible: what is told there has been, or will be, told in one line, too."""
    with suppress(OSError), (directory / "run.log").open("a", encoding="utf-8") as file:
        file.write(text.rstrip("\n") + "\n")
