"""Where documents come from, and what is mended in them before they become tokens.

A `Source` yields the raw documents of a split, one at a time, from the embedded generator, local files or the hub;
`Source.clean` normalises them, drops the empty and the repeated, and counts what it did.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import io
import itertools
import json
import math
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from tapernorm.config.options import HubDatasetConfig, PlainDatasetConfig, TextDatasetConfig, ToyDatasetConfig
from tapernorm.config.schema import ConfigError
from tapernorm.data import toy
from tapernorm.data.tokenizer import END_OF_TEXT

VALID_START = 1 << 40  # toy stories from this index on validate
LISTED_BAD_BYTES = 20
SUFFIXES = (".parquet", ".jsonl", ".jsonl.zst", ".txt")  # a local copy that has several uses the first
SPLIT_NAMES = {"train": r"train", "valid": r"val|valid|validation|dev", "test": r"test"}
HASHED_BYTES = 1 << 25  # at both ends of a file of a local copy that is not read to its end


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


# ------------------------------------------------------------------------------------------------------------- cleaning

COUNTS = {  # what the report counts, in words
    "dropped_empty": "empty and dropped",
    "repaired": "repaired",
    "duplicates": "duplicates dropped",
    "in_train": "dropped because they are in the training split",
}
# a UTF-8 lead byte read as cp1252 and what the bytes that follow it look like then, as in 'donâ€™t' and 'cafÃ©'
MOJIBAKE = re.compile("[ÂÃâðÅÄÎÐ][\u0080-\u00bf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]")
ODD = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\ufeff\ud800-\udfff]")  # controls, invisible, lone surrogates


def empty_report() -> dict[str, Any]:
    counts = ("documents", "tokens", "bytes", *COUNTS)
    return {**dict.fromkeys(counts, 0), "bad_bytes": []}


def clean(text: str) -> tuple[str, bool]:
    """(document, was it repaired): mojibake undone, odd code points dropped, NFC, '\\n' line ends, stripped."""
    document = text
    if MOJIBAKE.search(document):
        import ftfy

        document = ftfy.fix_encoding(document)
    if ODD.search(document):
        document = ODD.sub("", document)
    repaired = document != text
    document = document.replace("\r\n", "\n").replace("\r", "\n")
    return unicodedata.normalize("NFC", document).strip(), repaired


def document_hash(text: str, seed: int = 0) -> int:
    """64 bits that stand for a document: two of two million that differ share them with a chance of 1e-7.

    seed: another one hashes otherwise (0 is BLAKE2 without salt).
    """
    salt = seed.to_bytes(hashlib.blake2b.SALT_SIZE, "little")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, salt=salt).digest(), "big")


def _decode(data: bytes, file: Path, line: int) -> Raw:
    """Text of `data`, which starts at `line` of `file`; lines that are not UTF-8 are read as cp1252, and said so."""
    try:
        return Raw(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        bad = (str(file), line + data.count(b"\n", 0, error.start))
    lines = []
    for part in data.split(b"\n"):  # the document's other lines are UTF-8
        try:
            lines.append(part.decode("utf-8"))
        except UnicodeDecodeError:
            lines.append(part.decode("cp1252", errors="replace"))
    return Raw("\n".join(lines), bad)


# -------------------------------------------------------------------------------------------------------------- sources


@dataclasses.dataclass(frozen=True)
class Source:
    """Where documents come from. identity: what determines them; read: raw ones of 'train' or 'valid'.

    held_out: share of the documents of 'train' that is 'valid', by hash with split_seed; None: the splits are read
    apart. limits: how many documents of a split there are at most; no more is read than it takes to find them.
    """

    where: str
    identity: dict[str, Any]
    read: Callable[[str], Iterator[Raw]]
    held_out: float | None = None
    split_seed: int = 0
    limits: Mapping[str, int | None] = dataclasses.field(default_factory=dict)

    def clean(
        self, split: str, report: dict[str, Any], seen: set[int], in_train: set[int] | None = None
    ) -> Iterator[str]:
        """Clean, distinct documents of a split, in order; counts what it drops in `report`, adds hashes to `seen`."""
        return itertools.islice(self._clean(split, report, seen, in_train or set()), self.limits.get(split))

    def _clean(self, split: str, report: dict[str, Any], seen: set[int], in_train: set[int]) -> Iterator[str]:
        for raw in self.read(split):
            text, repaired = clean(raw.text)
            key = document_hash(text, self.split_seed)
            if self.held_out is not None and (key < self.held_out * 2**64) != (split == "valid"):
                continue  # belongs to the other split, which counts it
            if raw.bad and len(report["bad_bytes"]) < LISTED_BAD_BYTES:
                report["bad_bytes"].append({"file": raw.bad[0], "line": raw.bad[1]})
            if not text:
                report["dropped_empty"] += 1
            elif key in seen:
                report["duplicates"] += 1
            elif key in in_train:
                report["in_train"] += 1
            else:
                report["repaired"] += repaired or raw.bad is not None
                seen.add(key)
                yield text


def open_source(dataset: PlainDatasetConfig, key: str = "dataset") -> Source:
    """The source of a data set, whose configuration stands at `key`. Raises ConfigError for a missing local file."""
    if isinstance(dataset, ToyDatasetConfig):
        return _toy_source(dataset)
    if isinstance(dataset, TextDatasetConfig):
        return _text_source(dataset, key)
    # a hub id has at most one slash and starts with a letter
    local = Path(dataset.path).expanduser()
    if local.exists() or dataset.path[:1] in ("", ".", "/", "~") or dataset.path.count("/") > 1:
        return _local_source(dataset, local, key)
    return _hub_source(dataset, key)


def _toy_source(dataset: ToyDatasetConfig) -> Source:
    counts = {"train": dataset.stories, "valid": dataset.valid_stories}
    starts = {"train": 0, "valid": VALID_START}

    def read(split: str) -> Iterator[Raw]:
        stories = itertools.islice(toy.stories(dataset.seed, starts[split]), counts[split])
        return (Raw(story) for story in stories)

    identity = {"toy": toy.VERSION, "seed": dataset.seed, **counts}
    return Source("the toy generator", identity, read)


def _text_source(dataset: TextDatasetConfig, key: str) -> Source:
    named = {"valid": dataset.valid, "train": dataset.train}
    files = {split: _find_files(f"{key}.{split}", value) for split, value in named.items() if value is not None}
    hashes = {split: hash_files(paths, f"{key}.{split}") for split, paths in files.items()}
    held_out = dataset.held_out if dataset.valid is None else None

    def read(split: str) -> Iterator[Raw]:
        return _read_files(files[split if held_out is None else "train"], dataset.field, key)

    identity = {**hashes, "held_out": held_out, "field": dataset.field}
    return Source(f"{key}.train={dataset.train}", identity, read, held_out)


def _local_source(dataset: HubDatasetConfig, path: Path, key: str) -> Source:
    """A file, or a folder's files of one suffix, the first that has both splits, or any; names tell the splits apart.

    Where none is named *valid*, it is held out of the others.
    """
    where = f"{key}.path={dataset.path}"
    if not path.exists():
        raise ConfigError(f"{where}: there is no file or folder {path.absolute()}")
    files = {"train": [path], "valid": []} if path.is_file() else _local_splits(path, where)
    held_out = None if files["valid"] else dataset.held_out
    for file in files["train"]:
        if _suffix(file) not in SUFFIXES:
            raise ConfigError(f"{where} is none of {', '.join(SUFFIXES)}; rename or convert it")

    def read(split: str) -> Iterator[Raw]:
        return _read_files(files[split if held_out is None else "train"], dataset.field, key)

    limit = None if dataset.max_stories is None else HASHED_BYTES
    hashes = {split: hash_files(paths, f"{key}.path", limit) for split, paths in files.items()}
    return _limited(dataset, where, hashes | {"max_stories": str(dataset.max_stories)}, read, held_out)


def _local_splits(folder: Path, where: str) -> dict[str, list[Path]]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    usable = []
    for suffix in SUFFIXES:
        named = {
            split: [path for path in found if _suffix(path) == suffix and _split_of(path.relative_to(folder)) == split]
            for split in (*SPLIT_NAMES, None)
        }
        usable.append({"train": named["train"] or named[None], "valid": named["valid"]})
    best = max(usable, key=lambda files: bool(files["train"]) + bool(files["valid"]))
    if not best["train"] and not best["valid"]:
        names = ", ".join(str(path.relative_to(folder)) for path in found[:8]) or "nothing"
        raise ConfigError(
            f"{where} needs files named *train* and *valid*, both {', '.join(SUFFIXES)}; the folder has {names}"
        )
    return best


def _split_of(path: Path) -> str | None:
    """The split that a path names; in 'train/val.txt' the file's own name decides."""
    for part in reversed(path.parts):
        for split, names in SPLIT_NAMES.items():
            if re.search(rf"(?<![a-z])({names})(?![a-z])", part.lower()):
                return split
    return None


def _suffix(path: Path) -> str:
    return "".join(path.suffixes[-2:]) if path.suffix == ".zst" else path.suffix


def _limited(
    dataset: HubDatasetConfig,
    where: str,
    identity: dict[str, Any],
    read: Callable[[str], Iterator[Raw]],
    held_out: float | None,
) -> Source:
    """The source with the configured limits and held-out share.

    A held-out split without a limit of its own ends with the training split, about: of a stream, the rest is not read.
    Only settings that differ from the defaults enter the identity: data prepared before there were such is found.
    """
    limits = {"train": dataset.max_stories, "valid": dataset.max_valid_stories}
    if held_out is not None and limits["train"] is not None and limits["valid"] is None:
        limits["valid"] = math.ceil(limits["train"] * held_out / (1 - held_out))
    more = {"subset": dataset.subset, "max_valid_stories": limits["valid"], "held_out": held_out}
    identity |= {name: value for name, value in more.items() if value is not None}
    if held_out is not None:
        identity["split_seed"] = dataset.split_seed
    if dataset.field != "text":
        identity["field"] = dataset.field
    return Source(where, identity, read, held_out, dataset.split_seed, limits)


def _hub_source(dataset: HubDatasetConfig, key: str) -> Source:
    """A data set of the Hugging Face hub. Nothing is asked before the first document is read."""
    where = f"{key}.path={dataset.path}"
    names = {"train": "train", "valid": dataset.valid_split or "train"}

    def read(split: str) -> Iterator[Raw]:
        import datasets

        name = names[split]
        online = _hub_answers()
        streaming = dataset.streaming and online  # without the hub only a copy downloaded earlier can be read
        try:
            rows = datasets.load_dataset(
                dataset.path, dataset.subset, revision=dataset.revision, split=name, streaming=streaming
            )
            for row in rows:
                if dataset.field not in row:
                    has = ", ".join(row)
                    raise ConfigError(f"{where} has no column '{dataset.field}', it has {has}; see {key}.field")
                text = row[dataset.field]
                if text is not None and not isinstance(text, str):
                    kind = type(text).__name__
                    raise ConfigError(f"{where}: column '{dataset.field}' is {kind}, not text; see {key}.field")
                yield Raw(text or "")
        except ConfigError:
            raise
        except Exception as error:  # the libraries below raise some twenty kinds
            if online:
                lines = str(error).splitlines() or [""]
                raise ConfigError(f"{where}, split {name}: {type(error).__name__}: {lines[0]}") from None
            raise ConfigError(
                f"dataset {dataset.name}, {where}: the hub cannot be reached and {datasets.config.HF_DATASETS_CACHE} "
                f"has no copy; use a local one with {key}.path=<folder>, or dataset=toy"
            ) from None

    identity = {"hub": dataset.path, "revision": dataset.revision, "max_stories": dataset.max_stories}
    if dataset.valid_split not in (None, "validation"):
        identity["valid_split"] = dataset.valid_split
    return _limited(dataset, where, identity, read, None if dataset.valid_split else dataset.held_out)


def _hub_answers() -> bool:
    """Whether the hub can be reached; if not, the hub's libraries go offline, or they would retry for half a minute."""
    import datasets
    import huggingface_hub.constants as hub
    import requests

    if not datasets.config.HF_HUB_OFFLINE:
        try:
            requests.head(hub.ENDPOINT, timeout=10)
            return True
        except requests.RequestException:
            datasets.config.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE = True
    return False


def _find_files(key: str, value: str | tuple[str, ...]) -> list[Path]:
    """Files of a path, folder or glob, or of a list of them, in order, each once."""
    found: dict[Path, None] = {}
    for item in (value,) if isinstance(value, str) else value:
        path = Path(item).expanduser()
        if path.is_dir():
            paths = sorted(file for file in path.rglob("*") if _suffix(file) in SUFFIXES and file.is_file())
            problem = f"the folder has no {', '.join(SUFFIXES)} file"
        elif path.exists():
            paths, problem = [path], ""
        else:
            paths = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())  # noqa: PTH207
            problem = f"no such file, folder or match, looked from {Path.cwd()}"
        if not paths:
            raise ConfigError(f"{key}={item}: {problem}")
        found.update(dict.fromkeys(paths))
    for path in found:
        if _suffix(path) not in SUFFIXES:
            raise ConfigError(f"{key}: {path} is none of {', '.join(SUFFIXES)}; rename or convert it")
    return list(found)


def _read_files(paths: list[Path], field: str, key: str = "dataset") -> Iterator[Raw]:
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".jsonl.zst": _read_jsonl, ".parquet": _read_parquet}
    for path in paths:
        yield from readers[_suffix(path)](path, field, f"{key}.field")


def _read_txt(path: Path, field: str, key: str) -> Iterator[Raw]:
    """Documents between lines `<|endoftext|>`; in a file without such a line every line is one."""
    separator = END_OF_TEXT.encode()
    with path.open("rb") as file:
        mark = file.read(3)
        if mark[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise ConfigError(f"{path} is UTF-16; save it as UTF-8")
        if mark != b"\xef\xbb\xbf":  # UTF-8's byte order mark is no text
            file.seek(0)
        start = file.tell()
        separated = any(line.strip() == separator for line in file)
        file.seek(start)
        if not separated:
            yield from (_decode(line, path, number) for number, line in enumerate(file, 1))
            return
        document: list[bytes] = []
        first = 1
        for number, line in enumerate(file, 1):
            if line.strip() == separator:
                yield _decode(b"".join(document), path, first)
                document, first = [], number + 1
            else:
                document.append(line)
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
            text, bad = _decode(line.removeprefix(b"\xef\xbb\xbf"), path, number)
            try:
                value = json.loads(text)[field]
            except (ValueError, KeyError, TypeError):
                problem = f"is not a JSON object with a field '{field}'"
                raise ConfigError(f"{path} line {number} {problem}; see {key}") from None
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{path} line {number}: '{field}' is {type(value).__name__}, not text")
            yield Raw(value or "", bad)


def _read_parquet(path: Path, field: str, key: str) -> Iterator[Raw]:
    """Rows of one column, a batch at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from None
    with file:
        names = file.schema_arrow.names
        if field not in names:
            raise ConfigError(f"{path} has no column '{field}', it has {', '.join(names)}; see {key}")
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=[field]):
            column = batch.column(0)
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            try:
                values = column.cast(pa.large_binary()).to_pylist()  # bytes: text that is not UTF-8 is located later
            except pa.ArrowException:
                raise ConfigError(f"{path}: column '{field}' is {column.type}, not text; see {key}") from None
            for value in values:
                number += 1
                yield _decode(value or b"", path, number)
