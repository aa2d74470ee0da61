"""What the package says, by the standard `logging`; run.log; run.lock, which keeps a second process out of a run."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path

from filelock import FileLock, Timeout
from tqdm import tqdm

from tapernorm.config.schema import ConfigError, no_link

LOGGER = logging.getLogger("tapernorm")
LOCK_FILE = "run.lock"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")  # all but tab and newline


class InUse(ConfigError):
    """Another process works in this run's directory."""


def printable(text: str) -> str:
    """`text` without what steers a terminal, as a model may write it: control characters become U+FFFD."""
    return CONTROLS.sub("\ufffd", text)


class Lines(logging.Formatter):
    """A message as it is, a warning with the word before it."""

    def format(self, record: logging.LogRecord) -> str:
        return ("warning: " if record.levelno >= logging.WARNING else "") + printable(super().format(record))


class Console(logging.Handler):
    """Prints on a standard stream, looked up each time: it may be redirected. A progress bar goes out of the way."""

    def __init__(self, stream: str) -> None:
        super().__init__()
        self.stream = stream
        self.setFormatter(Lines())

    def emit(self, record: logging.LogRecord) -> None:
        stream = getattr(sys, self.stream)
        with suppress(OSError), tqdm.external_write_mode(file=stream):  # it was closed, e.g. by head
            print(self.format(record), file=stream, flush=True)


def to_console(stream: str = "stdout") -> None:
    """Print what the package says; once, however often it is called."""
    if not any(isinstance(handler, Console) for handler in LOGGER.handlers):
        LOGGER.addHandler(Console(stream))
        LOGGER.setLevel(logging.INFO)
        LOGGER.propagate = False  # the root logger's handlers would print it once more


@contextmanager
def quiet() -> Iterator[None]:
    """Say nothing inside."""
    before = LOGGER.level
    LOGGER.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        LOGGER.setLevel(before)


class RunLog(logging.FileHandler):
    """run.log, which is no part of the results: that it cannot be written is said once, on the console."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self.setFormatter(Lines())
        self.lost = False

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=no_link)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.lost:
            self.lost = True
            LOGGER.warning(f"{self.baseFilename} cannot be written: {error.strerror}; the run goes on")


@contextmanager
def open_log(directory: Path) -> Iterator[None]:
    """What is said inside is printed and goes to run.log, too; the directory is locked meanwhile."""
    to_console()
    try:
        file = RunLog(directory / "run.log")
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}") from None
    try:
        with _locked(directory, seconds=0.2):  # `in_use` holds the lock for a moment, too
            LOGGER.addHandler(file)
            yield
    finally:
        LOGGER.removeHandler(file)
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
    with suppress(OSError), open(directory / "run.log", "a", encoding="utf-8", opener=no_link) as file:
        file.write(text.rstrip("\n") + "\n")
