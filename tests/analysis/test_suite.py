"""Several data sets in one table, beside published losses; and models in Hugging Face form among the checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tapernorm.analysis import published
from tapernorm.analysis.evaluate import evaluate_checkpoint
from tapernorm.analysis.losses import document_of
from tapernorm.config.options import Config, ModelConfig, TokenizerConfig
from tapernorm.config.programs import EvaluateConfig, ExportConfig
from tapernorm.config.schema import ConfigError, validate
from tapernorm.data.batches import TokenFile, usable_windows
from tapernorm.data.tokenizer import Tokenizer, build_tokenizer
from tapernorm.interop.export import export
from tapernorm.training import checkpoint as checkpoints
from tests.conftest import GPT2
from tests.data.test_data import SHARED, needs_shared, write_any
from tests.training.test_training import run

WEB = [f"The cat number {i} sat on the mat and looked at the {('moon', 'sun', 'sea')[i % 3]}." for i in range(300)]
PILE = [f"{f'def f(x): return x ~ {i}' if i % 4 == 0 else 'The moon looked at the cat.'} {i}" for i in range(200)]


def measured(**keys: Any) -> dict[str, Any]:
    return evaluate_checkpoint(validate({"samples": 0, "device": "cpu", **keys}, EvaluateConfig))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Local copies: one held out of a single file, one with a validation file."""
    top = tmp_path_factory.mktemp("copies")
    for name in ("openwebtext", "pile"):
        (top / name).mkdir()
    write_any(top / "openwebtext" / "documents.jsonl", WEB)
    write_any(top / "pile" / "train.jsonl", PILE[:100])
    write_any(top / "pile" / "val.jsonl", PILE[100:])
    return {name: top / name for name in ("openwebtext", "pile")}


@pytest.fixture
def suite(folders: dict[str, Path]) -> dict[str, Any]:
    plain = {
        name: {"kind": "hub", "name": name, "path": str(folder), "held_out": 0.2} for name, folder in folders.items()
    }
    both = {"source": plain["pile"], "reference": plain["openwebtext"]}
    return {**plain, "pile_filtered": {"kind": "filtered", "name": "pile_filtered", **both}}


@pytest.fixture
def runs(tiny: Callable[..., Config], tmp_path: Path) -> dict[str, Path]:
    """Two runs of the GPT-2 architecture on bytes."""
    for norm in ("baseline", "all_taper"):
        model = GPT2 | {"name": "gpt2", "n_ctx": 16, "dropout": 0.0}
        run(tiny(norm=norm, model=model, tokenizer={"kind": "bytes"}, optim={"lr": 3e-3}), tmp_path / "runs" / norm)
    return {norm: tmp_path / "runs" / norm for norm in ("baseline", "all_taper")}


def test_a_suite_is_each_data_set_alone_in_one_table(
    runs: dict[str, Path],
    suite: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    said: list[str],
) -> None:
    monkeypatch.setitem(published.SHAPES, "gpt2", (2, 32))
    monkeypatch.setattr(published, "VOCAB_SIZE", 257)
    report = measured(checkpoint=str(runs["all_taper"].parent), baseline=str(runs["baseline"]), suite=suite)
    table = capsys.readouterr().out.splitlines()
    assert json.loads((runs["baseline"].parent / "comparison-suite.json").read_text()) == report
    assert report["baseline"] == "baseline" and list(report["datasets"]) == ["openwebtext", "pile", "pile_filtered"]
    for name, dataset in suite.items():
        first, second = report["datasets"][name]
        assert (first["label"], second["label"]) == ("baseline", "all_taper")
        alone = measured(checkpoint=str(runs["all_taper"]), dataset=dataset)
        for key in ("loss", "loss_se", "median", "p99_9", "max", "tokens", "documents", "data", "worst"):
            assert second[key] == alone[key], (name, key)
        found = second["versus_baseline"]
        assert found["mean"] == pytest.approx(second["loss"] - first["loss"])
        assert f"{found['mean']:+.4f} ({found['low']:+.4f} to {found['high']:+.4f})" in "\n".join(table)
    heads, rows = table[:2], {line.split()[0]: line for line in table[2:]}
    assert heads[0].split() == ["openwebtext", "pile", "pile_filtered"]
    shown = "checkpoint norm step loss loss at T* median 99.9 % max tokens"
    assert " ".join(heads[1].split()).startswith(shown)
    for name in suite:
        second = report["datasets"][name][1]
        numbers = f"{second['loss']:.4f} ± {second['loss_se']:.4f}", f"{second['loss_best_temperature']:.4f}"
        for shown in (*numbers, f"{second['tokens']:,}"):
            assert shown in rows["all_taper"]
    # Beneath, what was published of this size.
    beneath = [line for line in table if "published:" in line]
    assert [line.split("gpt2")[1].split() for line in beneath] == [
        ["3.1006", "2.8450", "2.7899"],
        ["3.0126", "2.8511", "2.8112"],
        ["3.0797", "2.8852", "2.8757"],
    ]
    assert any("published rows" in line and "other samples" in line for line in said)
    assert report["published"]["rows"][2]["datasets"]["pile"] == {"loss": 2.8852, "median": None}


def test_the_filter_and_its_documents_in_a_suite(runs: dict[str, Path], suite: dict[str, Any], said: list[str]) -> None:
    report = measured(checkpoint=str(runs["baseline"]), suite=suite)
    (plain,), (kept,) = (report["datasets"][name] for name in ("pile", "pile_filtered"))
    tokenizer = checkpoints.load_model(checkpoints.find(runs["baseline"]))[2]
    tokens = np.array([token for text in PILE[100:] for token in [*tokenizer.encode(text), tokenizer.eot]])
    web = [text for text in WEB if text]
    allowed = np.zeros(257, dtype=bool)
    allowed[[tokenizer.eot, *{token for text in web for token in tokenizer.encode(text)}]] = True
    windows = usable_windows(tokens, 16, allowed)
    total = (len(tokens) - 1) // 16
    assert 0 < len(windows) < total
    assert kept["data"]["windows"] == plain["data"]["windows"] == total
    assert (kept["data"]["left_out"], plain["data"]["left_out"]) == (total - len(windows), 0)
    assert kept["tokens"] == 16 * len(windows)
    assert kept["documents"] == len(np.unique(document_of(tokens[:-1], tokenizer.eot, 16, windows)))
    assert any(f"{total - len(windows):,} of {total:,} windows of 16 tokens left out" in line for line in said)


def test_folded_models_are_rows_too(
    runs: dict[str, Path], suite: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    report = measured(checkpoint=str(runs["all_taper"]), suite=suite, fold=True)
    table = capsys.readouterr().out
    assert table.count("all_taper_folded") == 1 and "difference (95 %)" in table
    for (found,) in report["datasets"].values():
        assert found["folded"]["loss"] == pytest.approx(found["loss"], abs=1e-4)
        assert abs(found["folded"]["versus_baseline"]["mean"]) < 1e-4
    assert (runs["all_taper"] / "evaluation-suite.json").is_file()


def test_one_checkpoint_has_no_differences(
    runs: dict[str, Path], suite: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    measured(checkpoint=str(runs["baseline"]), suite=suite)
    assert "difference" not in capsys.readouterr().out


def test_faults_of_a_suite(runs: dict[str, Path], suite: dict[str, Any], tmp_path: Path) -> None:
    given = {"checkpoint": str(runs["baseline"]), "suite": suite}
    for keys, message in [
        ({"dataset": suite["pile"]}, "dataset=pile and a suite are given; leave one of them out"),
        ({"suite": {}}, "names no data set"),
        ({"save_folded": str(tmp_path / "f")}, "is for one text; leave the suite out"),
        (
            {"suite": {"web": suite["pile"] | {"pth": "x"}}},
            "unknown key 'suite.web.pth'; did you mean 'suite.web.path'",
        ),
        ({"suite": {"web": suite["pile"] | {"path": "/none"}}}, r"suite\.web\.path=/none: there is no file or folder"),
        ({"suite": {"web": {"path": "a/b"}}}, r"suite\.web\.kind is missing"),
        (
            {"suite": {"f": suite["pile_filtered"] | {"reference": suite["pile"] | {"path": "/none"}}}},
            r"suite\.f\.reference\.path=/none: there is no file",
        ),
    ]:
        with pytest.raises(ConfigError, match=message) as caught:
            measured(**{**given, **keys})
        assert "\n" not in str(caught.value)


def test_published_losses_are_by_size_and_data_set() -> None:
    gpt2 = ModelConfig(n_layer=12, d_model=768, positions="learned", vocab_size=50257)
    assert published.size_of(gpt2) == "gpt2"
    assert published.size_of(replace(gpt2, name="gpt2", n_layer=2)) is None
    assert published.size_of(replace(gpt2, vocab_size=600)) is None
    assert published.rows(["tiny", "custom"], ["pile"]) == []
    rows = published.rows(["gpt2_xl", "gpt2", "gpt2_xl"], ["pile", "other"])
    assert [(row["model"], row["name"]) for row in rows] == [
        (model, name) for model in ("gpt2_xl", "gpt2") for name in published.ROWS
    ]
    assert rows[2]["datasets"] == {"pile": {"loss": 130.2, "median": 1.09}}
    assert all(len(losses) == 3 for size in published.LOSSES.values() for losses in size)
    assert [size[2][0] for size in published.LOSSES.values()] == [3.0797, 2.7642, 2.6384, 2.5052]


# ---------------------------------------------------------------------------------------------------------- the command


def test_the_command_takes_a_suite_with_local_folders(
    runs: dict[str, Path],
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., tuple[int, str]],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folders["openwebtext"], "web")
    given = ["checkpoint=runs/*", "suite=gpt2", "suite.openwebtext.path=web", f"suite.pile.path={folders['pile']}"]
    status, out = command(*given)
    assert status == 0 and (tmp_path / "runs" / "comparison-suite.json").is_file()
    assert "published:" not in out, "a small model has no published losses"
    found = json.loads((tmp_path / "runs" / "comparison-suite.json").read_text())
    for name, (first, _) in found["datasets"].items():
        dataset = first["data"]["dataset"]
        if name == "pile_filtered":
            assert dataset["reference"]["path"] == str(tmp_path / "web")
            assert dataset["source"]["path"] == str(folders["pile"])
    text = ["dataset@suite.pile=text", f"suite.pile.valid={folders['pile']}/val.jsonl"]
    status, out = command("checkpoint=runs/baseline", "suite=gpt2", "suite.openwebtext.path=web", *text)
    assert status == 0 and "validation loss" in out
    for arguments, message in {
        ("suite=gpt3",): "did you mean suite=gpt2?",
        ("suite=gpt2", "suite.pil.path=x"): "the chosen suite has no key 'suite.pil.path'; --cfg job shows those",
        ("suite=gpt2", "suite.pile.pth=x"): "did you mean 'suite.pile.path'?",
        ("dataset=toy", "dataset.reference.path=x"): "no key 'dataset.reference.path'; the kinds filtered have it",
        ("dataset=pile_filtered", "dataset.reference.pth=x"): "did you mean 'dataset.reference.path'?",
        ("dataset=pile_filtered", "dataset.path=x"): "no key 'dataset.path'; the kinds hub have it",
        ("suite=gpt2", "dataset@suite.pile=text"): "suite.pile.valid is missing: name the text to evaluate on",
        ("suite=gpt2", "suite.pile.held_out=2"): "suite.pile.held_out=2: input should be less than 1",
    }.items():
        status, err = command("checkpoint=runs/baseline", *arguments)
        assert status == 2 and message in err and err.startswith("error: ") and err.count("\n") == 1, err


# --------------------------------------------------------------------------------------------------- Hugging Face form


def test_an_exported_model_is_evaluated_as_the_checkpoint_is(
    runs: dict[str, Path], suite: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    export(ExportConfig(checkpoint=str(runs["baseline"]), out=str(tmp_path / "exported"), format="gpt2"))
    for file in (runs["baseline"], tmp_path / "exported"):
        assert file.is_dir()
    report = measured(checkpoint=str(tmp_path / "exported"), baseline=str(runs["baseline"]), suite=suite)
    for name, (ours, theirs) in report["datasets"].items():
        assert theirs["label"] == "exported" and theirs["step"] is None and theirs["norm"] == "baseline"
        assert theirs["loss"] == pytest.approx(ours["loss"], abs=1e-5), name
        assert theirs["versus_baseline"]["unit"] == "nats/token"
    single = measured(checkpoint=str(tmp_path / "exported"), dataset=suite["pile"], fold=True)
    assert single["loss"] == pytest.approx(report["datasets"]["pile"][0]["loss"], abs=1e-5)
    assert single["folded"]["loss"] == pytest.approx(single["loss"], abs=1e-4)
    assert (tmp_path / "exported" / "evaluation-pile.json").is_file()
    capsys.readouterr()


def test_faults_of_models_in_hugging_face_form(
    runs: dict[str, Path], suite: dict[str, Any], tmp_path: Path, said: list[str]
) -> None:
    pytest.importorskip("transformers")
    where = tmp_path / "exported"
    export(ExportConfig(checkpoint=str(runs["baseline"]), out=str(where), format="gpt2"))
    with pytest.raises(ConfigError, match=r"has no text of its own; name one with dataset=\.\.\. or suite=gpt2"):
        measured(checkpoint=str(where))
    with pytest.raises(ConfigError, match="is for a checkpoint of ours"):
        measured(checkpoint=str(where), dataset=suite["pile"], save_folded=str(tmp_path / "f"))
    (where / "tokenizer.json").unlink(missing_ok=True)
    shutil.rmtree(where / "tiktoken", ignore_errors=True)
    with pytest.raises(
        ConfigError, match=r"checkpoint=.*exported: it has no tokenizer\.json of a .* 257 ids"
    ) as caught:
        measured(checkpoint=str(where), suite=suite)
    assert "\n" not in str(caught.value)
    said.clear()
    with pytest.raises(ConfigError, match=r"checkpoint=.*exported: it has no tokenizer"):
        measured(checkpoint=[str(runs["baseline"]), str(where)], dataset=suite["pile"])
    assert not said, "refused before the first one is evaluated"
    (where / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match=r"checkpoint=.*model_type is bert there"):
        measured(checkpoint=str(where), suite=suite)


def test_a_tokenizer_comes_back_from_the_libraries_form(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(kind="bpe", vocab_size=300), WEB)
    fast = tokenizer.to_fast()
    assert fast is not None
    fast.save(str(tmp_path / "tokenizer.json"))
    again = Tokenizer.from_fast(tmp_path / "tokenizer.json")
    assert again is not None and again.fingerprint == tokenizer.fingerprint
    file = tmp_path / "tokenizer.json"
    named = build_tokenizer(TokenizerConfig(kind="bpe", ranks=str(file)), None)
    assert named.fingerprint == tokenizer.fingerprint and named.name == "bpe" and named.same_as_fast(file) is True
    other = build_tokenizer(TokenizerConfig(kind="bpe", vocab_size=300), [text.upper() for text in WEB])
    assert other.n_vocab == tokenizer.n_vocab and other.same_as_fast(file) is False
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    assert Tokenizer.from_fast(tmp_path / "tokenizer.json") is None
    assert Tokenizer.from_fast(tmp_path / "none.json") is None
    assert tokenizer.same_as_fast(file) is None
    with pytest.raises(ConfigError, match=r"tokenizer\.ranks=.*json is not a usable tokenizer\.json: it takes a byte"):
        build_tokenizer(TokenizerConfig(kind="bpe", ranks=str(file)), None)


@needs_shared
def test_gpt2_in_hugging_face_form_with_tiktokens_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small GPT-2 of 50,257 ids on real stories: its mean loss over the windows is transformers' own."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))
    shape = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    model.save_pretrained(tmp_path / "small")
    texts = (SHARED / "tinystories_valid.txt").read_text(encoding="utf-8").split("\n<|endoftext|>\n")[:40]
    write_any(tmp_path / "stories.jsonl", texts)
    dataset = {"kind": "hub", "name": "stories", "path": str(tmp_path / "stories.jsonl"), "held_out": 0.5}
    report = measured(checkpoint=str(tmp_path / "small"), dataset=dataset, cache_dir=str(tmp_path / "cache"))
    file = TokenFile.open(tmp_path / "cache" / report["data"]["name"] / "valid.bin")
    rows = torch.tensor(file.tokens[: (file.n_tokens - 1) // 32 * 32].astype(np.int64)).view(-1, 32)
    targets = torch.tensor(file.tokens[1 : rows.numel() + 1].astype(np.int64)).view(-1, 32)
    with torch.no_grad():
        logits = model(rows).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    assert report["tokens"] == rows.numel() and report["loss"] == pytest.approx(expected, abs=1e-5)
