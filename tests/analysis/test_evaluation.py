"""Losses and samples: independent of the batch size, equal to training's, decodable from step 0."""

from __future__ import annotations

import errno
import io
import json
import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar

from tapernorm.analysis import evaluate as evaluation
from tapernorm.analysis import measure
from tapernorm.analysis.evaluate import evaluate_checkpoint
from tapernorm.cli.errors import CONFIGS
from tapernorm.config.options import Config, TextDatasetConfig
from tapernorm.config.programs import EvaluateConfig
from tapernorm.config.resolve import resolve
from tapernorm.config.schema import ConfigError, validate
from tapernorm.model.decoder import build_model
from tapernorm.model.evaluate import evaluate, scaled_losses
from tapernorm.model.generate import generate
from tapernorm.runtime.record import read_metrics
from tapernorm.training import checkpoint as checkpoints
from tests.training.test_training import run


def test_P29_the_loss_is_trainings_at_every_batch_size(
    tiny: Callable[..., Config], tmp_path: Path, said: list[str]
) -> None:
    summary = run(tiny(norm="all_taper"), tmp_path)
    reports: list[dict[str, Any]] = []
    for batch_size in (1, 3, 8):
        config = EvaluateConfig(
            checkpoint=str(tmp_path), batch_size=batch_size, samples=1, sample_tokens=20, device="cpu"
        )
        report = evaluate_checkpoint(config)
        assert report["loss"] == pytest.approx(summary["val_loss"], abs=1e-5)
        assert report["tokens"] == 256
        reports.append(report)
    for name in ("loss", "median", "p99", "p99_9", "max", "bits_per_byte"):
        assert len({round(report[name], 5) for report in reports}) == 1, name
    assert json.loads((tmp_path / "evaluation.json").read_text()) == reports[-1]
    assert any("256 tokens" in line for line in said)
    # A checkpoint of the middle of the taper is evaluated with that step's gate.
    middle = tmp_path / "checkpoints" / "step-00000016"
    logged = next(row for row in read_metrics(tmp_path) if row["step"] == 16)
    report = evaluate_checkpoint(EvaluateConfig(checkpoint=str(middle), samples=0, device="cpu"))
    assert 0 < report["gate"] < 1
    assert report["loss"] == pytest.approx(logged["val/loss"], abs=1e-5)


def test_the_text_files_are_not_needed_again(tiny: Callable[..., Config], tmp_path: Path) -> None:
    files = {"train": tmp_path / "train.txt", "valid": tmp_path / "valid.txt"}
    for split, file in files.items():
        file.write_text(
            "\n".join(f"The {split} cat sat on mat number {i} and looked at the moon. " * 9 for i in range(40))
        )
    dataset = {"kind": "text", **{split: str(file) for split, file in files.items()}}
    config = tiny(dataset=dataset, tokenizer={"kind": "bytes"}, optim={"lr": 1e-3})
    summary = run(config, tmp_path / "run")
    for file in files.values():
        file.unlink()
    report = evaluate_checkpoint(EvaluateConfig(checkpoint=str(tmp_path / "run"), samples=0, device="cpu"))
    assert report["loss"] == pytest.approx(summary["val_loss"], abs=1e-5)


def test_evaluation_leaves_the_models_mode(tiny: Callable[..., Config]) -> None:
    model = build_model(resolve(tiny(), 60)).train()
    x = torch.randint(0, 60, (5, 32))
    first = evaluate(model, x, x, batch_size=2)
    assert model.training and first.tokens == 160
    assert first.loss == pytest.approx(evaluate(model, x, x, batch_size=5).loss, abs=1e-6)


# ------------------------------------------------------------------------------------------------ the best temperature


class Bigrams(torch.nn.Module):
    """Logits that depend on the token alone, `scale` times a table (V, V); counts the windows it is asked about."""

    def __init__(self, table: torch.Tensor, scale: float = 1.0) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding.from_pretrained(scale * table)
        self.windows = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.windows += len(tokens)
        return self.embed(tokens)


@pytest.fixture(scope="module")
def bigrams() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(table, inputs, targets): 4,096 windows of 32 tokens drawn from softmax(1.3 table)."""
    generator = torch.Generator().manual_seed(0)
    table = 2 * torch.randn(50, 50, generator=generator)
    x = torch.randint(0, 50, (4096, 32), generator=generator)
    drawn = torch.multinomial(torch.softmax(1.3 * table, -1)[x.flatten()], 1, generator=generator)
    return table, x, drawn.view_as(x)


@pytest.mark.parametrize("scale", [0.03, 0.9, 1.0, 1.2, 30.0])
def test_the_best_temperature_is_the_one_of_a_minimiser_in_float64(bigrams: Any, scale: float) -> None:
    table, x, y = bigrams
    counts = torch.bincount(50 * x.flatten() + y.flatten(), minlength=2500).view(50, 50) / x.numel()
    best = minimize_scalar(lambda b: -(counts * torch.log_softmax(b * table.double(), -1)).sum().item(), (1.0, 1.5))
    model = Bigrams(table, scale)
    plain = evaluate(model, x, y, 64)
    assert (plain.best_temperature, plain.loss_best_temperature) == (None, None)
    model.windows = 0
    found = evaluate(model, x, y, 64, best_temperature=True)
    assert found.loss == plain.loss and found.tokens == plain.tokens  # bit for bit
    assert found.best_temperature == pytest.approx(scale / best.x, rel=1e-3)
    assert found.loss_best_temperature == pytest.approx(best.fun, abs=2e-6)
    assert found.loss_best_temperature is not None and found.loss_best_temperature < plain.loss
    assert model.windows < 1.7 * len(x)  # one whole pass, and a few on a sixteenth
    # What is said of that temperature is what the logits give there.
    cooled = evaluate(Bigrams(table, scale / found.best_temperature), x, y, 64)  # type: ignore[operator]
    assert cooled.loss == pytest.approx(found.loss_best_temperature, abs=2e-6)
    again = evaluate(Bigrams(table, scale), x, y, 100, best_temperature=True)
    assert again.best_temperature == pytest.approx(found.best_temperature, rel=1e-6)
    assert again.loss_best_temperature == pytest.approx(found.loss_best_temperature, abs=1e-7)


def test_the_derivatives_are_those_of_autograd(bigrams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table, x, y = bigrams
    logits, targets = 3 * table.double()[x[:2].flatten()], y[:2].flatten()
    b = torch.full(targets.shape, 1.7, dtype=torch.float64, requires_grad=True)
    loss = F.cross_entropy(b[:, None] * logits, targets, reduction="none")
    (first,) = torch.autograd.grad(loss.sum(), b, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), b)
    expected = torch.stack([loss, first, second]).detach()
    for piece in (1, 7 * 50, 2**18):
        monkeypatch.setattr("tapernorm.model.evaluate.CACHED", piece)
        torch.testing.assert_close(scaled_losses(logits, targets, 1.7), expected, rtol=1e-12, atol=1e-12)
    assert (expected[2] >= 0).all()


def test_no_best_temperature_where_there_is_none(bigrams: Any) -> None:
    table, x, y = bigrams
    spoilt, huge = table.clone(), table.clone()
    spoilt[7, 3], huge[7, 3] = float("nan"), float("inf")
    inverse = (-table).argmax(-1)[x]  # the smaller the logits, the better
    for logits, targets in ((spoilt, y), (huge, y), (table, inverse)):
        plain = evaluate(Bigrams(logits), x, targets, 64)
        found = evaluate(Bigrams(logits), x, targets, 64, best_temperature=True)
        assert found.best_temperature is found.loss_best_temperature is None
        assert math.isnan(found.loss) if math.isnan(plain.loss) else found.loss == plain.loss
    # The larger, the better: as good as it gets.
    sure = evaluate(Bigrams(torch.eye(50)), x, x, 64, best_temperature=True)
    assert sure.loss_best_temperature == pytest.approx(0, abs=1e-5) and sure.loss > 2
    # Nothing to gain at any temperature.
    flat = evaluate(Bigrams(torch.zeros(50, 50)), x, y, 64, best_temperature=True)
    assert flat.best_temperature == 1.0 and flat.loss_best_temperature == pytest.approx(np.log(50))


def test_the_best_temperature_separates_scale_from_content(
    byte_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], said: list[str]
) -> None:
    def sharpen(weights: dict[str, torch.Tensor]) -> None:
        weights["head.weight"] *= 1.2

    sharper = str(altered(byte_run, tmp_path / "sharper", sharpen))
    alone = measured({"checkpoint": str(byte_run), "fold": True})
    assert alone["loss_best_temperature"] <= alone["loss"] + 1e-6
    assert any(f"at the best temperature, T* = {alone['best_temperature']:.4f}: loss" in line for line in said)
    for name in ("best_temperature", "loss_best_temperature"):
        assert alone["folded"][name] == pytest.approx(alone[name], abs=1e-4), name
    first, second = measured({"checkpoint": (str(byte_run), sharper)})["checkpoints"]
    assert first["loss"] == alone["loss"] and first["loss_best_temperature"] == alone["loss_best_temperature"]
    assert second["best_temperature"] == pytest.approx(1.2 * first["best_temperature"], rel=1e-3)
    assert second["loss_best_temperature"] == pytest.approx(first["loss_best_temperature"], abs=2e-6)
    found = second["versus_baseline"]
    assert abs(found["mean"]) > 1e-3 and abs(found["at_best_temperature"]["mean"]) < 2e-6
    table = capsys.readouterr().out
    assert "loss at T*" in table and f"{second['loss_best_temperature']:.4f}" in table


def test_P22_an_untrained_model_emits_only_decodable_ids(tiny: Callable[..., Config], tmp_path: Path) -> None:
    run(tiny(trainer={"max_steps": 4}, gate={"k_warmup": 1, "k_taper": 3}, calibration={"window": 1}), tmp_path)
    model, _, tokenizer = checkpoints.load_model(checkpoints.find(tmp_path))
    rows = generate(model, torch.full((2, 1), tokenizer.eot), 250, temperature=5.0, seed=1)
    assert sum(map(len, rows)) == 500
    assert all(isinstance(tokenizer.decode(row), str) for row in rows)


def test_generation_is_greedy_seeded_and_stops(tiny: Callable[..., Config]) -> None:
    model = build_model(resolve(tiny(), 60))
    prompt = torch.randint(0, 60, (2, 5))
    greedy = generate(model, prompt, 6, temperature=0)
    assert greedy[0][0] == model(prompt)[0, -1].argmax().item()
    assert generate(model, prompt, 6, seed=3) == generate(model, prompt, 6, seed=3)
    stopped = generate(model, prompt, 6, temperature=0, eot=greedy[0][2])
    assert stopped[0] == greedy[0][: greedy[0].index(greedy[0][2])]
    assert len(generate(model, prompt, 40)[0]) == 40  # past the context: the oldest tokens leave the window


def test_faults_of_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoint is missing"):
        validate({}, EvaluateConfig)
    with pytest.raises(ConfigError, match="did you mean 'batch_size'"):
        validate({"checkpoint": "x", "batchsize": 3}, EvaluateConfig)
    with pytest.raises(ConfigError, match="no such directory"):
        evaluate_checkpoint(EvaluateConfig(checkpoint=str(tmp_path / "x"), device="cpu"))


# ------------------------------------------------------------------------------------------------- a trained byte model


def measured(config: dict[str, Any]) -> dict[str, Any]:
    return evaluate_checkpoint(EvaluateConfig(**{"samples": 0, "device": "cpu", **config}))


@pytest.fixture(scope="module")
def story() -> Callable[[int], str]:
    return lambda i: f"The cat number {i} sat on the mat and looked at the {('moon', 'sun', 'sea')[i % 3]}."


@pytest.fixture
def byte_run(tiny: Callable[..., Config], story: Callable[[int], str], tmp_path: Path) -> Path:
    """A fully tapered model of bytes, trained for a moment on little stories that train.txt and valid.txt keep."""
    (tmp_path / "train.txt").write_text("\n".join(map(story, range(100, 200))))
    (tmp_path / "valid.txt").write_text("\n".join(map(story, range(40))))
    dataset = {"kind": "text", **{split: str(tmp_path / f"{split}.txt") for split in ("train", "valid")}}
    config = tiny(norm="all_taper", model={"tied": False}, dataset=dataset, tokenizer={"kind": "bytes"})
    run(config, tmp_path / "run")
    return tmp_path / "run"


def altered(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a run's newest checkpoint with other weights."""
    path = checkpoints.find(source)
    weights = checkpoints.read_weights(path)
    change(weights)
    meta = checkpoints.read_meta(path)
    return checkpoints.write(
        target,
        meta["step"],
        model=weights,
        training=None,
        config=checkpoints.read_config(path),
        tokenizer=checkpoints.load_model(path)[2],
        meta={key: meta[key] for key in ("gate", "data", "tokens")},
    )


def texts(file: Path) -> TextDatasetConfig:
    return TextDatasetConfig(train=str(file), valid=str(file))


def test_P33_one_extreme_document(byte_run: Path, story: Callable[[int], str], tmp_path: Path) -> None:
    """A token that a model without norms cannot stand: the mean blows up, the median does not; the list names it."""

    def enlarge(weights: dict[str, torch.Tensor]) -> None:
        weights["embed.weight"][ord("~")] = 1e4

    checkpoint = str(altered(byte_run, tmp_path / "touchy", enlarge))
    stories = [story(i) for i in range(40)]
    files = {"plain": tmp_path / "plain.txt", "extreme": tmp_path / "extreme.txt"}
    files["plain"].write_text("\n".join(stories))
    files["extreme"].write_text("\n".join([*stories[:25], "Tim said " + "~" * 90, *stories[25:]]))
    plain, extreme = (measured({"checkpoint": checkpoint, "dataset": texts(files[name])}) for name in files)
    assert extreme["documents"] == plain["documents"] + 1 == 41
    assert extreme["loss"] > 100 * plain["loss"]
    assert extreme["median"] == pytest.approx(plain["median"], abs=0.3)
    assert extreme["loss_se"] > 0.5 * extreme["loss"]  # one document carries it all
    for order in ("mean", "total"):
        worst = extreme["worst"][order][0]
        assert worst["document"] == 25 and worst["excerpt"].startswith("Tim said ~~~~"), order
    assert extreme["nonfinite"] == 0


def test_losses_that_are_not_finite_are_counted_and_do_not_raise(
    byte_run: Path, tmp_path: Path, said: list[str]
) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["embed.weight"][ord("3")] = float("nan")

    checkpoint = str(altered(byte_run, tmp_path / "spoilt", spoil))
    report = measured({"checkpoint": checkpoint, "fold": True, "worst": 1, "samples": 1, "prompt": "3"})
    assert 0 < report["nonfinite"] < report["tokens"] == 256
    assert report["loss"] is report["loss_se"] is report["perplexity"] is report["bits_per_byte"] is None
    assert report["samples"] == [] and any("no samples" in line for line in said)
    assert report["folded"]["nonfinite"] == report["nonfinite"]
    assert report["best_temperature"] is report["loss_best_temperature"] is None
    assert any(f"{report['nonfinite']} of 256 losses are not finite" in line for line in said)
    both = measured({"checkpoint": (str(byte_run), checkpoint)})
    assert both["checkpoints"][1]["versus_baseline"]["mean"] is None
    assert f"spoilt: {report['nonfinite']} losses are not finite" in said


def test_bits_per_byte_of_a_byte_model(byte_run: Path) -> None:
    report = measured({"checkpoint": str(byte_run)})
    text = (byte_run.parent / "valid.txt").read_text().replace("\n", "\0")[1:257]  # the first token is not predicted
    assert report["bytes"] == 256 - text.count("\0") and report["documents"] == text.count("\0") + 1
    assert report["bits_per_byte"] == pytest.approx(report["loss"] / np.log(2) * report["tokens"] / report["bytes"])
    assert report["data"]["own"] and report["data"]["documents"] == 40
    assert report["data"]["tokens"] == (byte_run.parent / "valid.txt").stat().st_size + 1


@pytest.mark.parametrize("norm", ["baseline", "internal_taper", "all_taper"])
def test_folded_statistics_equal_the_unfolded(tiny: Callable[..., Config], tmp_path: Path, norm: str) -> None:
    run(tiny(norm=norm, trainer={"val_tokens": 4096}), tmp_path)
    report = measured({"checkpoint": str(tmp_path), "fold": True})
    folded = report["folded"]
    for name in ("loss", "loss_se", "median", "p99", "p99_9", "max", "bits_per_byte", "tokens", "documents", "bytes"):
        assert folded[name] == pytest.approx(report[name], abs=1e-4), name
    assert [found["document"] for found in folded["worst"]["total"]] == [
        found["document"] for found in report["worst"]["total"]
    ]
    assert folded["difference"] == pytest.approx(folded["loss"] - report["loss"])
    assert folded["gains"] is True and folded["certificate"]["head"] == "untied by folding"
    without = measured({"checkpoint": str(tmp_path), "fold": True, "fold_gains": False})["folded"]
    assert without["certificate"]["head"] == ("untied by folding" if norm == "all_taper" else "tied")
    assert without["loss"] == pytest.approx(report["loss"], abs=1e-4)


# ----------------------------------------------------------------------------------------------------------- other text


def test_other_text_with_the_checkpoints_tokenizer(
    byte_run: Path, story: Callable[[int], str], tmp_path: Path, said: list[str]
) -> None:
    own = measured({"checkpoint": str(byte_run), "tokens": 10_000})
    said.clear()
    given = {"checkpoint": str(byte_run), "dataset": texts(tmp_path / "valid.txt"), "cache_dir": str(tmp_path / "c")}
    same = measured(given)
    assert (same["loss"], same["tokens"]) == (own["loss"], own["tokens"])  # all of it, where nothing else is asked
    assert (own["data"]["own"], same["data"]["own"]) == (True, False)
    assert any("as given, not on the validation text of training" in line for line in said)
    assert (byte_run / "evaluation-text.json").is_file() and (byte_run / "evaluation.json").is_file()
    assert measured(given)["loss"] == same["loss"]
    assert sum("dataset text: prepared" in line for line in said) == 1
    assert sum("dataset text: reused" in line for line in said) == 1
    # Text of training that is gone or changed stands in nobody's way, until it is asked for.
    (tmp_path / "other.txt").write_text("\n".join(story(i) for i in range(500, 510)))
    report = measured(
        {"checkpoint": str(byte_run), "dataset": texts(tmp_path / "other.txt"), "cache_dir": str(tmp_path)}
    )
    assert report["documents"] == 10
    (tmp_path / "valid.txt").write_text("changed\n" * 3)
    with pytest.raises(ConfigError, match=r"the data set has changed since training .* dataset=\.\.\. to evaluate"):
        measured({"checkpoint": str(byte_run), "cache_dir": str(tmp_path)})


def test_faults_of_other_text(byte_run: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Hi.")
    (tmp_path / "empty.txt").write_text("\n\n")
    for name, message in {
        "short.txt": "the validation split has 4 tokens, one window needs",
        "empty.txt": r"dataset text: there is no document to evaluate on \(2 empty",
        "none.txt": r"dataset\.valid=.*none\.txt: no such file",
    }.items():
        with pytest.raises(ConfigError, match=message):
            measured({"checkpoint": str(byte_run), "dataset": texts(tmp_path / name)})


# ---------------------------------------------------------------------------------------------------------- comparisons


@pytest.fixture
def sweep(tiny: Callable[..., Config], tmp_path: Path) -> Path:
    for norm in ("all_taper", "baseline"):
        run(tiny(norm=norm, trainer={"val_tokens": 4096}), tmp_path / "sweep" / norm)
    (tmp_path / "sweep" / "failed").mkdir()
    return tmp_path / "sweep"


def test_a_sweep_against_its_baseline(sweep: Path, capsys: pytest.CaptureFixture[str], said: list[str]) -> None:
    report = measured({"checkpoint": str(sweep), "baseline": str(sweep / "baseline"), "fold": True})
    assert json.loads((sweep / "comparison.json").read_text()) == report
    assert report["baseline"] == "baseline"
    first, second = report["checkpoints"]
    assert (first["label"], second["label"]) == ("baseline", "all_taper")
    assert "versus_baseline" not in first and first["samples"] == []
    assert any("left out" in line and "failed" in line for line in said)
    # Each number is the single evaluation's, and the difference pairs by document.
    alone = measured({"checkpoint": str(sweep / "all_taper")})
    assert alone["loss"] == second["loss"] and alone["loss_se"] == second["loss_se"]
    found = second["versus_baseline"]
    assert found["mean"] == pytest.approx(second["loss"] - first["loss"])
    assert found["low"] < found["mean"] < found["high"] and found["documents"] == second["documents"] > 5
    best = found["at_best_temperature"]
    assert best["mean"] == pytest.approx(second["loss_best_temperature"] - first["loss_best_temperature"], abs=1e-9)
    assert second["folded"]["versus_baseline"]["mean"] == pytest.approx(found["mean"], abs=1e-5)
    table = capsys.readouterr().out
    assert table.count("all_taper_folded") == 1 and "difference (95 %)" in table
    assert f"{found['mean']:+.4f} ({found['low']:+.4f} to {found['high']:+.4f})" in table
    assert f"{second['loss']:.4f} ± {second['loss_se']:.4f}" in table


def test_one_document_has_a_difference_without_an_interval(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = (str(sweep / "baseline"), str(sweep / "all_taper"))
    report = measured({"checkpoint": pair, "tokens": 32, "out": str(sweep / "one.json")})
    found = report["checkpoints"][1]["versus_baseline"]
    assert found["documents"] == 1 and found["se"] is None and found["low"] is None
    table = capsys.readouterr().out
    assert f"{found['mean']:+.4f}" in table and "nan" not in table


def test_what_several_checkpoints_are_called_and_where_they_lie(sweep: Path) -> None:
    def labels(*given: str, **keys: Any) -> list[str]:
        report = measured({"checkpoint": given, **keys})
        return [found["label"] for found in report["checkpoints"]]

    out = str(sweep / "x.json")
    assert labels(str(sweep / "*")) == ["all_taper", "baseline"]
    assert labels(str(sweep / "*" / "checkpoints"), out=out)[:2] == [
        "all_taper/step-00000016",
        "all_taper/step-00000024",
    ]
    assert labels(str(sweep / "baseline"), str(sweep)) == ["baseline", "all_taper"]
    assert len(json.loads(Path(out).read_text())["checkpoints"]) == 4


def test_another_tokenizer_is_compared_in_bits_per_byte(
    sweep: Path, byte_run: Path, capsys: pytest.CaptureFixture[str], said: list[str]
) -> None:
    pair = (str(sweep / "baseline"), str(byte_run))
    report = measured({"checkpoint": pair})
    assert report["checkpoints"][1]["versus_baseline"] == {
        "not_compared": "another tokenizer and no two whole documents in common; tokens=... can take in more of it"
    }
    assert any("run: not compared with baseline" in line for line in said)
    report = measured({"checkpoint": pair, "dataset": texts(byte_run.parent / "valid.txt")})
    first, second = report["checkpoints"]
    found = second["versus_baseline"]
    assert found["unit"] == "bits/byte" and 30 < found["documents"] < 40
    assert found["mean"] == pytest.approx(second["bits_per_byte"] - first["bits_per_byte"], abs=0.1)
    assert "bits/byte" in capsys.readouterr().out.splitlines()[-1]


def test_faults_of_comparisons(sweep: Path, tmp_path: Path) -> None:
    early = str(sweep / "all_taper" / "checkpoints" / "step-00000016")
    for keys, message in [
        ({"checkpoint": ()}, r"names none"),
        ({"checkpoint": str(sweep / "none*")}, "none.*no run or checkpoint that can be evaluated"),
        ({"checkpoint": str(tmp_path)}, "neither a checkpoint nor a run"),
        ({"checkpoint": str(sweep), "baseline": str(sweep)}, "baseline=.*neither a checkpoint nor a run"),
        ({"checkpoint": str(sweep / "all_taper" / "config.yaml")}, "a file, not a directory"),
        ({"checkpoint": str(sweep), "out": str(sweep)}, "name a file in a directory that is there"),
        ({"checkpoint": str(sweep), "save_folded": str(tmp_path / "f")}, "is for one checkpoint, and 2 are given"),
        ({"checkpoint": (str(sweep), early), "fold": True}, "step-00000016: a model with an open gate"),
        (
            {"checkpoint": str(sweep), "out": str(tmp_path / "no" / "x.json")},
            "name a file in a directory that is there",
        ),
        ({"checkpoint": str(sweep), "tokens": 3}, "tokens=3 is less than one context"),
    ]:
        with pytest.raises(ConfigError, match=message):
            measured(keys)


# ---------------------------------------------------------------------------------------------------------- the command


def test_a_long_evaluation_shows_its_progress(
    byte_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured({"checkpoint": str(byte_run)})
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(measure, "LONG", 0.0)
    report = measured({"checkpoint": str(byte_run), "batch_size": 1})
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(f"window 8/8  100 %  loss {report['loss']:.3f}  ") and "ETA 0:00" in lines[-1]
    measured({"checkpoint": str(byte_run), "progress": "none"})
    assert capsys.readouterr().err == ""


def test_a_console_without_the_characters(byte_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (byte_run.parent / "accents.txt").write_text("Zoë " * 30, encoding="utf-8")
    monkeypatch.chdir(byte_run.parent)
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", console)
    monkeypatch.setattr(
        sys, "argv", ["evaluate.py", "checkpoint=run", "device=cpu", "dataset=text", "dataset.valid=accents.txt"]
    )
    runpy.run_path(str(CONFIGS.parent / "evaluate.py"), run_name="__main__")
    console.flush()
    assert b"Zo? Zo?" in console.buffer.getvalue()
    assert "oë Zoë" in json.loads((byte_run / "evaluation-text.json").read_text("utf-8"))["worst"]["mean"][0]["excerpt"]


def test_the_command_line(
    byte_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out = command("checkpoint=run", "dataset=text", "dataset.valid=valid.txt")
    assert status == 0 and "over 2,240 tokens of 40 documents" in out
    status, out = command("checkpoint=[run,run/checkpoints]", "baseline=run/checkpoints/step-00000024")
    assert status == 0 and "run/step-00000016" in out and (tmp_path / "run" / "comparison.json").is_file()
    assert command("checkpoint=run*", "fold=true", "fold_gains=false")[0] == 0
    for arguments, message in {
        ("dataset=text",): "dataset.valid is missing: name the text to evaluate on",
        ("dataset=text", "dataset.valid=none.txt"): f"dataset.valid={tmp_path}/none.txt: no such file",
        ("dataset=txt",): "did you mean dataset=text?",
        ("dataset=text", "dataset.vald=x"): "did you mean 'dataset.valid'?",
        ("dataset.valid=valid.txt",): "the chosen dataset has no key 'dataset.valid'; the kinds text have it",
        ("foldgains=true",): "did you mean 'fold_gains'?",
        ("checkpoint=[run,none]",): f"checkpoint {tmp_path}/none: no such directory",
    }.items():
        status, err = command("checkpoint=run", *arguments)
        assert status == 2 and message in err and err.startswith("error: ") and err.count("\n") == 1, err


def test_an_earlier_result_of_another_kind_stays(tiny: Callable[..., Config], tmp_path: Path, said: list[str]) -> None:
    run(tiny(), tmp_path)
    for tokens in (32, 32, 64, 96):
        evaluate_checkpoint(EvaluateConfig(checkpoint=str(tmp_path), tokens=tokens, samples=0, device="cpu"))
    kept = {file.name: json.loads(file.read_text())["tokens"] for file in tmp_path.glob("evaluation*.json")}
    assert kept == {"evaluation.json": 96, "evaluation-1.json": 32, "evaluation-2.json": 64}
    assert "the earlier evaluation.json is now evaluation-2.json" in said


def test_P65_a_full_disk_leaves_the_earlier_result_where_it_is(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tiny(), tmp_path)
    evaluate_checkpoint(EvaluateConfig(checkpoint=str(tmp_path), tokens=32, samples=0, device="cpu"))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "write_text", full)
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"out=.*evaluation\.json cannot be written: No space left"):
                evaluate_checkpoint(EvaluateConfig(checkpoint=str(tmp_path), tokens=64, samples=0, device="cpu"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    report = evaluate_checkpoint(EvaluateConfig(checkpoint=str(tmp_path), tokens=64, samples=0, device="cpu"))
    assert report["tokens"] == 64 and (tmp_path / "evaluation-1.json").read_bytes() == before["evaluation.json"]
