"""Local files of documents: .txt, .jsonl, .jsonl.zst and .parquet, found, told apart, hashed and read."""

from __future__ import annotations

import codecs
import collections
import glob
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from tapernorm.config.schema import ConfigError
from tapernorm.data.tokenizer import END_OF_TEXT

SUFFIXES = (".parquet", ".jsonl", ".jsonl.zst", ".txt")  # a local copy that has several uses the first
SPLIT_NAMES = {"train": "train", "valid": "val|valid|validation|dev", "test": "test"}


class Raw(NamedTuple):
    """One document as it lies in its file; `bad`: file and line (in parquet, row) of its first byte not in UTF-8."""

    text: str
    bad: tuple[str, int] | None = None


def hash_files(paths: list[Path], key: str, limit: int | None = None) -> str:
    """One hash of the files' bytes, in order; names and dates do not matter.

    limit: of a file that has more than twice as many bytes, its size and so many at both ends stand for all: hundreds
    of gigabytes would take longer to hash than the part that is wanted of them to prepare.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                if limit is None or size <= 2 * limit:
                    digest.update(hashlib.file_digest(file, hashlib.blake2b).digest())
                else:
                    digest.update(b"%d" % size + file.read(limit))
                    file.seek(-limit, os.SEEK_END)
                    digest.update(file.read())
        except OSError as error:
            raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


# -------------------------------------------------------------------------------------------------------------- finding


def find_files(key: str, value: str | tuple[str, ...]) -> list[Path]:
    """Files of a path, folder or glob, or of a list of them, in order, each once."""
    found: list[Path] = []
    for item in (value,) if isinstance(value, str) else value:
        path = Path(item).expanduser()
        problem = f"no such file, folder or match, looked from {Path.cwd()}"
        if path.is_dir():
            paths = [file for file in _files_in(path) if _suffix(file) in SUFFIXES]
            problem = f"the folder has no {', '.join(SUFFIXES)} file"
        elif path.exists():
            paths = [path]
        else:
            paths = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())  # noqa: PTH207
        if not paths:
            raise ConfigError(f"{key}={item}: {problem}")
        found += paths
    for path in found:
        _check_suffix(path, f"{key}: {path}")
    return list(dict.fromkeys(found))


def find_splits(path: Path, where: str) -> dict[str, list[Path]]:
    """A file for training, or a folder's files of one suffix, the first that has both splits, or any; by their names.

    Raises ConfigError, which `where` begins, when there are none.
    """
    if path.is_file():
        _check_suffix(path, where)
        return {"train": [path], "valid": []}
    found = _files_in(path)
    candidates = []
    for suffix in SUFFIXES:
        named: dict[str | None, list[Path]] = collections.defaultdict(list)
        for file in found:
            if _suffix(file) == suffix:
                named[_split_of(file.relative_to(path))].append(file)
        candidates.append({"train": named["train"] or named[None], "valid": named["valid"]})
    best = max(candidates, key=lambda files: sum(map(bool, files.values())))
    if not any(best.values()):
        names = ", ".join(str(file.relative_to(path)) for file in found[:8]) or "nothing"
        raise ConfigError(
            f"{where} needs files named *train* and *valid*, both {', '.join(SUFFIXES)}; the folder has {names}"
        )
    return best


def _check_suffix(path: Path, where: str) -> None:
    if _suffix(path) not in SUFFIXES:
        raise ConfigError(f"{where} is none of {', '.join(SUFFIXES)}; rename or convert it")


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _split_of(path: Path) -> str | None:
    """The split that a path names; in 'train/val.txt' the file's own name decides."""
    for part in reversed(path.parts):
        for split, names in SPLIT_NAMES.items():
            if re.search(rf"(?<![a-z])({names})(?![a-z])", part.lower()):
                return split
    return None


def _suffix(path: Path) -> str:
    return "".join(path.suffixes[-2:]) if path.suffix == ".zst" else path.suffix


# -------------------------------------------------------------------------------------------------------------- reading


def read_files(paths: list[Path], field: str, key: str) -> Iterator[Raw]:
    """Documents of the files, one at a time. key: where the name of the column stands, `field`, for messages."""
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".jsonl.zst": _read_jsonl, ".parquet": _read_parquet}
    for path in paths:
        yield from readers[_suffix(path)](path, field, key)


def no_column(field: str, names: Iterable[str], where: str, key: str) -> ConfigError:
    return ConfigError(f"{where} has no column '{field}', it has {', '.join(names)}; see {key}")


def text_of(value: Any, field: str, where: str, key: str) -> str:
    """A document as a reader found it, None being empty. Raises ConfigError when it is no text."""
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{where}: column '{field}' is {type(value).__name__}, not text; see {key}")
    return value or ""


def _decode(data: bytes, file: Path, first: int) -> Raw:
    """Text of `data`, which starts at line `first`; lines that are not UTF-8 are read as cp1252, and said so."""
    lines, bad = [], None
    for number, line in enumerate(data.split(b"\n"), first):
        try:
            lines.append(line.decode("utf-8"))
        except UnicodeDecodeError:
            lines.append(line.decode("cp1252", errors="replace"))
            bad = bad or (str(file), number)
    return Raw("\n".join(lines), bad)


def _read_txt(path: Path, field: str, key: str) -> Iterator[Raw]:
    """Documents between lines `<|endoftext|>`; in a file without such a line every line is one."""
    separator = END_OF_TEXT.encode()
    with path.open("rb") as file:
        mark = file.read(3)
        if mark[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise ConfigError(f"{path} is UTF-16; save it as UTF-8")
        start = len(mark) if mark == codecs.BOM_UTF8 else 0  # the mark is no text
        file.seek(start)
        separated = any(line.strip() == separator for line in file)
        file.seek(start)
        document: list[bytes] = []
        first = 1
        for number, line in enumerate(file, 1):
            ends = line.strip() == separator
            if not ends:
                document.append(line)
            if ends or not separated:
                yield _decode(b"".join(document), path, first)
                document, first = [], number + 1
        if b"".join(document).strip():  # the last separator may be missing
            yield _decode(b"".join(document), path, first)


def _open(path: Path) -> BinaryIO:
    if path.suffix != ".zst":
        return path.open("rb")
    import pyarrow as pa

    return cast(BinaryIO, io.BufferedReader(pa.input_stream(str(path), compression="zstd")))


def _read_jsonl(path: Path, field: str, key: str) -> Iterator[Raw]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            text, bad = _decode(line.removeprefix(codecs.BOM_UTF8), path, number)
            where = f"{path} line {number}"
            try:
                value = json.loads(text)[field]
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f"{where} is not a JSON object with a field '{field}'; see {key}") from None
            yield Raw(text_of(value, field, where, key), bad)


def _read_parquet(path: Path, field: str, key: str) -> Iterator[Raw]:
    """Rows of one column, a batch at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from None
    with file:
        if field not in file.schema_arrow.names:
            raise no_column(field, file.schema_arrow.names, str(path), key)
        numbers = itertools.count(1)
        for batch in file.iter_batches(batch_size=1024, columns=[field]):
            column = batch.column(0)
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            try:
                values = column.cast(pa.large_binary()).to_pylist()  # bytes: text that is not UTF-8 is located later
            except pa.ArrowException:
                raise ConfigError(f"{path}: column '{field}' is {column.type}, not text; see {key}") from None
            for number, value in zip(numbers, values, strict=False):
                yield _decode(value or b"", path, number)
