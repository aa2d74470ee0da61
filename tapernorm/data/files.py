"""Local files of documents: text, JSON lines and CSV, each also compressed, and parquet: found, hashed and read."""

from __future__ import annotations

import codecs
import collections
import csv
import glob
import gzip
import hashlib
import io
import itertools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from tapernorm.config.schema import ConfigError
from tapernorm.data.tokenizer import END_OF_TEXT

log = logging.getLogger(__name__)
csv.field_size_limit(1 << 30)  # a document is longer than the usual 128 kB

# A local copy that has several uses the first.
SUFFIXES = (".parquet", *(kind + packed for kind in (".jsonl", ".csv", ".txt") for packed in ("", ".zst", ".gz")))
ABOUT = re.compile(r"(LICEN[CS]E|README|NOTICE|COPYING)\b", flags=re.IGNORECASE)  # of a folder's files, no documents
NAMES = ", ".join(SUFFIXES)
MAGIC = {  # what a file begins with that is not what its name says
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstandard",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "parquet",
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
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
            paths = _files_in(path, f"{key}={item}")
            problem = f"the folder has no {NAMES} file"
        elif path.exists():
            if not path.is_file():
                raise ConfigError(f"{key}={item} is neither a file nor a folder")
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
    found = _files_in(path, where)
    candidates = []
    for suffix in SUFFIXES:
        named: dict[str | None, list[Path]] = collections.defaultdict(list)
        for file in found:
            if _suffix(file) == suffix:
                named[_split_of(file.relative_to(path))].append(file)
        candidates.append({"train": named["train"] or named[None], "valid": named["valid"]})
    best = max(candidates, key=lambda files: sum(map(bool, files.values())))
    if not any(best.values()):
        names = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
        raise ConfigError(f"{where} needs files named *train* and *valid*, both {NAMES}; the folder has {names}")
    return best


def _check_suffix(path: Path, where: str) -> None:
    if _suffix(path) not in SUFFIXES:
        raise ConfigError(f"{where} is none of {NAMES}; rename or convert it")


def _files_in(folder: Path, where: str) -> list[Path]:
    """Files of documents in a folder and those below it, linked ones too; says what else there is.

    Hidden ones, which systems leave there, and what unpacking on a Mac adds are no files of the user's.
    """
    found: list[Path] = []
    others: list[Path] = []
    seen = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(parent)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__MACOSX"]
        for path in (Path(parent, name) for name in names if not name.startswith(".")):
            wanted = _suffix(path) in SUFFIXES and not ABOUT.match(path.name) and path.is_file()
            (found if wanted else others).append(path)
    if others:
        some = ", ".join(sorted(str(path.relative_to(folder)) for path in others)[:5]) + ", ..." * (len(others) > 5)
        log.info(f"{where}: {len(others)} other files are not read: {some}")
    return sorted(found)


def _split_of(path: Path) -> str | None:
    """The split that a path names; in 'train/val.txt' the file's own name decides."""
    for part in reversed(path.parts):
        for split, names in SPLIT_NAMES.items():
            if re.search(rf"(?<![a-z])({names})(?![a-z])", part.lower()):
                return split
    return None


def _suffix(path: Path) -> str:
    return "".join(path.suffixes[-2:]) if path.suffix in (".zst", ".gz") else path.suffix


# -------------------------------------------------------------------------------------------------------------- reading


def read_files(paths: list[Path], field: str, key: str) -> Iterator[Raw]:
    """Documents of the files, one at a time. key: where the name of the column stands, `field`, for messages."""
    readers = {"txt": _read_txt, "jsonl": _read_jsonl, "csv": _read_csv, "parquet": _read_parquet}
    for path in paths:
        try:
            yield from readers[_suffix(path).split(".")[1]](path, field, key)
        except (EOFError, OSError) as error:  # such as a compressed file that is cut short
            raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from None


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
    """Documents between the marks `<|endoftext|>`, wherever these stand; in a file without one every line is one."""
    separator = END_OF_TEXT.encode()
    with _open(path) as file:
        separated = any(separator in line for line in file)
    with _open(path) as file:
        document: list[bytes] = []
        first = 1
        for number, line in enumerate(file, 1):
            *ended, rest = line.split(separator) if separated else (line, b"")
            for part in ended:
                yield _decode(b"".join([*document, part]), path, first)
                document, first = [], number if separated else number + 1
            document.append(rest)
        if b"".join(document).strip():  # the last mark may be missing
            yield _decode(b"".join(document), path, first)


def _open(path: Path) -> BinaryIO:
    """The file, unpacked, after its byte order mark. Raises ConfigError for what is not text in UTF-8."""
    if path.suffix == ".zst":
        import pyarrow as pa

        file = cast(BinaryIO, io.BufferedReader(pa.input_stream(str(path), compression="zstd")))
    else:
        file = cast(BinaryIO, gzip.open(path) if path.suffix == ".gz" else path.open("rb"))  # noqa: SIM115
    start = cast(io.BufferedReader, file).peek(4)[:4]
    for magic, name in MAGIC.items():
        if start.startswith(magic):
            file.close()
            remedy = "save it as UTF-8" if name.startswith("UTF") else f"give it the name that says so: {NAMES}"
            raise ConfigError(f"{path} is {name}; {remedy}")
    if start.startswith(codecs.BOM_UTF8):
        file.read(len(codecs.BOM_UTF8))
    return file


def _read_csv(path: Path, field: str, key: str) -> Iterator[Raw]:
    """One column of a table whose first row names them."""
    with _open(path) as file:
        rows = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline=""))
        if field not in (rows.fieldnames or ()):
            raise no_column(field, rows.fieldnames or (), str(path), key)
        try:
            for row in rows:
                yield _decode((row[field] or "").encode(errors="surrogateescape"), path, rows.line_num)
        except csv.Error as error:
            raise ConfigError(f"{path} line {rows.line_num}: {error}") from None


def _read_jsonl(path: Path, field: str, key: str) -> Iterator[Raw]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            text, bad = _decode(line, path, number)
            where = f"{path} line {number}"
            try:
                row = json.loads(text)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise ConfigError(f"{where} is not a JSON object with a field '{field}'; see {key}")
            if field not in row:
                raise no_column(field, row, where, key)
            yield Raw(text_of(row[field], field, where, key), bad)


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
