"""The cache of prepared data: directories named by a hash, each made whole by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from tapernorm.config.options import Config
from tapernorm.config.schema import ConfigError

log = logging.getLogger(__name__)

REPORT = "report.json"
BLOCK, BLOCKS = 1 << 20, 512  # bytes, and how many at most a checksum reads
Found = TypeVar("Found")  # what is read from an entry


def root(config: Config) -> Path:
    """config.cache_dir, else $TAPERNORM_CACHE, else ~/.cache/tapernorm; absolute."""
    chosen = config.cache_dir or os.environ.get("TAPERNORM_CACHE") or "~/.cache/tapernorm"
    return Path(chosen).expanduser().absolute()


def hash_of(parts: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def find_or_make(
    entry: Path,
    dataset: str,
    fill: Callable[[Path], dict[str, Any]],
    read: Callable[[Path], Found],
) -> tuple[Found, bool]:
    """(What `read` finds in an entry of a data set, whether `fill` made it now); a line says which.

    fill: writes all files but the report, which it returns, into a directory.
    """
    with contextlib.ExitStack() as stack:
        found, how = find(entry, read)[0], ""
        if found is None:
            stack.enter_context(_lock(entry, dataset))
            (found, fault), how = find(entry, read), ", just made by another process"
        if found is not None:
            log.info(f"dataset {dataset}: reused {found} ({entry}{how})")
            return found, False
        if fault:
            log.info(f"dataset {dataset}: {entry} is damaged ({fault}); preparing it again")
        started = time.monotonic()
        _make(entry, fill)
        found, fault = find(entry, read)
        if found is None:
            raise ConfigError(f"cache_dir={entry.parent} does not keep what is written to it: {fault}")
        log.info(f"dataset {dataset}: prepared {found} in {time.monotonic() - started:.1f} s ({entry})")
        return found, True


def find(entry: Path, read: Callable[[Path], Found]) -> tuple[Found | None, str]:
    """What `read` finds in the entry, or None and what is wrong with it ('' when it does not exist)."""
    if not entry.is_dir():
        return None, ""
    try:
        found = read(entry)
        for name, known in read_report(entry).get("checksums", {}).items():
            if checksum(entry / name) != known:
                return None, f"{name} is not as it was written"
        return found, ""
    except OSError as error:
        return None, f"{Path(error.filename or entry).name}: {error.strerror}"
    except (ValueError, KeyError) as error:
        return None, str(error)


def _lock(entry: Path, dataset: str) -> contextlib.AbstractContextManager[Any]:
    """The entry's lock, held until it is left."""
    from filelock import FileLock, Timeout

    lock = FileLock(f"{entry}.lock")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        try:
            return lock.acquire(timeout=0.5)
        except Timeout:
            log.info(f"dataset {dataset}: waiting for another process that prepares {entry}")
            return lock.acquire()
    except OSError as error:
        raise _unwritable(entry, error) from None


def _make(entry: Path, fill: Callable[[Path], dict[str, Any]]) -> None:
    """Let `fill` write a whole entry under a temporary name and rename it; the caller holds the entry's lock."""
    prefix = f"{entry.name}.tmp-"
    for left in entry.parent.glob(f"{glob.escape(prefix)}*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory(prefix=prefix, dir=entry.parent, ignore_cleanup_errors=True) as folder:
            work = Path(folder, "entry")  # the folder itself is private, and a cache may be shared
            work.mkdir()
            report = fill(work)
            report["checksums"] = {path.name: checksum(path) for path in sorted(work.iterdir()) if path.is_file()}
            write(work / REPORT, json.dumps(report, indent=2, ensure_ascii=False))
            shutil.rmtree(entry, ignore_errors=True)  # a damaged one
            work.rename(entry)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        raise _unwritable(entry, error) from None


def _unwritable(entry: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cache_dir={entry.parent} cannot be written: {error.strerror}")


def checksum(path: Path) -> str:
    """BLAKE2 of the file; where it has more than BLOCKS blocks, of so many evenly spread ones, to start soon."""
    digest, size = hashlib.blake2b(digest_size=16), path.stat().st_size
    whole = size <= BLOCKS * BLOCK
    with path.open("rb") as file:
        for index in range(math.ceil(size / BLOCK) if whole else BLOCKS):
            file.seek(index * BLOCK if whole else index * (size - BLOCK) // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def read_report(entry: Path) -> dict[str, Any]:
    return json.loads((entry / REPORT).read_text(encoding="utf-8"))


def write(path: Path, text: str) -> None:
    with path.open("wb") as file:
        file.write(text.encode())
        sync(file)


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
