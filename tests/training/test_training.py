"""Whole runs: equal to the baseline until the taper, exact resume, equal under accumulation, undisturbed by observers.

`python -m tests.training.test_training` writes the golden losses anew.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tapernorm.config.options import Config
from tapernorm.config.schema import ConfigError
from tapernorm.method.anchor import token_scale
from tapernorm.runtime.record import read_metrics
from tapernorm.training import checkpoint as checkpoints
from tapernorm.training.loop import Divergence, train
from tapernorm.training.state import TrainingRun

EVERY_STEP = {"log_interval": 1, "save_interval": 1, "keep_last": 1000}
ANCHORS = ("none", "fixed_target", "mean_log")
CLOCK = {"throughput/tokens_per_s"}


def run(config: Config, directory: Path, checkpoint: Path | None = None) -> dict[str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    return train(config, directory, checkpoint)


def weights(directory: Path, step: int) -> dict[str, Tensor]:
    return checkpoints.read_weights(directory / "checkpoints" / f"step-{step:08d}")


def assert_same_weights(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def rows(directory: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in CLOCK} for row in read_metrics(directory)]


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("norm", ["internal_taper", "all_taper", "fake_ln"])
def test_bit_identical_to_the_baseline_until_the_taper(
    tiny: Callable[..., Config], tmp_path: Path, anchor: str, norm: str
) -> None:
    """Losses, gradient norms and weights, with clipping, accumulation and an active statistics window."""
    keys: dict[str, Any] = {
        "anchor": {"kind": anchor},
        "trainer": EVERY_STEP | {"max_steps": 14, "accumulation": 2},
        "optim": {"clip": 0.5},
        "gate": {"k_warmup": 10, "k_taper": 13},
    }
    run(tiny(norm="baseline", **keys), tmp_path / "baseline")
    run(tiny(norm=norm, **keys), tmp_path / "taper")
    baseline, taper = rows(tmp_path / "baseline"), rows(tmp_path / "taper")
    assert [row["step"] for row in taper] == list(range(1, 15))
    for a, b in zip(baseline[:10], taper[:10], strict=True):
        for key in ("train/loss", "grad/norm", "update/ratio"):
            assert a[key] == b[key], (a["step"], key)
    assert any(row["grad/norm"] > 0.5 for row in baseline[:10]), "clipping never acted"
    assert baseline[9]["scale/target"] == taper[9]["scale/target"]
    for step in range(1, 11):
        a, b = weights(tmp_path / "baseline", step), weights(tmp_path / "taper", step)
        assert not any("taper" in name or name.endswith(".c") for name in a)
        assert_same_weights(a, {name: b[name] for name in a})
    assert baseline[11]["train/loss"] != taper[11]["train/loss"]
    assert taper[12]["gate/g"] == 0.0 and baseline[12]["gate/g"] == 1.0


@pytest.mark.parametrize(
    ("phase", "step"), [("normalized", 2), ("window", 7), ("calibration", 10), ("tapering", 14), ("tapered", 20)]
)
@pytest.mark.parametrize(
    ("anchor", "calibration"),
    [("none", {}), ("fixed_target", {"level": 1.0}), ("none", {"kind": "ema"}), ("z_loss", {"fit": "least_squares"})],
)
def test_P24_resumed_equals_uninterrupted(
    tiny: Callable[..., Config], tmp_path: Path, phase: str, step: int, anchor: str, calibration: dict[str, Any]
) -> None:
    keys = {"anchor": {"kind": anchor}, "calibration": calibration, "optim": {"multipliers": {"writers": 0.5}}}
    config = tiny(norm="all_taper", trainer={"save_interval": 1, "keep_last": 1000}, **keys)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    summary = run(config, whole)
    shutil.copytree(whole, resumed)  # the metrics then reach beyond the checkpoint, as after a kill
    again = run(config, resumed, resumed / "checkpoints" / f"step-{step:08d}")
    assert_same_weights(weights(whole, 24), weights(resumed, 24))
    assert rows(whole) == rows(resumed)
    timeless = {"train_seconds"}
    assert {k: v for k, v in again.items() if k not in timeless} == {
        k: v for k, v in summary.items() if k not in timeless
    }
    once, twice = (
        [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
        for directory in (whole, resumed)
    )
    assert once == twice == sorted(once), "nothing of a step is there twice"


@pytest.mark.parametrize("anchor", ["fixed_target", "log_target", "mean_log", "batch_mean", "z_loss"])
def test_P25_accumulation_does_not_change_the_step(tiny: Callable[..., Config], tmp_path: Path, anchor: str) -> None:
    keys = {"anchor": {"kind": anchor}, "optim": {"lr": 1e-3}}
    for accumulation in (1, 4):
        trainer = {"log_interval": 1, "batch_size": 8, "accumulation": accumulation}
        run(tiny(norm="all_taper", trainer=trainer, **keys), tmp_path / str(accumulation))
    whole, split = rows(tmp_path / "1"), rows(tmp_path / "4")
    for a, b in zip(whole, split, strict=True):
        for key in ("train/loss", "grad/norm", "anchor/weighted", "anchor/force", "scale/target"):
            assert (key in a) == (key in b)
            assert a.get(key, 0.0) == pytest.approx(b.get(key, 0.0), rel=2e-4, abs=1e-6), (a["step"], key)
    first = next(row for row in whole if "anchor/weighted" in row)
    assert first["step"] == (1 if anchor == "batch_mean" else 11)
    one, other = (rows(tmp_path / n)[10] for n in ("1", "4"))
    assert one["grad/norm"] == pytest.approx(other["grad/norm"], rel=1e-5)


@pytest.mark.parametrize("norm", ["baseline", "internal_taper", "all_taper"])
def test_the_stream_is_brought_to_a_level_without_changing_the_function(
    tiny: Callable[..., Config], tmp_path: Path, norm: str
) -> None:
    """Bit-identical up to k_warmup; then the scale is the level to 1 %, the loss the same, and eps with them."""
    trainer = EVERY_STEP | {
        "val_interval": 1,
        "batch_size": 32,
        "probe_size": 16,
        "val_tokens": 512,
        "dynamics_interval": 1,
    }
    run(tiny(norm=norm, trainer=trainer), tmp_path / "plain")
    run(tiny(norm=norm, trainer=trainer, calibration={"level": 0.3}), tmp_path / "level")
    plain, level = rows(tmp_path / "plain"), rows(tmp_path / "level")
    assert [row["train/loss"] for row in plain[:10]] == [row["train/loss"] for row in level[:10]]
    assert level[9]["val/loss"] == pytest.approx(plain[9]["val/loss"], rel=1e-6)
    assert level[9]["scale/target"] == pytest.approx(0.3, rel=1e-3)
    assert level[9]["scale/final_rms_mean"] == pytest.approx(0.3, rel=0.03), "of held-out text"
    assert level[10]["train/loss"] == pytest.approx(plain[10]["train/loss"], rel=1e-5)
    assert level[-1]["train/loss"] != plain[-1]["train/loss"]
    kappa = plain[9]["scale/target"] / 0.3
    config = checkpoints.read_config(tmp_path / "level" / "checkpoints" / "step-00000024")
    assert config.model.norm_eps == pytest.approx(1e-6 / kappa**2, rel=1e-3)


@pytest.mark.parametrize("norm", ["baseline", "internal_taper", "all_taper"])
def test_the_level_is_held_while_the_gate_is_open_without_changing_the_function(
    tiny: Callable[..., Config], tmp_path: Path, norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[int, tuple[float, ...]] = {}

    def measured(run: TrainingRun) -> tuple[float, float]:
        [(x, y)] = run.microbatches(run.step)
        with torch.no_grad():
            loss, h = run.model.loss(x, y)
            return loss.item(), token_scale(h, "rms", 0.0).mean().item()

    def watched(run: TrainingRun, step: int) -> None:
        before = measured(run)
        hold(run, step)
        found[step] = (*before, *measured(run))

    hold = TrainingRun.hold_level
    monkeypatch.setattr(TrainingRun, "hold_level", watched)
    anchor = {"kind": "mean_log" if norm == "all_taper" else "none"}
    run(tiny(norm=norm, anchor=anchor, calibration={"level": 0.3}), tmp_path)
    for step, (loss, scale, after, level) in found.items():
        held = step == 15  # k_warmup = 10 < step <= k_taper = 18, every fifth
        assert level == (pytest.approx(0.3, rel=1e-3) if held else scale), step
        assert after == pytest.approx(loss, rel=1e-5) and (not held or abs(scale / 0.3 - 1) > 0.02)


def test_a_level_is_not_for_norms_that_do_not_divide_by_the_scale(
    tiny: Callable[..., Config], tmp_path: Path, said: list[str]
) -> None:
    (tmp_path / "run").mkdir()
    train(tiny(norm="dyt", calibration={"level": 0.3}), tmp_path / "run")
    assert "calibration.level=0.3: not for norm=dyt; the stream stays as it is" in said


@pytest.mark.parametrize("anchor", ["none", "mean_log"])
def test_the_yardsticks_have_their_zero_at_k_warmup(tiny: Callable[..., Config], tmp_path: Path, anchor: str) -> None:
    sizes = {"dynamics_interval": 1, "batch_size": 32, "probe_size": 16, "val_tokens": 512}
    keys = {"anchor": {"kind": anchor}, "trainer": EVERY_STEP | sizes}
    summary = run(tiny(norm="all_taper", **keys), tmp_path / "run")
    found = rows(tmp_path / "run")
    at = found[9]
    assert not any("scale/drift" in row or "calib/mismatch.final" in row for row in found[:9])
    assert at["scale/drift"] == 0.0
    assert abs(math.log(at["scale/target"] / at["scale/final_rms_mean"])) < 0.03
    for row in found[10:]:
        assert row["scale/drift"] == pytest.approx(math.log(row["scale/final_rms_mean"] / at["scale/final_rms_mean"]))
        spread = row["calib/mismatch.final"] - math.log(row["calib/c.final"] * row["scale/final_rms_mean"])
        assert -0.2 < spread <= 0, "the mean of a log is below the log of the mean"
    sites = [key for key in at if key.startswith("calib/mismatch.")]
    assert len(sites) == 5 and max(abs(at[key]) for key in sites) < 0.2
    assert summary["drift"] == found[-1]["scale/drift"]
    assert summary["mismatch"]["gate_0"] == max(abs(found[17][key]) for key in sites)
    assert summary["mismatch"]["end"] == max(abs(found[-1][key]) for key in sites)
    assert summary["best_temperature"] == found[-1]["val/best_temperature"]
    assert summary["val_loss_best_temperature"] <= summary["val_loss"]
    tokens = json.loads((tmp_path / "run" / "probe_tokens.json").read_text())
    assert tokens["step"] == 24 and len(tokens["theory"]) == len(tokens["measured"]) == 512
    assert tokens["measured"] == pytest.approx(tokens["theory"], abs=1e-4), "without a final norm they are equal"


def test_a_stale_c_is_said_with_its_remedy(tiny: Callable[..., Config], tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "run").mkdir()
    keys = {"calibration": {"kind": "ema", "window": 9, "decay": 0.99}, "trainer": {"dynamics_interval": 1}}
    train(tiny(norm="all_taper", **keys), tmp_path / "run")
    (line,) = [line for line in said if "calib/mismatch" in line and line.startswith("warning")]
    assert "c is off by a factor of" in line and "calibration=tracked may help" in line


def test_observers_are_inert(tiny: Callable[..., Config], tmp_path: Path) -> None:
    often = {"log_interval": 1, "dynamics_interval": 1, "val_interval": 1, "save_interval": 1, "keep_last": 1000}
    rarely = {"log_interval": 1000, "dynamics_interval": 1000, "val_interval": 1000, "save_interval": 1000}
    for name, trainer in (("often", often), ("rarely", rarely)):
        run(tiny(norm="all_taper", anchor={"kind": "log_target"}, trainer=trainer), tmp_path / name)
    assert_same_weights(weights(tmp_path / "often", 24), weights(tmp_path / "rarely", 24))


def test_gains_join_and_leave_the_optimizer_with_the_phases(tiny: Callable[..., Config], tmp_path: Path) -> None:
    run(tiny(norm="all_taper", trainer=EVERY_STEP), tmp_path)
    gains = []
    for step in (10, 11, 18):
        state = checkpoints.read_training(tmp_path / "checkpoints" / f"step-{step:08d}")["optimizer"]
        gains.append(
            (len(state["param_groups"]), len(state["state"]), [g["weight_decay"] for g in state["param_groups"]])
        )
    assert gains == [(2, 14, [0.1, 0.0]), (3, 19, [0.1, 0.0, 0.0]), (3, 14, [0.1, 0.0, 0.0])]
    before, after = weights(tmp_path, 18), weights(tmp_path, 24)
    for name in before:
        if name.endswith(("attn_norm.weight", "mlp_norm.weight", "final_norm.weight", ".c")):
            assert torch.equal(before[name], after[name]), f"{name} moved after gate 0"


WANTED = {
    "train/loss",
    "val/loss",
    "anchor/loss",
    "anchor/force",
    "gate/g",
    "scale/final_rms_mean",
    "scale/final_rms_p99",
    "scale/target",
    "logits/norm_mean",
    "logits/abs_max",
    "radial/mean",
    "radial/train_mean",
    "radial/theory",
    "radial/fraction",
    "radial/bound_ok",
    "grad/norm",
    "grad/final_hidden_norm",
    "throughput/tokens_per_s",
    "scale/rms.0.attn",
    "calib/c.final",
}


def test_the_run_ends_tapered_with_every_metric(tiny: Callable[..., Config], tmp_path: Path) -> None:
    summary = run(tiny(norm="all_taper", anchor={"kind": "fixed_target"}), tmp_path)
    assert summary["gate"] == 0.0 and math.isfinite(summary["val_loss"])
    names = {name for row in read_metrics(tmp_path) for name in row}
    assert names >= WANTED
    last = read_metrics(tmp_path)[-1]
    assert last["step"] == 24 and last["gate/g"] == 0.0 and last["val/loss"] == summary["val_loss"]


@pytest.mark.parametrize("norm", ["internal_taper", "fake_ln"])
@pytest.mark.parametrize("shape", ["linear", "sqrt", "step", "sequential", "constant"])
@pytest.mark.parametrize("calibration", ["one_batch", "none"])
def test_every_gate_and_calibration_runs(
    tiny: Callable[..., Config], tmp_path: Path, shape: str, calibration: str, norm: str
) -> None:
    config = tiny(norm=norm, gate={"shape": shape}, calibration={"kind": calibration}, optim={"lr": 1e-3})
    summary = run(config, tmp_path)
    assert summary["gate"] == (1.0 if shape == "constant" else 0.0)
    untouched = calibration == "none" or (norm == "fake_ln" and shape == "constant")
    assert all((c == 1.0) is untouched for c in summary["c"].values())


@pytest.mark.parametrize("kind", ["dyt", "derf", "none"])
def test_comparators_train(tmp_path: Path, kind: str) -> None:
    assert math.isfinite(run(_comparator(kind), tmp_path)["val_loss"])


def _comparator(kind: str) -> Config:
    from tapernorm.config.resolve import build, resolve
    from tests.conftest import TINY, merge

    return resolve(build(merge(TINY, {"norm": {"kind": kind}, "optim": {"lr": 1e-3}})))


def test_layernorm_family_tapers_too(tiny: Callable[..., Config], tmp_path: Path) -> None:
    config = tiny(norm="all_taper", model={"norm_family": "layer"}, anchor={"kind": "fixed_target"})
    summary = run(config, tmp_path)
    assert summary["gate"] == 0.0 and math.isfinite(summary["val_loss"])
    assert abs(read_metrics(tmp_path)[-1]["radial/mean"] - read_metrics(tmp_path)[-1]["radial/theory"]) < 1e-4


def test_P31_divergence_names_step_gate_and_layer_and_keeps_the_last_checkpoint(
    tiny: Callable[..., Config], tmp_path: Path
) -> None:
    config = tiny(
        norm="all_taper",
        gate={"k_warmup": 0, "k_taper": 1},
        calibration={"kind": "none"},
        optim={"lr": 1e18, "warmup_steps": 6, "clip": None},
        trainer={"save_interval": 1, "keep_last": 2},
    )
    with pytest.raises(Divergence) as error:
        run(config, tmp_path)
    divergence = error.value
    assert divergence.step > 1 and divergence.gate == 0.0 and divergence.layer
    assert f"step {divergence.step}, gate 0" in str(divergence)
    last = read_metrics(tmp_path)[-1]
    assert last["step"] == divergence.step and last["train/loss"] is None and last["nonfinite/count"] >= 1
    latest = checkpoints.latest(tmp_path)
    assert latest is not None and checkpoints.step_of(latest) == divergence.step - 1
    assert all(torch.isfinite(tensor).all() for tensor in checkpoints.read_weights(latest).values())


def test_resume_refuses_other_data_under_the_same_path(tiny: Callable[..., Config], tmp_path: Path) -> None:

    def write(name: str, factor: int) -> str:
        lines = [f"The cat number {i} sat on mat {i * factor} and looked at the moon. " * 20 for i in range(60)]
        (tmp_path / name).write_text("\n".join(lines))
        return str(tmp_path / name)

    dataset = {"kind": "text", "train": write("train.txt", 7), "valid": write("valid.txt", 5)}
    config = tiny(dataset=dataset, tokenizer={"kind": "bytes"}, optim={"lr": 1e-3})
    run(config, tmp_path / "run")
    write("train.txt", 3)
    with pytest.raises(ConfigError, match="the data set or its tokenizer has changed"):
        run(config, tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000016")


def test_a_faulty_step_is_skipped_and_nothing_after_it_trains(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that is only looked at when something is logged, a non-finite gradient is found later."""
    from tapernorm.training.state import TrainingRun

    def seldom(self: TrainingRun, observed: bool) -> None:
        if observed:
            original(self, observed)
        else:
            states.append((self.step, self.model.embed.weight.detach().clone()))

    def poisoned(self: TrainingRun, step: int, grad_norm: Tensor) -> None:
        guard(self, step, grad_norm * math.nan if step == 6 else grad_norm)

    states: list[tuple[int, Tensor]] = []
    original, guard = TrainingRun.stop_if_not_finite, TrainingRun.guard
    monkeypatch.setattr(TrainingRun, "stop_if_not_finite", seldom)
    monkeypatch.setattr(TrainingRun, "guard", poisoned)
    often = {"log_interval": 10, "dynamics_interval": 10, "val_interval": 10, "save_interval": 10}
    with pytest.raises(Divergence) as error:
        run(tiny(trainer=often), tmp_path)
    assert error.value.step == 6 and error.value.layer == "the norm of the gradient"
    after = {step: weight for step, weight in states if step >= 5}
    assert all(torch.equal(weight, after[5]) for weight in after.values())
    steps = [row["step"] for row in read_metrics(tmp_path)]
    assert steps == [1, 6]


def test_tapering_starts_from_a_trained_baseline(tiny: Callable[..., Config], tmp_path: Path) -> None:
    baseline = run(tiny(norm="baseline"), tmp_path / "baseline")
    config = tiny(
        norm="all_taper",
        model={"init": str(tmp_path / "baseline")},
        optim={"lr": 1e-4},
        trainer={"log_interval": 1, "val_interval": 1},
    )
    run(config, tmp_path / "taper")
    first = read_metrics(tmp_path / "taper")[0]["val/loss"]
    assert abs(first - baseline["val_loss"]) < 0.1
    other = tiny(norm="all_taper", model={"init": str(tmp_path / "taper")})
    with pytest.raises(ConfigError, match="its gate is 0"):
        run(other, tmp_path / "again")
    other = tiny(norm="all_taper", model={"init": str(tmp_path / "baseline"), "head_dim": 8})
    with pytest.raises(ConfigError, match=r"model\.head_dim is 16 there and 8 here"):
        run(other, tmp_path / "again")
    shutil.rmtree(tmp_path / "baseline")  # a resumed run does not need what it once started from
    run(config, tmp_path / "taper", tmp_path / "taper" / "checkpoints" / "step-00000016")


def test_a_validation_loss_that_is_not_finite_is_a_divergence(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tapernorm.model.evaluate import Evaluation
    from tapernorm.training import observe

    monkeypatch.setattr(observe, "evaluate", lambda *arguments: Evaluation(math.inf, 1))
    with pytest.raises(Divergence, match="the validation loss"):
        run(tiny(), tmp_path)


def test_failing_samples_do_not_cost_the_result(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any, **keys: Any) -> None:
        raise RuntimeError("probability tensor contains inf, nan or element < 0")

    monkeypatch.setattr("tapernorm.model.generate.generate", fails)
    assert math.isfinite(run(tiny(trainer={"samples": 2}), tmp_path)["val_loss"])


def test_the_best_validated_checkpoint_is_kept(tiny: Callable[..., Config], tmp_path: Path) -> None:
    trainer = {"save_interval": 4, "val_interval": 3, "keep_last": 1}
    config = tiny(optim={"lr": 0.3, "warmup_steps": 0, "clip": None}, trainer=trainer)  # so that late is not best
    run(config, tmp_path)
    validated = {
        row["step"]: row["val/loss"]
        for row in read_metrics(tmp_path)
        if row.get("val/loss") is not None and (row["step"] % 4 == 0 or row["step"] == 24)
    }
    kept = {checkpoints.step_of(path) for path in checkpoints.list_checkpoints(tmp_path)}
    assert kept == {24, min(validated, key=lambda step: validated[step])}


def test_three_graphs_and_no_recompilation_while_the_gate_moves(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.testing import CompileCounter

    counter, original = CompileCounter(), torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda f, **keys: original(f, backend=counter, **keys))
    with torch._dynamo.config.patch(error_on_recompile=False):
        run(tiny(norm="all_taper", anchor={"kind": "fixed_target"}, trainer={"compile": True}), tmp_path)
    torch._dynamo.reset()
    assert counter.frame_count == 3
    names = checkpoints.read_weights(tmp_path / "checkpoints" / "step-00000024")
    assert not any("_orig_mod" in name for name in names)


# ------------------------------------------------------------------------------------------------------ golden numbers

GOLDEN = Path(__file__).parents[1] / "golden.json"
GOLDEN_RUNS = [
    ("baseline", "none"),
    ("internal_taper", "fixed_target"),
    ("all_taper", "none"),
    ("all_taper", "mean_log"),
]


def golden_losses(config: Config, directory: Path) -> list[float]:
    run(config, directory)
    return [row["train/loss"] for row in read_metrics(directory)][:20]


@pytest.mark.parametrize(("norm", "anchor"), GOLDEN_RUNS)
def test_golden_losses(tiny: Callable[..., Config], tmp_path: Path, norm: str, anchor: str) -> None:
    config = tiny(norm=norm, anchor={"kind": anchor}, trainer={"log_interval": 1}, tokenizer={"kind": "bytes"})
    expected = json.loads(GOLDEN.read_text())[f"{norm}+{anchor}"]
    assert golden_losses(config, tmp_path) == pytest.approx(expected, rel=1e-3)


def regenerate() -> None:
    import tempfile

    from tapernorm.config.resolve import build, resolve
    from tests.conftest import NORMS, TINY, merge

    losses = {}
    for norm, anchor in GOLDEN_RUNS:
        keys = {
            "norm": NORMS[norm],
            "anchor": {"kind": anchor},
            "trainer": {"log_interval": 1},
            "tokenizer": {"kind": "bytes"},
        }
        with tempfile.TemporaryDirectory() as directory:
            os.environ["TAPERNORM_CACHE"] = directory
            losses[f"{norm}+{anchor}"] = golden_losses(resolve(build(merge(TINY, keys))), Path(directory))
    GOLDEN.write_text(json.dumps(losses, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(regenerate())
