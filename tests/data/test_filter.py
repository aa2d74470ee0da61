"""A filtered data set: windows without ids that the reference never has, against a search that looks at every one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tapernorm.analysis.evaluate import evaluate_checkpoint
from tapernorm.analysis.losses import Losses, document_of
from tapernorm.config.options import Config
from tapernorm.config.programs import EvaluateConfig
from tapernorm.config.resolve import build, resolve
from tapernorm.config.schema import ConfigError, to_dict
from tapernorm.data import batches, cache
from tapernorm.data import prepare as data
from tapernorm.data.batches import Batches, usable_windows, validation_windows
from tapernorm.data.prepare import prepare, prepare_valid, reuse
from tapernorm.data.tokenizer import Tokenizer
from tests.data.test_data import SHARED, needs_shared, write_any
from tests.training.test_training import run

BYTES = Tokenizer("bytes", {bytes([byte]): byte for byte in range(256)})


def brute_force(tokens: np.ndarray, n_ctx: int, allowed: np.ndarray) -> list[int]:
    count = (len(tokens) - 1) // n_ctx
    return [w for w in range(count) if all(allowed[t] for t in tokens[w * n_ctx : w * n_ctx + n_ctx + 1].tolist())]


@pytest.mark.parametrize("scanned", [7, 1 << 24])
@pytest.mark.parametrize("n_ctx", [1, 4, 10])
def test_usable_windows_are_those_of_a_search(n_ctx: int, scanned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "SCANNED", scanned)
    generator = np.random.default_rng(0)
    for n_tokens in (0, 1, n_ctx, n_ctx + 1, 200, 203):
        for share in (0.0, 0.02, 0.2, 1.0):
            tokens = generator.integers(0, 100, n_tokens).astype(np.uint16)
            allowed = generator.random(100) >= share
            assert usable_windows(tokens, n_ctx, allowed).tolist() == brute_force(tokens, n_ctx, allowed)


def test_batches_take_the_usable_windows_alone() -> None:
    tokens = np.arange(101, dtype=np.uint16)
    windows = np.array([1, 4, 5, 9])
    batches = Batches(tokens, 10, 2, seed=0, windows=windows)
    assert batches.n_windows == 4 and batches.tokens_per_epoch == 40
    for epoch in range(3):
        seen = [window for step in (1, 2) for window in batches.windows(2 * epoch + step)]
        assert sorted(seen) == windows.tolist()
    inputs, targets = batches.batch(1)
    assert inputs[:, 0].tolist() == [10 * window for window in batches.windows(1)]
    assert torch.equal(targets, inputs + 1)
    everything = Batches(tokens, 10, 4, seed=5, windows=np.arange(10))
    assert torch.equal(everything.batch(3)[0], Batches(tokens, 10, 4, seed=5).batch(3)[0])


def test_validation_takes_the_first_usable_windows() -> None:
    tokens = np.arange(101, dtype=np.uint16)
    inputs, targets = validation_windows(tokens, 10, 25, np.array([3, 7, 8]))
    assert inputs[:, 0].tolist() == [30, 70] and inputs.shape == (2, 10) and torch.equal(targets, inputs + 1)
    every = validation_windows(tokens, 10, 1000, np.arange(10))
    assert all(torch.equal(a, b) for a, b in zip(every, validation_windows(tokens, 10, 1000), strict=True))
    for split, call in (
        ("training", lambda windows: Batches(tokens, 10, 2, 0, windows)),
        ("validation", lambda windows: validation_windows(tokens, 10, 100, windows)),
    ):
        with pytest.raises(ConfigError, match=f"leaves no window of the {split} split"):
            call(np.array([], dtype=np.int64))


def test_documents_beside_a_gap_stay_apart() -> None:
    """Windows of 4: the second, in which document 0 ends, is left out; the third is document 1 alone."""
    eot = 9
    tokens = np.array([1, 2, 3, 4, 5, eot, 6, 7, 6, 7, 6, 7, eot, 8, 8, 8, 8])
    windows = np.array([0, 2, 3])
    document = document_of(tokens[:-1], eot, 4, windows)
    assert document.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    inputs, targets = validation_windows(tokens, 4, 100, windows)
    assert document_of(inputs.flatten().numpy(), eot).tolist() == [0] * 8 + [1] * 4  # what the gap would hide
    # A document that is left out as a whole has no place in any statistic, and the others keep theirs.
    losses = Losses(np.arange(8.0), targets[[0, 2]].flatten().numpy(), document[[0, 1, 2, 3, 8, 9, 10, 11]], BYTES)
    assert losses.n_tokens.tolist() == [4, 4] and losses.total.tolist() == [6.0, 22.0]
    assert losses.statistics()["documents"] == 2
    assert [found["document"] for found in losses.worst(2)["total"]] == [2, 0]
    assert losses.worst(1)["total"][0]["max"] == 7.0


# --------------------------------------------------------------------------------------------------------- preparation

SOURCE = [f"{'The cat sat. ' * (number % 5)}Odd {'#@~'[number % 3]} {number}" for number in range(120)]
REFERENCE = [f"A plain document, The cat sat. Odd {number} # of the reference" for number in range(30)]


def filtered(tmp_path: Path, n_ctx: int = 16, tokenizer: dict[str, Any] | None = None, **reference: Any) -> Config:
    for name, documents in {"source": SOURCE, "reference": REFERENCE}.items():
        (tmp_path / name).mkdir(exist_ok=True)
        write_any(tmp_path / name / "all.jsonl", documents)
    sets = {
        name: {"kind": "hub", "name": name, "path": str(tmp_path / name), "held_out": 0.2, **more}
        for name, more in {"source": {}, "reference": reference}.items()
    }
    return build(
        {
            "cache_dir": str(tmp_path / "cache"),
            "model": {"n_ctx": n_ctx},
            "dataset": {"kind": "filtered", "name": "odd", **sets},
            "tokenizer": tokenizer or {"kind": "bytes"},
        }
    )


def test_the_filter_of_a_data_set_is_that_of_a_search(tmp_path: Path, said: list[str]) -> None:
    config = filtered(tmp_path)
    prepared = prepare(config)
    plain = prepare(build({**to_dict(config), "dataset": to_dict(config)["dataset"]["reference"]}))
    allowed = np.zeros(257, dtype=bool)
    allowed[np.unique(plain.train.tokens)] = True
    assert not allowed[ord("@")] and not allowed[ord("~")] and allowed[ord("#")] and allowed[256]
    for split, file in {"train": prepared.train, "valid": prepared.valid}.items():
        windows = file.windows(16)
        assert windows is not None and windows.tolist() == brute_force(np.array(file.tokens), 16, allowed)
        total = (file.n_tokens - 1) // 16
        assert prepared.report["filter"][split] == {"windows": total, "left_out": total - len(windows)}
        assert 0 < len(windows) < total
        assert any(f"{total - len(windows):,} of {total:,} {split}" in line for line in said)
    found = prepared.report["filter"]
    assert found["ids"] == allowed.sum() and found["reference"] == "reference" and found["n_ctx"] == 16
    assert found["reference_documents"] == plain.train.n_documents
    # Evaluation, which encodes the validation split alone, comes to the same windows.
    valid = prepare_valid(config, prepared.tokenizer)
    assert np.array_equal(valid.windows(16), prepared.valid.windows(16))  # type: ignore[arg-type]


@pytest.mark.parametrize("tokenizer", [{"kind": "bytes"}, {"kind": "bpe", "vocab_size": 300}])
def test_ids_are_the_same_from_the_cache_and_from_the_documents(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    config = filtered(tmp_path, tokenizer=tokenizer)
    from_documents = prepare(config)
    assert from_documents.ids is not None
    first = np.load(from_documents.ids / data.IDS, allow_pickle=False)
    assert first.shape == (from_documents.tokenizer.n_vocab,) and first.dtype == bool
    report = json.loads((from_documents.ids / cache.REPORT).read_text())
    for file in from_documents.ids.iterdir():
        file.unlink()
    from_documents.ids.rmdir()
    # Now training on the reference has left its tokens; with a tokenizer of its own (bpe) they are of no use.
    prepare(build({**to_dict(config), "dataset": to_dict(config)["dataset"]["reference"]}))
    again = prepare(config)
    assert again.ids == from_documents.ids and again.key == from_documents.key
    assert np.array_equal(np.load(again.ids / data.IDS), first)  # type: ignore[operator]
    other = json.loads((again.ids / cache.REPORT).read_text())  # type: ignore[operator]
    assert (other["ids"], other["train"]["tokens"]) == (report["ids"], report["train"]["tokens"])


def test_source_and_filter_share_one_entry_and_are_reused(tmp_path: Path, said: list[str]) -> None:
    config = filtered(tmp_path)
    first = prepare(config)
    said.clear()
    plain = prepare(build({**to_dict(config), "dataset": to_dict(config)["dataset"]["source"]}))
    assert plain.entry == first.entry and "reused" in said[0] and plain.train.windows(16) is None
    assert first.key.startswith(f"{plain.key}+")
    for name in ("source", "reference"):
        (tmp_path / name / "all.jsonl").unlink()
    again = reuse(config, first.key)
    assert again is not None and again.key == first.key and again.report == first.report
    assert np.array_equal(again.train.windows(16), first.train.windows(16))  # type: ignore[arg-type]
    assert reuse(config, plain.key + "+0123") is None


def test_another_reference_or_a_damaged_table_is_noticed(tmp_path: Path, said: list[str]) -> None:
    config = filtered(tmp_path)
    first = prepare(config)
    assert first.ids is not None
    smaller = prepare(filtered(tmp_path, max_stories=2))
    assert smaller.key != first.key and smaller.entry == first.entry
    assert smaller.report["filter"]["ids"] < first.report["filter"]["ids"]
    (first.ids / data.IDS).write_bytes(b"broken")
    again = prepare(config)
    assert any("is damaged" in line for line in said) and again.report == first.report


def test_faults_of_a_filter_are_one_line(tmp_path: Path) -> None:
    config = filtered(tmp_path)
    write_any(tmp_path / "reference" / "all.jsonl", ["zzz"])
    prepared = prepare(config)
    windows = prepared.train.windows(16)
    assert windows is not None and not len(windows)
    with pytest.raises(ConfigError, match=r"leaves no window .*dataset\.reference") as caught:
        Batches(prepared.train.tokens, 16, 2, 0, windows)
    assert "\n" not in str(caught.value)
    write_any(tmp_path / "reference" / "all.jsonl", [""])
    with pytest.raises(ConfigError, match=r"dataset\.reference\.path=.*no document to take ids from"):
        prepare(config)


@pytest.mark.timeout(120)
def test_a_run_on_a_filtered_data_set(tiny: Callable[..., Config], tmp_path: Path) -> None:
    dataset = to_dict(filtered(tmp_path))["dataset"]
    config = tiny(dataset=dataset, tokenizer={"kind": "bytes"}, model={"n_ctx": 16}, optim={"lr": 1e-3})
    summary = run(resolve(config), tmp_path / "run")
    report = evaluate_checkpoint(EvaluateConfig(checkpoint=str(tmp_path / "run"), samples=0, device="cpu"))
    assert report["loss"] == pytest.approx(summary["val_loss"], abs=1e-5)
    assert 0 < report["data"]["left_out"] < report["data"]["windows"]
    written = json.loads((tmp_path / "run" / "data.json").read_text())
    assert written["filter"]["train"]["left_out"] > 0 and "+" in written["key"]


@needs_shared
def test_real_stories_without_what_other_stories_lack(tmp_path: Path) -> None:
    """GPT-2's ids in 400 stories against those that 200 others have, by a search over sets."""
    texts = (SHARED / "tinystories_valid.txt").read_text(encoding="utf-8").split("\n<|endoftext|>\n")
    write_any(tmp_path / "source.jsonl", texts[:400])
    write_any(tmp_path / "reference.jsonl", texts[400:600])
    sets = {
        name: {"kind": "hub", "path": str(tmp_path / f"{name}.jsonl"), "held_out": 0.1}
        for name in ("source", "reference")
    }
    tokenizer = {"kind": "gpt2", "ranks": str(SHARED / "gpt2.tiktoken")}
    tree = {"cache_dir": str(tmp_path), "tokenizer": tokenizer, "model": {"n_ctx": 64}}
    prepared = prepare(build({**tree, "dataset": {"kind": "filtered", **sets}}))
    reference = prepare(build({**tree, "dataset": sets["reference"]}))
    known = set(reference.train.tokens.tolist())
    ids = prepared.train.tokens.tolist()
    expected = [w for w in range((len(ids) - 1) // 64) if set(ids[64 * w : 64 * w + 65]) <= known]
    windows = prepared.train.windows(64)
    assert windows is not None and windows.tolist() == expected and 100 < len(expected) < len(ids) // 64
