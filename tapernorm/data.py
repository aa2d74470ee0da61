"""Stories to token files, once; token files to batches, as a pure function of (seed, step).

`prepare` cleans the stories of a data set, encodes them, each followed by the end-of-text id, and appends them to a
flat file of uint16 or uint32 in the cache. The cache entry is named by a hash of everything that determines it, so
the same request finds it again and any change makes a new one. Everything streams: memory holds a batch of stories,
8-byte hashes of the stories seen, and the text that a BPE is trained on.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tapernorm import toy
from tapernorm.config import (
    Config,
    ConfigError,
    TextDatasetConfig,
    TinyStoriesDatasetConfig,
    TokenizerConfig,
    ToyDatasetConfig,
)
from tapernorm.tokenizer import END_OF_TEXT, Tokenizer, build_tokenizer

FORMAT = 1  # of the files in a cache entry and of the cleaning; a change makes every entry be prepared anew
VALID_START = 1 << 40  # toy stories from this index on validate
LISTED_BAD_BYTES = 20
SUFFIXES = (".parquet", ".jsonl", ".txt")  # a local copy that has several uses the first
SPLIT_NAMES = {"train": r"train", "valid": r"val|valid|validation|dev"}


class Raw(NamedTuple):
    """One story as it lies in its file; `bad`: file and line (row, in parquet) of its first byte that is not UTF-8."""

    text: str
    bad: tuple[str, int] | None = None


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """A prepared split. tokens: memory-mapped ids (n_tokens,); n_bytes: UTF-8 bytes of the stories."""

    path: Path
    tokens: np.ndarray
    n_documents: int
    n_tokens: int
    vocab_size: int
    n_bytes: int

    @classmethod
    def open(cls, path: Path) -> TokenFile:
        """Map `path` as the JSON beside it says. Raises ValueError when they differ, OSError when one is missing."""
        meta = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        dtype, n_tokens = np.dtype(meta["dtype"]), meta["n_tokens"]
        size, expected = path.stat().st_size, n_tokens * dtype.itemsize
        if size != expected:
            raise ValueError(f"{path.name} has {size} bytes instead of {expected}")
        # an empty file cannot be mapped
        tokens = np.memmap(path, dtype=dtype, mode="r") if n_tokens else np.empty(0, dtype=dtype)
        return cls(path, tokens, meta["n_documents"], n_tokens, meta["vocab_size"], meta["n_bytes"])


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A data set ready for training. report: per split the counts of the cleaning, and the tokenizer's size."""

    train: TokenFile
    valid: TokenFile
    tokenizer: Tokenizer
    report: dict[str, Any]


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds every id: uint16 up to 65,536 ids, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


# -------------------------------------------------------------------------------------------------------------- prepare


def prepare(config: Config, say: Callable[[str], None] = print, threads: int | None = None) -> Prepared:
    """The data set and tokenizer of `config`, from the cache or made now; `say` gets one line on which, with counts.

    threads: of the encoder; the result does not depend on it. Raises ConfigError for missing or unreadable data.
    """
    from filelock import FileLock, Timeout

    dataset = config.dataset
    vocab_size = config.tokenizer.vocab_size or max(257, dataset.vocab_size)
    tokenizer = dataclasses.replace(config.tokenizer, vocab_size=vocab_size)
    source = open_source(config)
    entry = cache_root(config) / f"{dataset.name}-{_key(source, tokenizer)}"
    prepared, fault = _open_entry(entry)
    if prepared is not None:
        say(f"{_summary(dataset.name, 'reused', prepared)} ({entry})")
        return prepared
    lock = FileLock(f"{entry}.lock")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0.5)
        except Timeout:
            say(f"dataset {dataset.name}: waiting for another process that prepares {entry}")
            lock.acquire()
    except OSError as error:
        raise ConfigError(f"cache_dir={entry.parent} cannot be written: {error.strerror}") from None
    try:
        prepared, fault = _open_entry(entry)
        if prepared is not None:
            say(f"{_summary(dataset.name, 'reused', prepared)} ({entry}, just made by another process)")
            return prepared
        if fault:
            say(f"dataset {dataset.name}: {entry} is damaged ({fault}); preparing it again")
        started = time.monotonic()
        _build_entry(entry, source, tokenizer, _Progress(config, say), threads or min(8, os.cpu_count() or 1))
        prepared, fault = _open_entry(entry)
        if prepared is None:
            raise ConfigError(f"cache_dir={entry.parent} does not keep what is written to it: {fault}")
        say(f"{_summary(dataset.name, 'prepared', prepared)} in {time.monotonic() - started:.1f} s ({entry})")
        _say_findings(prepared, tokenizer, say)
        return prepared
    finally:
        lock.release()


def cache_root(config: Config) -> Path:
    """config.cache_dir, else $TAPERNORM_CACHE, else ~/.cache/tapernorm; absolute."""
    chosen = config.cache_dir or os.environ.get("TAPERNORM_CACHE") or "~/.cache/tapernorm"
    return Path(chosen).expanduser().absolute()


def _key(source: Source, tokenizer: TokenizerConfig) -> str:
    """A hash of everything that determines the entry: stories, cleaning, and what the tokenizer is made from."""
    parts: dict[str, Any] = {"format": FORMAT, "source": source.identity, "tokenizer": tokenizer.kind}
    if tokenizer.ranks is not None:
        parts["ranks"] = _hash_files([Path(tokenizer.ranks).expanduser()], "tokenizer.ranks")
    elif tokenizer.kind == "bpe":
        parts |= {"vocab_size": tokenizer.vocab_size, "train_bytes": tokenizer.train_bytes}
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def _hash_files(paths: list[Path], key: str) -> str:
    """One hash of the files' bytes, in order; names and dates do not matter."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, hashlib.blake2b).digest())
        except OSError as error:
            raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _open_entry(entry: Path) -> tuple[Prepared | None, str]:
    """The prepared entry, or None and what is wrong with it ('' when it does not exist)."""
    if not entry.is_dir():
        return None, ""
    try:
        train, valid = TokenFile.open(entry / "train.bin"), TokenFile.open(entry / "valid.bin")
        tokenizer = Tokenizer.load(entry)
        report = json.loads((entry / "report.json").read_text(encoding="utf-8"))
        if not train.vocab_size == valid.vocab_size == tokenizer.n_vocab:
            raise ValueError("the vocabularies differ")
    except OSError as error:
        return None, f"{Path(error.filename or entry).name}: {error.strerror}"
    except (ValueError, KeyError) as error:
        return None, str(error)
    return Prepared(train, valid, tokenizer, report), ""


def _build_entry(entry: Path, source: Source, tokenizer: TokenizerConfig, progress: _Progress, threads: int) -> None:
    """Write a whole entry under a temporary name and rename it; the caller holds the entry's lock."""
    for left in entry.parent.glob(f"{glob.escape(entry.name)}.tmp-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{entry.name}.tmp-", dir=entry.parent))
    try:
        seen: set[int] = set()
        reports = {split: _empty_report() for split in ("train", "valid")}
        train = source.clean("train", reports["train"], seen)
        consumed: list[str] = []
        built = build_tokenizer(tokenizer, _remember(train, consumed))
        built.save(work)
        # the stories that the BPE was trained on are encoded from memory, so that a stream is read only once
        encode = functools.partial(_encode_split, tokenizer=built, progress=progress, threads=threads)
        encode("train", itertools.chain(_release(consumed), train), work / "train.bin", report=reports["train"])
        if not reports["train"]["documents"]:
            raise ConfigError(f"{source.where}: no story is left of {reports['train']}")
        valid_seen: set[int] = set()
        valid = source.clean("valid", reports["valid"], valid_seen, in_train=seen)
        encode("valid", valid, work / "valid.bin", report=reports["valid"])
        report = {**reports, "tokenizer": {"name": built.name, "n_vocab": built.n_vocab}, "source": source.where}
        _write(work / "report.json", json.dumps(report, indent=2, ensure_ascii=False).encode())
        shutil.rmtree(entry, ignore_errors=True)  # a damaged one
        work.chmod(0o755)  # mkdtemp makes it private; a cache may be shared
        work.rename(entry)
    finally:
        progress.close()
        shutil.rmtree(work, ignore_errors=True)


def _encode_split(
    split: str,
    stories: Iterable[str],
    path: Path,
    *,
    tokenizer: Tokenizer,
    progress: _Progress,
    threads: int,
    report: dict[str, Any],
) -> None:
    """Append every story and an end-of-text id to `path`, batch by batch, and write the JSON beside it."""
    dtype = token_dtype(tokenizer.n_vocab)
    eot = [tokenizer.eot]
    with path.open("wb") as file:
        for batch in _batches_of(stories, 1024, 1_000_000):
            encoded = tokenizer.encode_batch(batch, threads)
            ids = np.array(list(itertools.chain.from_iterable(part + eot for part in encoded)), dtype=dtype)
            ids.tofile(file)
            report["documents"] += len(batch)
            report["tokens"] += len(ids)
            report["bytes"] += sum(len(story.encode()) for story in batch)
            progress.show(split, report["documents"], report["tokens"])
        _sync(file)
    meta = {
        "dtype": dtype.name,
        "vocab_size": tokenizer.n_vocab,
        "n_documents": report["documents"],
        "n_tokens": report["tokens"],
        "n_bytes": report["bytes"],
        "tokenizer": tokenizer.fingerprint,
    }
    _write(path.with_suffix(".json"), (json.dumps(meta, indent=2) + "\n").encode())


def _batches_of(stories: Iterable[str], count: int, size: int) -> Iterator[list[str]]:
    """Lists of at most `count` stories and about `size` characters."""
    batch: list[str] = []
    total = 0
    for story in stories:
        batch.append(story)
        total += len(story)
        if len(batch) == count or total >= size:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _remember(stories: Iterator[str], consumed: list[str]) -> Iterator[str]:
    for story in stories:
        consumed.append(story)
        yield story


def _release(consumed: list[str]) -> Iterator[str]:
    """The items in order, each let go once it has been handed on."""
    consumed.reverse()
    while consumed:
        yield consumed.pop()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _summary(name: str, verb: str, prepared: Prepared) -> str:
    train, valid = prepared.train, prepared.valid
    return (
        f"dataset {name}: {verb} {train.n_documents:,} stories, {train.n_tokens:,} tokens for training, "
        f"{valid.n_documents:,} stories, {valid.n_tokens:,} tokens for validation; "
        f"tokenizer {prepared.tokenizer.name} with {prepared.tokenizer.n_vocab:,} ids"
    )


def _say_findings(prepared: Prepared, tokenizer: TokenizerConfig, say: Callable[[str], None]) -> None:
    """What the cleaning changed, and a vocabulary that came out smaller than asked for; nothing when all is well."""
    for split in ("train", "valid"):
        counts = prepared.report[split]
        found = [f"{counts[name]:,} {name}" for name in COUNTS if counts[name]]
        if counts["bad_bytes"]:
            found.append("the first byte that is not UTF-8: {file} line {line}".format(**counts["bad_bytes"][0]))
        if found:
            say(f"  {split}: {', '.join(found)}")
    trained = tokenizer.kind == "bpe" and tokenizer.ranks is None
    if trained and prepared.tokenizer.n_vocab != tokenizer.vocab_size:
        asked = f"{tokenizer.vocab_size:,}"
        say(f"  the text is too small for tokenizer.vocab_size={asked}: {prepared.tokenizer.n_vocab:,} ids")


class _Progress:
    """A tqdm bar on a terminal, a line every ten seconds elsewhere; short preparations show neither."""

    INTERVAL = 10.0

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        wanted = config.trainer.progress
        self._style = ("bar" if sys.stderr.isatty() else "lines") if wanted == "auto" else wanted
        self._say = say
        self._bar: Any = None
        self._split = ""
        self._last = time.monotonic()

    def show(self, split: str, documents: int, tokens: int) -> None:
        if self._style == "lines" and time.monotonic() - self._last >= self.INTERVAL:
            self._last = time.monotonic()
            self._say(f"  {split}: {documents:,} stories, {tokens:,} tokens so far")
        if self._style == "bar":
            if split != self._split:
                from tqdm import tqdm

                self.close()
                self._split = split
                self._bar = tqdm(desc=f"preparing {split}", unit=" stories", unit_scale=True, delay=2, leave=False)
            self._bar.set_postfix_str(f"{tokens / 1e6:.1f}M tokens", refresh=False)
            self._bar.update(documents - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


# ------------------------------------------------------------------------------------------------------------- cleaning

COUNTS = ("dropped_empty", "repaired", "duplicates", "in_train")
# a UTF-8 lead byte read as cp1252 and what the bytes that follow it look like then, as in 'donâ€™t' and 'cafÃ©'
MOJIBAKE = re.compile("[ÂÃâðÅÄÎÐ][\u0080-\u00bf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]")
ODD = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\ufeff\ud800-\udfff]")  # controls, invisible, lone surrogates


def _empty_report() -> dict[str, Any]:
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
    files = {"train": _find_files("dataset.train", dataset.train)}
    if dataset.valid is not None:
        files["valid"] = _find_files("dataset.valid", dataset.valid)
    hashes = {split: _hash_files(paths, f"dataset.{split}") for split, paths in files.items()}
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

    identity = {split: _hash_files(paths, "dataset.path") for split, paths in files.items()}
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


# -------------------------------------------------------------------------------------------------------------- batches


class Batches:
    """Training batches: row i of step k is a pure function of (seed, k).

    j = (k - 1) * batch_size + i;  epoch = j // n_windows;  window = permutation(seed, epoch)[j % n_windows].
    Window w is the tokens [w * n_ctx, w * n_ctx + n_ctx + 1), so each epoch visits every window once.
    Raises ConfigError when `tokens` (n_tokens,) is shorter than one window.
    """

    def __init__(self, tokens: np.ndarray, n_ctx: int, batch_size: int, seed: int) -> None:
        _check_length("training", len(tokens), n_ctx, "dataset.train or dataset.stories")
        self._tokens = tokens
        self._n_ctx = n_ctx
        self._batch_size = batch_size
        self._seed = seed
        self.n_windows = (len(tokens) - 1) // n_ctx
        self.tokens_per_epoch = self.n_windows * n_ctx
        self._permutation = functools.lru_cache(maxsize=2)(self._permute)  # a batch may straddle two epochs

    def _permute(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(self.n_windows)

    def windows(self, step: int) -> list[int]:
        """Indices of the windows of a step (1-based), row by row."""
        first = (step - 1) * self._batch_size
        places = [divmod(index, self.n_windows) for index in range(first, first + self._batch_size)]
        return [int(self._permutation(epoch)[place]) for epoch, place in places]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, T) int64 of a step, counted from 1; targets are the inputs shifted by one."""
        if step < 1:
            raise ValueError(f"steps count from 1, got {step}")
        rows = np.empty((self._batch_size, self._n_ctx + 1), dtype=np.int64)
        for row, window in zip(rows, self.windows(step), strict=True):
            start = window * self._n_ctx
            row[:] = self._tokens[start : start + self._n_ctx + 1]
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def validation_windows(tokens: np.ndarray, n_ctx: int, n_tokens: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (N, T) int64 of the first N windows, N * n_ctx <= n_tokens; views of one buffer.

    Depends on nothing but the arguments. Raises ConfigError when tokens or n_tokens are less than one window.
    """
    _check_length("validation", len(tokens), n_ctx, "dataset.valid, dataset.held_out or dataset.valid_stories")
    if n_tokens < n_ctx:
        raise ConfigError(f"trainer.val_tokens={n_tokens} is less than one context, model.n_ctx={n_ctx}")
    count = min((len(tokens) - 1) // n_ctx, n_tokens // n_ctx)
    flat = torch.from_numpy(tokens[: count * n_ctx + 1].astype(np.int64))
    return flat[:-1].view(count, n_ctx), flat[1:].view(count, n_ctx)


def _check_length(split: str, n_tokens: int, n_ctx: int, key: str) -> None:
    if n_tokens < n_ctx + 1:
        raise ConfigError(
            f"the {split} split has {n_tokens:,} tokens, one window needs model.n_ctx + 1 = {n_ctx + 1:,}; "
            f"give it more text ({key}) or lower model.n_ctx"
        )
