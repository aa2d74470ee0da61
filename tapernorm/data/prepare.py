"""Documents to token files, once.

`prepare` cleans the documents of a data set, encodes them, each followed by the end-of-text id, and appends them to a
flat file of uint16 or uint32 in the cache. The cache entry is named by a hash of everything that determines it, so
the same request finds it again and any change makes a new one. Everything streams: memory holds a batch of documents,
8-byte hashes of those seen, and the text that a BPE is trained on. A filtered data set is another one's tokens with a
table of the ids that its windows may hold.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import glob
import hashlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from tapernorm.config.options import Config, DatasetConfig, FilteredDatasetConfig, PlainDatasetConfig, TokenizerConfig
from tapernorm.config.schema import ConfigError
from tapernorm.data.batches import n_windows
from tapernorm.data.sources import COUNTS, Source, empty_report, hash_files, open_source
from tapernorm.data.tokenizer import Tokenizer, build_tokenizer

REPORT = "report.json"
IDS = "ids.npy"
SCANNED = 1 << 24  # tokens at a time
Entry = TypeVar("Entry")  # what is read from an entry of the cache
FORMAT = 1  # of the files in a cache entry and of the cleaning; a change makes every entry be prepared anew


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """A prepared split. tokens: memory-mapped ids (n_tokens,); n_bytes: UTF-8 bytes of the documents.

    allowed: for each id (V,) whether a window may hold it; None: every window is used.
    """

    path: Path
    tokens: np.ndarray
    n_documents: int
    n_tokens: int
    vocab_size: int
    n_bytes: int
    allowed: np.ndarray | None = None

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

    def windows(self, n_ctx: int) -> np.ndarray | None:
        """Indices (W,) of the windows without an id that is not allowed; None: all of them."""
        return None if self.allowed is None else usable_windows(self.tokens, n_ctx, self.allowed)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A data set ready for training. report: per split the counts of the cleaning, and the tokenizer's size.

    ids: the cache's entry of the ids that a filtered data set allows.
    """

    train: TokenFile
    valid: TokenFile
    tokenizer: Tokenizer
    report: dict[str, Any]
    entry: Path
    ids: Path | None = None

    @property
    def key(self) -> str:
        """What the documents, their cleaning and the tokenizer hash to; of a filtered data set, and the allowed ids."""
        return "+".join(path.name.rpartition("-")[2] for path in (self.entry, self.ids) if path is not None)


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds every id: uint16 up to 65,536 ids, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


# -------------------------------------------------------------------------------------------------------------- prepare


def prepare(config: Config, say: Callable[[str], None] = print, threads: int | None = None) -> Prepared:
    """The data set and tokenizer of `config`, from the cache or made now; `say` gets one line on which, with counts.

    threads: of the encoder; the result does not depend on it. Raises ConfigError for missing or unreadable data.
    """
    dataset = config.dataset
    if isinstance(dataset, FilteredDatasetConfig):
        prepared = _prepare(config, dataset.source, "dataset.source", say, threads)
        ids = find_ids(config, dataset.reference, "dataset.reference", prepared.tokenizer, say, threads)
        return _filter(config, dataset, prepared, ids, say)
    return _prepare(config, dataset, "dataset", say, threads)


def _prepare(
    config: Config, dataset: PlainDatasetConfig, key: str, say: Callable[[str], None], threads: int | None
) -> Prepared:
    tokenizer = _tokenizer_config(config, dataset)
    source = open_source(dataset, key)
    entry = cache_root(config) / f"{dataset.name}-{_key(source, tokenizer)}"

    def fill(work: Path) -> None:
        _fill_entry(work, source, tokenizer, _Progress(config, say), threads or _usual_threads())

    prepared, made = _from_cache(entry, dataset.name, fill, _read_entry, _summary, say)
    if made:
        _say_findings(prepared.report, say)
        _say_small_vocabulary(prepared, tokenizer, say)
    return prepared


def _tokenizer_config(config: Config, dataset: DatasetConfig) -> TokenizerConfig:
    vocab_size = config.tokenizer.vocab_size or max(257, dataset.vocab_size)
    return dataclasses.replace(config.tokenizer, vocab_size=vocab_size)


def prepare_valid(
    config: Config,
    tokenizer: Tokenizer,
    say: Callable[[str], None] = print,
    threads: int | None = None,
    key: str = "dataset",
) -> TokenFile:
    """The validation documents of config.dataset, encoded with a tokenizer that is there, from the cache or now.

    The training documents are not read, so none is dropped for being among them; but those of a filter's reference are.
    key: where the data set's configuration stands, for messages. Raises ConfigError as `prepare` does.
    """
    dataset = config.dataset
    if isinstance(dataset, FilteredDatasetConfig):
        source = dataclasses.replace(config, dataset=dataset.source)
        valid = prepare_valid(source, tokenizer, say, threads, f"{key}.source")
        ids = find_ids(config, dataset.reference, f"{key}.reference", tokenizer, say, threads)
        return dataclasses.replace(valid, allowed=ids.allowed)
    return _prepare_valid(config, dataset, key, tokenizer, say, threads)


def _prepare_valid(
    config: Config,
    dataset: PlainDatasetConfig,
    key: str,
    tokenizer: Tokenizer,
    say: Callable[[str], None],
    threads: int | None,
) -> TokenFile:
    name = dataset.name
    source = open_source(dataset, key)
    parts = {"format": FORMAT, "source": source.identity, "fingerprint": tokenizer.fingerprint}
    entry = cache_root(config) / f"{name}-valid-{_hash(parts)}"

    def fill(work: Path) -> None:
        progress, report = _Progress(config, say), empty_report()
        try:
            _encode_split(
                "valid",
                source.clean("valid", report, set()),
                work / "valid.bin",
                tokenizer=tokenizer,
                progress=progress,
                threads=threads or _usual_threads(),
                report=report,
            )
        finally:
            progress.close()
        if not report["documents"]:
            raise ConfigError(f"dataset {name}: there is no document to evaluate on ({_found(report)})")
        _write_report(work, {"valid": report, "source": source.where})

    def summary(name: str, verb: str, valid: TokenFile) -> str:
        return f"dataset {name}: {verb} {valid.n_documents:,} documents, {valid.n_tokens:,} tokens for validation"

    valid, made = _from_cache(entry, name, fill, lambda entry: TokenFile.open(entry / "valid.bin"), summary, say)
    if made:
        _say_findings(json.loads((entry / REPORT).read_text(encoding="utf-8")), say)
    return valid


# --------------------------------------------------------------------------------------------------------------- filter


@dataclasses.dataclass(frozen=True)
class OccurringIds:
    """Which ids occur in the training split of a reference: allowed (V,) bool, and how much text that is."""

    entry: Path
    allowed: np.ndarray
    n_documents: int
    n_tokens: int


def find_ids(
    config: Config,
    reference: PlainDatasetConfig,
    key: str,
    tokenizer: Tokenizer,
    say: Callable[[str], None] = print,
    threads: int | None = None,
) -> OccurringIds:
    """The ids that occur in a data set's training split, from the cache or found now.

    They are read off the tokens that training on the reference left in the cache, if the tokenizer is the same; else
    the documents are encoded, and their tokens not kept. Raises ConfigError as `prepare` does.
    """
    name = reference.name
    source = open_source(reference, key)
    parts = {"format": FORMAT, "source": source.identity, "fingerprint": tokenizer.fingerprint}
    entry = cache_root(config) / f"{name}-ids-{_hash(parts)}"
    trained_on = cache_root(config) / f"{name}-{_key(source, _tokenizer_config(config, reference))}"

    def fill(work: Path) -> None:
        allowed = np.zeros(tokenizer.n_vocab, dtype=bool)
        there, _ = _open_entry(trained_on, _read_entry)
        if there is not None and there.tokenizer.fingerprint == tokenizer.fingerprint:
            for start in range(0, there.train.n_tokens, SCANNED):
                allowed[there.train.tokens[start : start + SCANNED]] = True
            report = there.report["train"]
        else:
            progress, report = _Progress(config, say), empty_report()
            try:
                documents = source.clean("train", report, set())
                for ids in _encoded("train", documents, tokenizer, progress, threads or _usual_threads(), report):
                    allowed[ids] = True
            finally:
                progress.close()
        if not report["documents"]:
            raise ConfigError(f"{source.where}: there is no document to take ids from ({_found(report)})")
        np.save(work / IDS, allowed)
        _write_report(work, {"train": report, "ids": int(allowed.sum()), "source": source.where})

    def summary(name: str, verb: str, ids: OccurringIds) -> str:
        count = f"{int(ids.allowed.sum()):,} of {len(ids.allowed):,} ids"
        return f"dataset {name}: {verb} the ids that occur, {count} in {ids.n_documents:,} documents"

    return _from_cache(entry, name, fill, _read_ids, summary, say)[0]


def _read_ids(entry: Path) -> OccurringIds:
    allowed = np.load(entry / IDS, allow_pickle=False)
    report = json.loads((entry / REPORT).read_text(encoding="utf-8"))["train"]
    return OccurringIds(entry, allowed, report["documents"], report["tokens"])


def _filter(
    config: Config, dataset: FilteredDatasetConfig, prepared: Prepared, ids: OccurringIds, say: Callable[[str], None]
) -> Prepared:
    """The data set with the allowed ids, and what that leaves out of windows of model.n_ctx tokens in its report."""
    n_ctx = config.model.n_ctx
    splits = {
        split: dataclasses.replace(file, allowed=ids.allowed)
        for split, file in {"train": prepared.train, "valid": prepared.valid}.items()
    }
    counts = {}
    for split, file in splits.items():
        windows = file.windows(n_ctx)
        total = n_windows(file.n_tokens, n_ctx)
        counts[split] = {"windows": total, "left_out": total - (0 if windows is None else len(windows))}
    said = [f"{count['left_out']:,} of {count['windows']:,} {split}" for split, count in counts.items()]
    say(
        f"dataset {dataset.name}: {' and '.join(said)} windows of {n_ctx:,} tokens left out for ids that do not occur "
        f"in {dataset.reference.name}"
    )
    described = {
        "reference": dataset.reference.name,
        "reference_documents": ids.n_documents,
        "reference_tokens": ids.n_tokens,
        "ids": int(ids.allowed.sum()),
        "n_ctx": n_ctx,
        **counts,
    }
    return dataclasses.replace(
        prepared,
        train=splits["train"],
        valid=splits["valid"],
        report=prepared.report | {"filter": described},
        ids=ids.entry,
    )


def usable_windows(tokens: np.ndarray, n_ctx: int, allowed: np.ndarray) -> np.ndarray:
    """Indices of the windows whose n_ctx + 1 tokens, inputs and last target, are all allowed, in order.

    tokens (n_tokens,): ids; allowed (V,): of each id. Neighbouring windows share a token: it is checked in both.
    """
    usable = np.ones(n_windows(len(tokens), n_ctx), dtype=bool)
    for start in range(0, len(tokens), SCANNED):
        places = start + np.flatnonzero(~allowed[tokens[start : start + SCANNED]])
        for bad in (places // n_ctx, (places - 1) // n_ctx):  # as an input, and as the target of the one before
            usable[bad[(bad >= 0) & (bad < len(usable))]] = False
    return np.flatnonzero(usable)


def _from_cache(
    entry: Path,
    name: str,
    fill: Callable[[Path], None],
    read: Callable[[Path], Entry],
    summary: Callable[[str, str, Entry], str],
    say: Callable[[str], None],
) -> tuple[Entry, bool]:
    """(What `read` finds in the cache's entry, whether it was made now), made by `fill` in one process at a time."""
    from filelock import FileLock, Timeout

    prepared, fault = _open_entry(entry, read)
    if prepared is not None:
        say(f"{summary(name, 'reused', prepared)} ({entry})")
        return prepared, False
    lock = FileLock(f"{entry}.lock")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0.5)
        except Timeout:
            say(f"dataset {name}: waiting for another process that prepares {entry}")
            lock.acquire()
    except OSError as error:
        raise ConfigError(f"cache_dir={entry.parent} cannot be written: {error.strerror}") from None
    try:
        prepared, fault = _open_entry(entry, read)
        if prepared is not None:
            say(f"{summary(name, 'reused', prepared)} ({entry}, just made by another process)")
            return prepared, False
        if fault:
            say(f"dataset {name}: {entry} is damaged ({fault}); preparing it again")
        started = time.monotonic()
        try:
            _make_entry(entry, fill)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            raise ConfigError(f"cache_dir={entry.parent} cannot be written: {error.strerror}") from None
        prepared, fault = _open_entry(entry, read)
        if prepared is None:
            raise ConfigError(f"cache_dir={entry.parent} does not keep what is written to it: {fault}")
        say(f"{summary(name, 'prepared', prepared)} in {time.monotonic() - started:.1f} s ({entry})")
        return prepared, True
    finally:
        lock.release()


def reuse(config: Config, key: str, say: Callable[[str], None] = print) -> Prepared | None:
    """The cache's entry of this key, even if the files that it was made from are gone; None if there is none."""
    dataset, root = config.dataset, cache_root(config)
    plain = dataset.source if isinstance(dataset, FilteredDatasetConfig) else dataset
    own, _, of_ids = key.partition("+")
    entry = root / f"{plain.name}-{own}"
    prepared, _ = _open_entry(entry, _read_entry)
    if prepared is None:
        return None
    if isinstance(dataset, FilteredDatasetConfig):
        ids, _ = _open_entry(root / f"{dataset.reference.name}-ids-{of_ids}", _read_ids)
        if ids is None:
            return None
        prepared = _filter(config, dataset, prepared, ids, lambda line: None)
    say(f"{_summary(dataset.name, 'reused', prepared)} ({entry})")
    return prepared


def cache_root(config: Config) -> Path:
    """config.cache_dir, else $TAPERNORM_CACHE, else ~/.cache/tapernorm; absolute."""
    chosen = config.cache_dir or os.environ.get("TAPERNORM_CACHE") or "~/.cache/tapernorm"
    return Path(chosen).expanduser().absolute()


def _key(source: Source, tokenizer: TokenizerConfig) -> str:
    """A hash of everything that determines the entry: documents, cleaning, and what the tokenizer is made from."""
    parts: dict[str, Any] = {"format": FORMAT, "source": source.identity, "tokenizer": tokenizer.kind}
    if tokenizer.ranks is not None:
        parts["ranks"] = hash_files([Path(tokenizer.ranks).expanduser()], "tokenizer.ranks")
    elif tokenizer.kind == "bpe":
        parts |= {"vocab_size": tokenizer.vocab_size, "train_bytes": tokenizer.train_bytes}
    return _hash(parts)


def _hash(parts: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def _usual_threads() -> int:
    return min(8, os.cpu_count() or 1)


def _open_entry(entry: Path, read: Callable[[Path], Entry]) -> tuple[Entry | None, str]:
    """What `read` finds in the entry, or None and what is wrong with it ('' when it does not exist)."""
    if not entry.is_dir():
        return None, ""
    try:
        return read(entry), ""
    except OSError as error:
        return None, f"{Path(error.filename or entry).name}: {error.strerror}"
    except (ValueError, KeyError) as error:
        return None, str(error)


def _read_entry(entry: Path) -> Prepared:
    train, valid = TokenFile.open(entry / "train.bin"), TokenFile.open(entry / "valid.bin")
    tokenizer = Tokenizer.load(entry)
    report = json.loads((entry / REPORT).read_text(encoding="utf-8"))
    if not train.vocab_size == valid.vocab_size == tokenizer.n_vocab:
        raise ValueError("the vocabularies differ")
    return Prepared(train, valid, tokenizer, report, entry)


def _make_entry(entry: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a whole entry under a temporary name and rename it; the caller holds the entry's lock."""
    for left in entry.parent.glob(f"{glob.escape(entry.name)}.tmp-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{entry.name}.tmp-", dir=entry.parent))
    try:
        fill(work)
        shutil.rmtree(entry, ignore_errors=True)  # a damaged one
        work.chmod(0o755)  # mkdtemp makes it private; a cache may be shared
        work.rename(entry)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fill_entry(work: Path, source: Source, tokenizer: TokenizerConfig, progress: _Progress, threads: int) -> None:
    """Write both splits, the tokenizer and the report into the directory `work`."""
    try:
        seen: set[int] = set()
        reports = {split: empty_report() for split in ("train", "valid")}
        train = source.clean("train", reports["train"], seen)
        consumed: list[str] = []
        built = build_tokenizer(tokenizer, _remember(train, consumed))
        built.save(work)
        # the documents that the BPE was trained on are encoded from memory, so that a stream is read only once
        encode = functools.partial(_encode_split, tokenizer=built, progress=progress, threads=threads)
        encode("train", itertools.chain(_release(consumed), train), work / "train.bin", report=reports["train"])
        if not reports["train"]["documents"]:
            raise ConfigError(f"{source.where}: there is no document to train on ({_found(reports['train'])})")
        valid_seen: set[int] = set()
        valid = source.clean("valid", reports["valid"], valid_seen, in_train=seen)
        encode("valid", valid, work / "valid.bin", report=reports["valid"])
        described = {"name": built.name, "n_vocab": built.n_vocab}
        _write_report(work, {**reports, "tokenizer": described, "source": source.where})
    finally:
        progress.close()


def _found(report: dict[str, Any]) -> str:
    return ", ".join(f"{report[name]:,} {meaning}" for name, meaning in COUNTS.items())


def _write_report(work: Path, report: dict[str, Any]) -> None:
    _write(work / REPORT, json.dumps(report, indent=2, ensure_ascii=False).encode())


def _encode_split(
    split: str,
    documents: Iterable[str],
    path: Path,
    *,
    tokenizer: Tokenizer,
    progress: _Progress,
    threads: int,
    report: dict[str, Any],
) -> None:
    """Append every document and an end-of-text id to `path`, batch by batch, and write the JSON beside it."""
    with path.open("wb") as file:
        for ids in _encoded(split, documents, tokenizer, progress, threads, report):
            file.write(ids.tobytes())  # tofile() would not say why a write failed
        _sync(file)
    meta = {
        "dtype": token_dtype(tokenizer.n_vocab).name,
        "vocab_size": tokenizer.n_vocab,
        "n_documents": report["documents"],
        "n_tokens": report["tokens"],
        "n_bytes": report["bytes"],
        "tokenizer": tokenizer.fingerprint,
    }
    _write(path.with_suffix(".json"), (json.dumps(meta, indent=2) + "\n").encode())


def _encoded(
    split: str,
    documents: Iterable[str],
    tokenizer: Tokenizer,
    progress: _Progress,
    threads: int,
    report: dict[str, Any],
) -> Iterator[np.ndarray]:
    """Ids of every document, each with an end-of-text id, batch by batch; counts in `report`."""
    dtype = token_dtype(tokenizer.n_vocab)
    eot = [tokenizer.eot]
    for batch in _batches_of(documents, 1024, 1_000_000):
        encoded = tokenizer.encode_batch(batch, threads)
        ids = np.array(list(itertools.chain.from_iterable(part + eot for part in encoded)), dtype=dtype)
        report["documents"] += len(batch)
        report["tokens"] += len(ids)
        report["bytes"] += sum(len(text.encode()) for text in batch)
        yield ids
        progress.show(split, report["documents"], report["tokens"])


def _batches_of(documents: Iterable[str], count: int, size: int) -> Iterator[list[str]]:
    """Lists of at most `count` documents and about `size` characters."""
    batch: list[str] = []
    total = 0
    for document in documents:
        batch.append(document)
        total += len(document)
        if len(batch) == count or total >= size:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _remember(documents: Iterator[str], consumed: list[str]) -> Iterator[str]:
    for document in documents:
        consumed.append(document)
        yield document


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
        f"dataset {name}: {verb} {train.n_documents:,} documents, {train.n_tokens:,} tokens for training, "
        f"{valid.n_documents:,} documents, {valid.n_tokens:,} tokens for validation; "
        f"tokenizer {prepared.tokenizer.name} with {prepared.tokenizer.n_vocab:,} ids"
    )


def _say_findings(report: dict[str, Any], say: Callable[[str], None]) -> None:
    """What the cleaning changed; nothing when all is well."""
    for split in ("train", "valid"):
        counts = report.get(split, empty_report())
        found = [f"{counts[name]:,} {meaning}" for name, meaning in COUNTS.items() if counts[name]]
        if counts["bad_bytes"]:
            found.append("the first byte that is not UTF-8: {file} line {line}".format(**counts["bad_bytes"][0]))
        if found:
            say(f"  {split}: {', '.join(found)}")


def _say_small_vocabulary(prepared: Prepared, tokenizer: TokenizerConfig, say: Callable[[str], None]) -> None:
    """A trained vocabulary that came out smaller than asked for."""
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
            self._say(f"  {split}: {documents:,} documents, {tokens:,} tokens so far")
        if self._style == "bar":
            if split != self._split:
                from tqdm import tqdm

                self.close()
                self._split = split
                self._bar = tqdm(desc=f"preparing {split}", unit=" documents", unit_scale=True, delay=2, leave=False)
            self._bar.set_postfix_str(f"{tokens / 1e6:.1f}M tokens", refresh=False)
            self._bar.update(documents - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


# -------------------------------------------------------------------------------------------------------------- batches
