"""Where stories come from, and what is mended in them before they become tokens.

A `Source` yields the raw stories of a split, one at a time, from the embedded generator, local files or the hub;
`Source.clean` normalises them, drops the empty and the repeated, and counts what it did.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tapernorm import toy
from tapernorm.config import Config, ConfigError, TextDatasetConfig, TinyStoriesDatasetConfig, ToyDatasetConfig
from tapernorm.tokenizer import END_OF_TEXT

VALID_START = 1 << 40  # toy stories from this index on validate
LISTED_BAD_BYTES = 20
SUFFIXES = (".parquet", ".jsonl", ".txt")  # a local copy that has several uses the first
SPLIT_NAMES = {"train": r"train", "valid": r"val|valid|validation|dev"}


class Raw(NamedTuple):
    """One story as it lies in its file; `bad`: file and line (row, in parquet) of its first byte that is not UTF-8."""

    text: str
    bad: tuple[str, int] | None = None


def hash_files(paths: list[Path], key: str) -> str:
    """One hash of the files' bytes, in order; names and dates do not matter."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, hashlib.blake2b).digest())
        except OSError as error:
            raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------------- cleaning

COUNTS = {  # what the report counts, in words
    "dropped_empty": "empty and dropped",
    "repaired": "repaired",
    "duplicates": "duplicates dropped",
    "in_train": "dropped because they are in the training stories",
}
# a UTF-8 lead byte read as cp1252 and what the bytes that follow it look like then, as in 'donâ€™t' and 'cafÃ©'
MOJIBAKE = re.compile("[ÂÃâðÅÄÎÐ][\u0080-\u00bf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]")
ODD = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\ufeff\ud800-\udfff]")  # controls, invisible, lone surrogates


def empty_report() -> dict[str, Any]:
    counts = ("documents", "tokens", "bytes", *COUNTS)
    return {**dict.fromkeys(counts, 0), "bad_bytes": []}


def clean(text: str) -> tuple[str, bool]:
    """(story, was it repaired): mojibake undone, odd code points dropped, NFC, '\\n' line ends, stripped."""
    story = text
    if MOJIBAKE.search(story):
        import ftfy

        story = ftfy.fix_encoding(story)
    if ODD.search(story):
        story = ODD.sub("", story)
    repaired = story != text
    story = story.replace("\r\n", "\n").replace("\r", "\n")
    return unicodedata.normalize("NFC", story).strip(), repaired


def story_hash(story: str) -> int:
    """64 bits that stand for a story: two of two million differing stories share them with a chance of 1e-7."""
    return int.from_bytes(hashlib.blake2b(story.encode(), digest_size=8).digest(), "big")


def _decode(data: bytes, file: Path, line: int) -> Raw:
    """Text of `data`, which starts at `line` of `file`; lines that are not UTF-8 are read as cp1252, and said so."""
    try:
        return Raw(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        bad = (str(file), line + data.count(b"\n", 0, error.start))
    lines = []
    for part in data.split(b"\n"):  # the story's other lines are UTF-8
        try:
            lines.append(part.decode("utf-8"))
        except UnicodeDecodeError:
            lines.append(part.decode("cp1252", errors="replace"))
    return Raw("\n".join(lines), bad)


# -------------------------------------------------------------------------------------------------------------- sources


@dataclasses.dataclass(frozen=True)
class Source:
    """Where stories come from. identity: what determines them; read: raw stories of 'train' or 'valid'.

    held_out: share of the stories of 'train' that is 'valid', by hash; None: the splits are read apart.
    """

    where: str
    identity: dict[str, Any]
    read: Callable[[str], Iterator[Raw]]
    held_out: float | None = None
    max_stories: int | None = None

    def clean(
        self, split: str, report: dict[str, Any], seen: set[int], in_train: set[int] | None = None
    ) -> Iterator[str]:
        """Clean, distinct stories of a split, in order; counts what it drops in `report`, adds hashes to `seen`."""
        stories = self._clean(split, report, seen, in_train or set())
        return itertools.islice(stories, self.max_stories if split == "train" else None)

    def _clean(self, split: str, report: dict[str, Any], seen: set[int], in_train: set[int]) -> Iterator[str]:
        for raw in self.read(split):
            story, repaired = clean(raw.text)
            key = story_hash(story)
            if self.held_out is not None and (key < self.held_out * 2**64) != (split == "valid"):
                continue  # belongs to the other split, which counts it
            if raw.bad and len(report["bad_bytes"]) < LISTED_BAD_BYTES:
                report["bad_bytes"].append({"file": raw.bad[0], "line": raw.bad[1]})
            if not story:
                report["dropped_empty"] += 1
            elif key in seen:
                report["duplicates"] += 1
            elif key in in_train:
                report["in_train"] += 1
            else:
                report["repaired"] += repaired or raw.bad is not None
                seen.add(key)
                yield story


def open_source(config: Config) -> Source:
    """The source of the configured data set. Raises ConfigError when a local file is missing."""
    dataset = config.dataset
    if isinstance(dataset, ToyDatasetConfig):
        return _toy_source(dataset)
    if isinstance(dataset, TextDatasetConfig):
        return _text_source(dataset)
    # a hub id has at most one slash and starts with a letter
    local = Path(dataset.path).expanduser()
    if local.exists() or dataset.path[0] in "./~" or dataset.path.count("/") > 1:
        return _local_source(dataset, local)
    return _hub_source(dataset)


def _toy_source(dataset: ToyDatasetConfig) -> Source:
    counts = {"train": dataset.stories, "valid": dataset.valid_stories}
    starts = {"train": 0, "valid": VALID_START}

    def read(split: str) -> Iterator[Raw]:
        stories = itertools.islice(toy.stories(dataset.seed, starts[split]), counts[split])
        return (Raw(story) for story in stories)

    identity = {"toy": toy.VERSION, "seed": dataset.seed, **counts}
    return Source("the toy generator", identity, read)


def _text_source(dataset: TextDatasetConfig) -> Source:
    named = {"valid": dataset.valid, "train": dataset.train}
    files = {split: _find_files(f"dataset.{split}", value) for split, value in named.items() if value is not None}
    hashes = {split: hash_files(paths, f"dataset.{split}") for split, paths in files.items()}
    held_out = dataset.held_out if dataset.valid is None else None

    def read(split: str) -> Iterator[Raw]:
        return _read_files(files[split if held_out is None else "train"], dataset.field)

    identity = {**hashes, "held_out": held_out, "field": dataset.field}
    return Source(f"dataset.train={dataset.train}", identity, read, held_out)


def _local_source(dataset: TinyStoriesDatasetConfig, folder: Path) -> Source:
    """A folder with train and validation files, recognized by their names, all of the first suffix that has both."""
    where = f"dataset.path={dataset.path}"
    if not folder.is_dir():
        raise ConfigError(f"{where}: there is no folder {folder.absolute()}")
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    for suffix in SUFFIXES:
        files = {
            split: [path for path in found if path.suffix == suffix and _names_split(path.relative_to(folder), split)]
            for split in SPLIT_NAMES
        }
        if all(files.values()):
            break
    else:
        names = ", ".join(str(path.relative_to(folder)) for path in found[:8]) or "nothing"
        raise ConfigError(
            f"{where} needs files named *train* and *valid*, both {', '.join(SUFFIXES)}; the folder has {names}"
        )

    identity = {split: hash_files(paths, "dataset.path") for split, paths in files.items()}
    identity["max_stories"] = str(dataset.max_stories)
    return Source(where, identity, lambda split: _read_files(files[split], "text"), None, dataset.max_stories)


def _names_split(path: Path, split: str) -> bool:
    return re.search(rf"(?<![a-z])({SPLIT_NAMES[split]})(?![a-z])", str(path).lower()) is not None


def _hub_source(dataset: TinyStoriesDatasetConfig) -> Source:
    """A data set of the Hugging Face hub. Nothing is asked before the first story is read."""
    where = f"dataset.path={dataset.path}"

    def read(split: str) -> Iterator[Raw]:
        import datasets

        name = {"train": "train", "valid": "validation"}[split]
        online = _hub_answers()
        streaming = dataset.streaming and online  # without the hub only a copy downloaded earlier can be read
        try:
            rows = datasets.load_dataset(dataset.path, revision=dataset.revision, split=name, streaming=streaming)
            yield from (Raw(row["text"] or "") for row in rows)
        except Exception as error:  # the libraries below raise some twenty kinds
            if online:
                lines = str(error).splitlines() or [""]
                raise ConfigError(f"{where}, split {name}: {type(error).__name__}: {lines[0]}") from None
            raise ConfigError(
                f"{where}: the hub cannot be reached and {datasets.config.HF_DATASETS_CACHE} has no copy; "
                "use a local one with dataset.path=<folder>, or dataset=toy"
            ) from None

    identity = {"hub": dataset.path, "revision": dataset.revision, "max_stories": dataset.max_stories}
    return Source(where, identity, read, None, dataset.max_stories)


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
            paths = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
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
        if path.suffix not in SUFFIXES:
            raise ConfigError(f"{key}: {path} is none of {', '.join(SUFFIXES)}; rename or convert it")
    return list(found)


def _read_files(paths: list[Path], field: str) -> Iterator[Raw]:
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    for path in paths:
        yield from readers[path.suffix](path, field)


def _read_txt(path: Path, field: str) -> Iterator[Raw]:
    """Stories between lines `<|endoftext|>`; in a file without such a line every line is a story."""
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
        story: list[bytes] = []
        first = 1
        for number, line in enumerate(file, 1):
            if line.strip() == separator:
                yield _decode(b"".join(story), path, first)
                story, first = [], number + 1
            else:
                story.append(line)
        if b"".join(story).strip():  # the last separator may be missing
            yield _decode(b"".join(story), path, first)


def _read_jsonl(path: Path, field: str) -> Iterator[Raw]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            text, bad = _decode(line.removeprefix(b"\xef\xbb\xbf"), path, number)
            try:
                value = json.loads(text)[field]
            except (ValueError, KeyError, TypeError):
                problem = f"is not a JSON object with a field '{field}'"
                raise ConfigError(f"{path} line {number} {problem}; see dataset.field") from None
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{path} line {number}: '{field}' is {type(value).__name__}, not text")
            yield Raw(value or "", bad)


def _read_parquet(path: Path, field: str) -> Iterator[Raw]:
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
            raise ConfigError(f"{path} has no column '{field}', it has {', '.join(names)}; see dataset.field")
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=[field]):
            column = batch.column(0)
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            try:
                values = column.cast(pa.large_binary()).to_pylist()  # bytes: text that is not UTF-8 is located later
            except pa.ArrowException:
                raise ConfigError(f"{path}: column '{field}' is {column.type}, not text; see dataset.field") from None
            for value in values:
                number += 1
                yield _decode(value or b"", path, number)
