"""Documents to token files, once.

`prepare` cleans the documents of a data set, encodes them, each followed by the end-of-text id, and appends them to a
flat file of uint16 or uint32 in the cache. The cache entry is named by a hash of everything that determines it, so
the same request finds it again and any change makes a new one. Everything streams: memory holds a batch of documents,
8-byte hashes of those seen, and the text that a BPE is trained on. A filtered data set is another one's tokens with a
table of the ids that its windows may hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tapernorm.config.options import Config, DatasetConfig, FilteredDatasetConfig, PlainDatasetConfig, TokenizerConfig
from tapernorm.config.schema import ConfigError
from tapernorm.data import batches, cache
from tapernorm.data.batches import TokenFile, n_windows, token_dtype
from tapernorm.data.files import hash_files
from tapernorm.data.sources import COUNTS, Source, empty_report, open_source
from tapernorm.data.tokenizer import Tokenizer, build_tokenizer

log = logging.getLogger(__name__)

IDS = "ids.npy"
FORMAT = 1  # of the files in a cache entry and of the cleaning; a change makes every entry be prepared anew
PROGRESS_SECONDS = 10.0  # between lines that say how far a preparation is


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

    def __str__(self) -> str:
        tokenizer = f"tokenizer {self.tokenizer.name} with {self.tokenizer.n_vocab:,} ids"
        return f"{self.train}, {self.valid}; {tokenizer}"

    @property
    def key(self) -> str:
        """What the documents, their cleaning and the tokenizer hash to; of a filtered data set, and the allowed ids."""
        return "+".join(path.name.rpartition("-")[2] for path in (self.entry, self.ids) if path is not None)

    @classmethod
    def read(cls, entry: Path) -> Prepared:
        train, valid = TokenFile.open(entry / "train.bin"), TokenFile.open(entry / "valid.bin")
        tokenizer = Tokenizer.load(entry)
        if not train.vocab_size == valid.vocab_size == tokenizer.n_vocab:
            raise ValueError("the vocabularies differ")
        return cls(train, valid, tokenizer, cache.read_report(entry), entry)


@dataclasses.dataclass(frozen=True)
class OccurringIds:
    """Which ids occur in the training split of a reference: allowed (V,) bool; report: of the cleaning, as above."""

    entry: Path
    allowed: np.ndarray
    report: dict[str, Any]

    def __str__(self) -> str:
        count = f"{int(self.allowed.sum()):,} of {len(self.allowed):,} ids"
        return f"the ids that occur, {count} in {self.report['documents']:,} documents"

    @classmethod
    def read(cls, entry: Path) -> OccurringIds:
        return cls(entry, np.load(entry / IDS, allow_pickle=False), cache.read_report(entry)["train"])


def prepare(config: Config) -> Prepared:
    """The data set and tokenizer of `config`, from the cache or made now; one line says which, with counts.

    Raises ConfigError for missing or unreadable data.
    """
    dataset, preparation = config.dataset, _Preparation(config)
    if not isinstance(dataset, FilteredDatasetConfig):
        return preparation.both_splits(dataset, "dataset")
    prepared = preparation.both_splits(dataset.source, "dataset.source")
    ids = preparation.occurring_ids(dataset.reference, "dataset.reference", prepared.tokenizer)
    return _filter(config, dataset, prepared, ids)


def prepare_valid(config: Config, tokenizer: Tokenizer, key: str = "dataset") -> TokenFile:
    """The validation documents of config.dataset, encoded with a tokenizer that is there, from the cache or now.

    The training documents are not read, so none is dropped for being among them; but those of a filter's reference are.
    key: where the data set's configuration stands, for messages. Raises ConfigError as `prepare` does.
    """
    dataset, preparation = config.dataset, _Preparation(config)
    if not isinstance(dataset, FilteredDatasetConfig):
        return preparation.valid_split(dataset, key, tokenizer)
    valid = preparation.valid_split(dataset.source, f"{key}.source", tokenizer)
    ids = preparation.occurring_ids(dataset.reference, f"{key}.reference", tokenizer)
    return dataclasses.replace(valid, allowed=ids.allowed)


def reuse(config: Config, key: str) -> Prepared | None:
    """The cache's entry of this key, even if the files that it was made from are gone; None if there is none."""
    dataset, root = config.dataset, cache.root(config)
    plain = dataset.source if isinstance(dataset, FilteredDatasetConfig) else dataset
    own, _, of_ids = key.partition("+")
    prepared, _ = cache.find(root / f"{plain.name}-{own}", Prepared.read)
    if prepared is not None and isinstance(dataset, FilteredDatasetConfig):
        ids, _ = cache.find(root / f"{dataset.reference.name}-ids-{of_ids}", OccurringIds.read)
        prepared = _filter(config, dataset, prepared, ids) if ids else None
    if prepared is not None:
        log.info(f"dataset {dataset.name}: reused {prepared} ({prepared.entry})")
    return prepared


def _filter(config: Config, dataset: FilteredDatasetConfig, prepared: Prepared, ids: OccurringIds) -> Prepared:
    """The data set with the allowed ids, and what that leaves out of windows of model.n_ctx tokens in its report."""
    n_ctx, reference = config.model.n_ctx, dataset.reference.name
    splits = {split: dataclasses.replace(getattr(prepared, split), allowed=ids.allowed) for split in ("train", "valid")}
    counts = {}
    for split, file in splits.items():
        total = n_windows(file.n_tokens, n_ctx)
        counts[split] = {"windows": total, "left_out": total - len(file.windows(n_ctx))}
    said = [f"{count['left_out']:,} of {count['windows']:,} {split}" for split, count in counts.items()]
    log.info(
        f"dataset {dataset.name}: {' and '.join(said)} windows of {n_ctx:,} tokens left out for ids that do not occur "
        f"in {reference}"
    )
    described = {
        "reference": reference,
        "reference_documents": ids.report["documents"],
        "reference_tokens": ids.report["tokens"],
        "ids": int(ids.allowed.sum()),
        "n_ctx": n_ctx,
        **counts,
    }
    return dataclasses.replace(prepared, **splits, report=prepared.report | {"filter": described}, ids=ids.entry)


# ---------------------------------------------------------------------------------------------------------- preparation


class _Preparation:
    """Entries of the cache, from there or made now."""

    def __init__(self, config: Config) -> None:
        self.config, self.root = config, cache.root(config)
        self.threads = min(8, os.cpu_count() or 1)  # of the encoder; the result does not depend on it
        wanted = config.trainer.progress
        self.progress = ("bar" if sys.stderr.isatty() else "lines") if wanted == "auto" else wanted

    def both_splits(self, dataset: PlainDatasetConfig, key: str) -> Prepared:
        """A data set for training; key: where its configuration stands, for messages."""
        wanted = _tokenizer_config(self.config, dataset)
        source = open_source(dataset, key)

        def fill(work: Path) -> dict[str, Any]:
            seen: set[int] = set()
            train, valid = empty_report(), empty_report()
            # what the BPE is trained on is kept until it has been encoded, so that a stream is read only once
            sample, documents = itertools.tee(source.clean("train", train, seen))
            tokenizer = build_tokenizer(wanted, sample)
            del sample  # or it would keep all documents
            tokenizer.save(work)
            self._write_split("train", documents, tokenizer, train, work)
            if not train["documents"]:
                raise ConfigError(f"{source.where}: there is no document to train on ({_dropped(train)})")
            self._write_split("valid", source.clean("valid", valid, set(), in_train=seen), tokenizer, valid, work)
            described = {"name": tokenizer.name, "n_vocab": tokenizer.n_vocab}
            return {"train": train, "valid": valid, "tokenizer": described, "source": source.where}

        entry = self.root / f"{dataset.name}-{_training_key(source, wanted)}"
        prepared, made = cache.find_or_make(entry, dataset.name, fill, Prepared.read)
        if made:
            self._say_findings(prepared.report)
            trained = wanted.kind == "bpe" and wanted.ranks is None
            if trained and prepared.tokenizer.n_vocab != wanted.vocab_size:
                asked = f"tokenizer.vocab_size={wanted.vocab_size:,}"
                log.info(f"  the text is too small for {asked}: {prepared.tokenizer.n_vocab:,} ids")
        return prepared

    def valid_split(self, dataset: PlainDatasetConfig, key: str, tokenizer: Tokenizer) -> TokenFile:
        """The validation split alone, in a tokenizer's ids."""
        source, report = open_source(dataset, key), empty_report()

        def fill(work: Path) -> dict[str, Any]:
            self._write_split("valid", source.clean("valid", report, set()), tokenizer, report, work)
            if not report["documents"]:
                dropped = _dropped(report)
                raise ConfigError(f"dataset {dataset.name}: there is no document to evaluate on ({dropped})")
            return {"valid": report, "source": source.where}

        def read(entry: Path) -> TokenFile:
            return TokenFile.open(entry / "valid.bin")

        entry = self.root / f"{dataset.name}-valid-{_entry_hash(source, fingerprint=tokenizer.fingerprint)}"
        valid, made = cache.find_or_make(entry, dataset.name, fill, read)
        if made:
            self._say_findings({"valid": report})
        return valid

    def occurring_ids(self, reference: PlainDatasetConfig, key: str, tokenizer: Tokenizer) -> OccurringIds:
        """The ids that occur in a data set's training split.

        They are read off the tokens that training on the reference left in the cache, if the tokenizer is the same;
        else the documents are encoded, and their tokens not kept.
        """
        source = open_source(reference, key)

        def fill(work: Path) -> dict[str, Any]:
            allowed = np.zeros(tokenizer.n_vocab, dtype=bool)
            trained_on = _training_key(source, _tokenizer_config(self.config, reference))
            there, _ = cache.find(self.root / f"{reference.name}-{trained_on}", Prepared.read)
            if there is not None and there.tokenizer.fingerprint == tokenizer.fingerprint:
                report = there.report["train"]
                for start in range(0, there.train.n_tokens, batches.SCANNED):
                    allowed[there.train.tokens[start : start + batches.SCANNED]] = True
            else:
                report = empty_report()
                for ids in self._encode("train", source.clean("train", report, set()), tokenizer, report):
                    allowed[ids] = True
            if not report["documents"]:
                raise ConfigError(f"{source.where}: there is no document to take ids from ({_dropped(report)})")
            np.save(work / IDS, allowed)
            return {"train": report, "ids": int(allowed.sum()), "source": source.where}

        entry = self.root / f"{reference.name}-ids-{_entry_hash(source, fingerprint=tokenizer.fingerprint)}"
        return cache.find_or_make(entry, reference.name, fill, OccurringIds.read)[0]

    def _write_split(
        self, split: str, documents: Iterable[str], tokenizer: Tokenizer, report: dict[str, Any], work: Path
    ) -> None:
        """Write the ids of every document, and the JSON beside them."""
        encoded = self._encode(split, documents, tokenizer, report)
        with (work / f"{split}.bin").open("wb") as file, contextlib.closing(encoded):  # the bar, when a write fails
            for ids in encoded:
                file.write(ids.tobytes())  # tofile() would not say why a write failed
            cache.sync(file)
        meta = {
            "dtype": token_dtype(tokenizer.n_vocab).name,
            "vocab_size": tokenizer.n_vocab,
            "n_documents": report["documents"],
            "n_tokens": report["tokens"],
            "n_bytes": report["bytes"],
            "tokenizer": tokenizer.fingerprint,
        }
        cache.write(work / f"{split}.json", json.dumps(meta, indent=2) + "\n")

    def _encode(
        self, split: str, documents: Iterable[str], tokenizer: Tokenizer, report: dict[str, Any]
    ) -> Generator[np.ndarray]:
        """Ids of every document, each with an end-of-text id, batch by batch; counts in `report`."""
        from tqdm import tqdm

        dtype, said = token_dtype(tokenizer.n_vocab), time.monotonic()
        hidden = self.progress != "bar"  # a short preparation shows neither a bar nor lines
        with tqdm(
            desc=f"preparing {split}", unit=" documents", unit_scale=True, delay=2, leave=False, disable=hidden
        ) as bar:
            for batch in _batches_of(documents, 1024, 1_000_000):
                encoded = tokenizer.encode_batch(batch, self.threads)
                ids = np.array([index for part in encoded for index in (*part, tokenizer.eot)], dtype=dtype)
                report["documents"] += len(batch)
                report["tokens"] += len(ids)
                report["bytes"] += sum(len(text.encode()) for text in batch)
                yield ids
                bar.set_postfix_str(f"{report['tokens'] / 1e6:.1f}M tokens", refresh=False)
                bar.update(len(batch))
                if self.progress == "lines" and time.monotonic() - said >= PROGRESS_SECONDS:
                    said = time.monotonic()
                    log.info(f"  {split}: {report['documents']:,} documents, {report['tokens']:,} tokens so far")

    def _say_findings(self, report: dict[str, Any]) -> None:
        """What the cleaning changed; nothing when all is well."""
        for split in ("train", "valid"):
            counts = report.get(split, empty_report())
            found = [f"{counts[name]:,} {meaning}" for name, meaning in COUNTS.items() if counts[name]]
            if counts["bad_bytes"]:
                found.append("the first byte that is not UTF-8: {file} line {line}".format(**counts["bad_bytes"][0]))
            if found:
                log.info(f"  {split}: {', '.join(found)}")


def _tokenizer_config(config: Config, dataset: DatasetConfig) -> TokenizerConfig:
    vocab_size = config.tokenizer.vocab_size or max(257, dataset.vocab_size)
    return dataclasses.replace(config.tokenizer, vocab_size=vocab_size)


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


def _dropped(report: dict[str, Any]) -> str:
    return ", ".join(f"{report[name]:,} {meaning}" for name, meaning in COUNTS.items())


def _training_key(source: Source, tokenizer: TokenizerConfig) -> str:
    """A hash of everything that determines both splits: documents, cleaning, and what the tokenizer is made from."""
    parts: dict[str, Any] = {"tokenizer": tokenizer.kind}
    if tokenizer.ranks is not None:
        parts["ranks"] = hash_files([Path(tokenizer.ranks).expanduser()], "tokenizer.ranks")
    elif tokenizer.kind == "bpe":
        parts |= {"vocab_size": tokenizer.vocab_size, "train_bytes": tokenizer.train_bytes}
    return _entry_hash(source, **parts)


def _entry_hash(source: Source, **parts: Any) -> str:
    return cache.hash_of({"format": FORMAT, "source": source.identity, **parts})
