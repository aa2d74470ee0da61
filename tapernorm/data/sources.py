"""Where documents come from, and what is mended in them before they become tokens.

A `Source` yields the raw documents of a split, one at a time, from the embedded generator, local files or the hub;
`Source.clean` normalises them, drops the empty and the repeated, and counts what it did.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tapernorm.config.options import HubDatasetConfig, PlainDatasetConfig, TextDatasetConfig, ToyDatasetConfig
from tapernorm.config.schema import ConfigError
from tapernorm.data import toy
from tapernorm.data.files import Raw, find_files, find_splits, hash_files, no_column, read_files, text_of

VALID_START = 1 << 40  # toy stories from this index on validate
LISTED_BAD_BYTES = 20
HASHED_BYTES = 1 << 25  # at both ends of a file of a local copy that is not read to its end

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
        """Clean, distinct documents of a split, in order; counts what it drops in `report`.

        seen: gets the hashes of those documents, no others; in_train: those of the training split.
        """
        for raw in self.read(split if self.held_out is None else "train"):
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
            elif in_train and key in in_train:
                report["in_train"] += 1
            else:
                report["repaired"] += repaired or raw.bad is not None
                seen.add(key)
                yield text
                if len(seen) == self.limits.get(split):
                    return


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
        return map(Raw, itertools.islice(toy.stories(dataset.seed, starts[split]), counts[split]))

    return Source("the toy generator", {"toy": toy.VERSION, "seed": dataset.seed, **counts}, read)


def _text_source(dataset: TextDatasetConfig, key: str) -> Source:
    named = {"valid": dataset.valid, "train": dataset.train}
    files = {split: find_files(f"{key}.{split}", value) for split, value in named.items() if value is not None}

    def read(split: str) -> Iterator[Raw]:
        return read_files(files[split], dataset.field, f"{key}.field")

    held_out = dataset.held_out if dataset.valid is None else None
    hashes = {split: hash_files(paths, f"{key}.{split}") for split, paths in files.items()}
    identity = {**hashes, "held_out": held_out, "field": dataset.field}
    return Source(f"{key}.train={dataset.train}", identity, read, held_out)


def _local_source(dataset: HubDatasetConfig, path: Path, key: str) -> Source:
    """A local copy; where none of its files is named *valid*, that split is held out of the others."""
    where = f"{key}.path={dataset.path}"
    if not path.exists():
        raise ConfigError(f"{where}: there is no file or folder {path.absolute()}")
    files = find_splits(path, where)

    def read(split: str) -> Iterator[Raw]:
        return read_files(files[split], dataset.field, f"{key}.field")

    limit = None if dataset.max_stories is None else HASHED_BYTES
    hashes = {split: hash_files(paths, f"{key}.path", limit) for split, paths in files.items()}
    identity = hashes | {"max_stories": str(dataset.max_stories)}
    return _limited(dataset, where, identity, read, None if files["valid"] else dataset.held_out)


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
                    raise no_column(dataset.field, row, where, f"{key}.field")
                yield Raw(text_of(row[dataset.field], dataset.field, where, f"{key}.field"))
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
