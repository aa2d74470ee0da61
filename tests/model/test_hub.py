"""Data sets of the hub, mocked, and local copies of them: splits, limits, and no more read than it takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hydra import compose, initialize_config_dir

from tapernorm.cli import composition
from tapernorm.config.options import Config, HubDatasetConfig
from tapernorm.config.resolve import build
from tapernorm.config.schema import ConfigError
from tapernorm.data import sources
from tapernorm.data.prepare import Prepared, prepare, prepare_valid
from tapernorm.data.sources import document_hash, open_source
from tapernorm.data.tokenizer import Tokenizer
from tests.data.test_data import config_for, stories_of, text_config, write_any

BYTES = Tokenizer("bytes", {bytes([byte]): byte for byte in range(256)})
DOCUMENTS = [f"Document {number} of the web.\nIt has two lines." for number in range(1000)]


def hub_config(cache: Path, **keys: Any) -> Config:
    return config_for(cache, {"kind": "hub", "path": "owner/name", **keys})


def splits_of(prepared: Prepared) -> dict[str, list[str]]:
    files = {"train": prepared.train, "valid": prepared.valid}
    return {split: stories_of(file, BYTES) if file.n_documents else [] for split, file in files.items()}


class Hub:
    """What load_dataset was asked for, and how many rows of each request were read."""

    def __init__(self, splits: dict[str, list[dict[str, Any]]]) -> None:
        self.splits = splits
        self.asked: list[dict[str, Any]] = []
        self.read: list[int] = []

    def load_dataset(self, path: str, name: str | None = None, **keys: Any) -> Iterator[dict[str, Any]]:
        self.asked.append({"path": path, "name": name, **keys})
        self.read.append(0)
        if keys["split"] not in self.splits:
            raise ValueError(f"Unknown split {keys['split']}")
        return self._rows(len(self.read) - 1, self.splits[keys["split"]])

    def _rows(self, request: int, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for row in rows:
            self.read[request] += 1
            yield row


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Hub]:
    """hub(train=[texts], validation=[texts]): the hub has a data set of these."""

    def make(**splits: list[str]) -> Hub:
        made = Hub({split: [{"text": text, "meta": {}} for text in texts] for split, texts in splits.items()})
        monkeypatch.setattr("datasets.load_dataset", made.load_dataset)
        monkeypatch.setattr(sources, "_hub_answers", lambda: True)
        return made

    return make


# ------------------------------------------------------------------------------------------------------------- streams


def test_two_splits_are_read_as_far_as_their_limits(tmp_path: Path, hub: Callable[..., Hub]) -> None:
    made = hub(train=DOCUMENTS, validation=["one", "", "two", "one", "three", "four"])
    keys = {"max_stories": 50, "max_valid_stories": 3, "subset": "all", "revision": "v1"}
    prepared = prepare(hub_config(tmp_path, **keys))
    assert splits_of(prepared) == {"train": DOCUMENTS[:50], "valid": ["one", "two", "three"]}
    assert made.read == [50, 5]  # what is dropped does not count
    common = {"path": "owner/name", "name": "all", "revision": "v1", "streaming": True}
    assert made.asked == [common | {"split": "train"}, common | {"split": "validation"}]
    assert prepared.report["valid"]["dropped_empty"] == prepared.report["valid"]["duplicates"] == 1


def test_a_held_out_split_is_seeded_and_does_not_read_the_whole_stream(tmp_path: Path, hub: Callable[..., Hub]) -> None:
    made = hub(train=DOCUMENTS)
    keys = {"valid_split": None, "held_out": 0.1, "max_stories": 200, "max_valid_stories": 10}
    first = splits_of(prepare(hub_config(tmp_path, **keys)))
    assert len(first["train"]) == 200 and len(first["valid"]) == 10 and not set(first["train"]) & set(first["valid"])
    assert {request["split"] for request in made.asked} == {"train"}
    assert made.read[0] < 300 and made.read[1] < 200  # about 200 / 0.9, and 10 / 0.1
    chosen = [text for text in DOCUMENTS if document_hash(text) < 0.1 * 2**64]
    assert first["valid"] == chosen[:10]
    other = splits_of(prepare(hub_config(tmp_path, **keys, split_seed=7)))
    assert other["valid"] != first["valid"] and not set(other["train"]) & set(other["valid"])
    salted = [text for text in DOCUMENTS if document_hash(text, 7) < 0.1 * 2**64]
    assert other["valid"] == salted[:10] and len(set(salted) & set(chosen)) < 40
    # The validation split alone, as evaluation reads it, is the same and needs no training text.
    made.read.clear()
    valid = prepare_valid(hub_config(tmp_path, **keys), BYTES)
    assert stories_of(valid, BYTES) == first["valid"] and made.read[0] < 200


def test_a_limit_on_training_alone_ends_the_held_out_split_too(tmp_path: Path, hub: Callable[..., Hub]) -> None:
    made = hub(train=DOCUMENTS)
    prepared = prepare(hub_config(tmp_path, valid_split=None, held_out=0.2, max_stories=100))
    assert prepared.valid.n_documents == 25 and max(made.read) < 300


def test_the_split_of_seed_0_is_that_of_text_files(tmp_path: Path) -> None:
    write_any(tmp_path / "a.jsonl", DOCUMENTS)
    text = splits_of(prepare(text_config(tmp_path / "c", tmp_path / "a.jsonl", held_out=0.03)))
    keys = {"path": str(tmp_path / "a.jsonl"), "held_out": 0.03}
    assert splits_of(prepare(hub_config(tmp_path / "c", **keys))) == text


def test_every_setting_that_decides_the_text_is_in_its_identity() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"path": "owner/other"},
        {"subset": "a"},
        {"revision": "v2"},
        {"field": "body"},
        {"valid_split": "test"},
        {"max_stories": 7},
        {"max_valid_stories": 7},
        {"valid_split": None},
        {"valid_split": None, "held_out": 0.2},
        {"valid_split": None, "split_seed": 3},
    ]
    identities = [open_source(HubDatasetConfig(**{"path": "owner/name", **change})).identity for change in changes]
    assert len({json.dumps(identity, sort_keys=True) for identity in identities}) == len(changes)
    # What was prepared before there were so many settings is found again.
    assert identities[0] == {"hub": "owner/name", "revision": None, "max_stories": None}
    old = build({"dataset": {"kind": "tinystories", "path": "owner/name", "revision": None, "max_stories": None}})
    assert isinstance(old.dataset, HubDatasetConfig) and open_source(old.dataset).identity == identities[0]


def test_faults_of_the_hub_are_one_line(tmp_path: Path, hub: Callable[..., Hub]) -> None:
    hub(train=DOCUMENTS[:5])
    for keys, message in (
        ({"field": "body"}, r"dataset\.path=owner/name has no column 'body', it has text, meta; see dataset\.field"),
        ({"field": "meta"}, r"owner/name: column 'meta' is dict, not text; see dataset\.field"),
        ({}, r"dataset\.path=owner/name, split validation: ValueError: Unknown split validation"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            prepare(hub_config(tmp_path, **keys))
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"suite\.web\.path=owner/name has no column"):
        prepare_valid(hub_config(tmp_path, field="body", valid_split=None), BYTES, key="suite.web")


# ------------------------------------------------------------------------------------------------------- named choices


@pytest.mark.parametrize("name", ["openwebtext", "pile", "pile_filtered"])
@pytest.mark.timeout(60)
def test_P17_named_data_sets_without_a_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_hub_answers", lambda: False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf_cache")
    composition.register()
    with initialize_config_dir(str(composition.CONFIGS), version_base="1.3"):
        composed = composition.plain(compose("train", [f"dataset={name}", "tokenizer=bytes", f"cache_dir={tmp_path}"]))
    with pytest.raises(ConfigError) as caught:
        prepare(build(composed))
    key = "dataset.source.path" if name == "pile_filtered" else "dataset.path"
    message = str(caught.value)
    assert f"dataset {name.removesuffix('_filtered')}" in message and f"{key}=<folder>" in message
    assert str(tmp_path / "hf_cache") in message and "\n" not in message


# ------------------------------------------------------------------------------------------------------- local copies


def write_zst(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.output_stream(str(path), compression="zstd") as file:
        file.write("".join(json.dumps({"text": text, "meta": {}}) + "\n" for text in texts).encode())


def test_a_folder_as_the_pile_lies_on_the_hub(tmp_path: Path) -> None:
    folder = tmp_path / "pile"
    write_zst(folder / "train/00.jsonl.zst", DOCUMENTS[:3])
    write_zst(folder / "train/01.jsonl.zst", [*DOCUMENTS[3:5], "naïve"])
    write_zst(folder / "val.jsonl.zst", ["five"])
    write_zst(folder / "test.jsonl.zst", ["six"])
    (folder / "README.md").write_text("no text")
    prepared = prepare(hub_config(tmp_path / "c", path=str(folder)))
    assert splits_of(prepared) == {"train": [*DOCUMENTS[:5], "naïve"], "valid": ["five"]}


def test_several_frames_of_zstandard(tmp_path: Path) -> None:
    for name, texts in {"a": DOCUMENTS[:3], "b": DOCUMENTS[3:6]}.items():
        write_zst(tmp_path / f"{name}.zst", texts)
    both = (tmp_path / "a.zst").read_bytes() + (tmp_path / "b.zst").read_bytes()
    (tmp_path / "all.jsonl.zst").write_bytes(both)
    prepared = prepare(hub_config(tmp_path / "c", path=str(tmp_path / "all.jsonl.zst"), held_out=1e-9))
    assert splits_of(prepared)["train"] == DOCUMENTS[:6]


@pytest.mark.parametrize("names", [["train-0.parquet", "train-1.parquet"], ["urls_a.parquet", "b.parquet"]])
def test_a_folder_without_a_validation_file_holds_one_out(tmp_path: Path, names: list[str]) -> None:
    halves = dict(zip(names, (DOCUMENTS[:100], DOCUMENTS[100:200]), strict=True))
    for name, texts in halves.items():
        write_any(tmp_path / "copy" / name, texts)
    write_any(tmp_path / "copy" / "test.parquet", ["not read"])
    splits = splits_of(prepare(hub_config(tmp_path / "c", path=str(tmp_path / "copy"), held_out=0.2)))
    assert 20 < len(splits["valid"]) < 60 and sorted(splits["train"] + splits["valid"]) == sorted(DOCUMENTS[:200])


def test_a_folder_with_validation_files_alone_can_be_evaluated_on(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    write_any(tmp_path / "copy" / "val.jsonl", ["one", "two"])
    config = hub_config(tmp_path / "c", path=str(tmp_path / "copy"), max_valid_stories=1)
    assert stories_of(prepare_valid(config, BYTES), BYTES) == ["one"]
    with pytest.raises(ConfigError, match=r"dataset\.path=.*there is no document to train on"):
        prepare(config)


def test_large_files_that_are_read_in_part_are_recognized_by_their_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "HASHED_BYTES", 100)
    path = tmp_path / "large.txt"
    path.write_text("\n".join(DOCUMENTS))

    def identity(**keys: Any) -> dict[str, Any]:
        return open_source(HubDatasetConfig(path=str(path), **keys)).identity

    whole, part = identity(), identity(max_stories=5)
    path.write_text("\n".join(DOCUMENTS).replace("Document 500", "document 500"))
    assert identity() != whole and identity(max_stories=5) == part
    path.write_text("d" + path.read_text()[1:])
    assert identity(max_stories=5) != part
