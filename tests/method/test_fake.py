"""FakeLN: real until its turn, then linear by a frozen scale; the order and the steps of the turns; whole runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tapernorm.config.options import Config
from tapernorm.config.resolve import build, resolve
from tapernorm.config.schema import ConfigError
from tapernorm.config.sites import removal_order, removal_turns
from tapernorm.method.anchor import token_scale
from tapernorm.method.gate import GateSchedule, Phase
from tapernorm.method.norms import FakeLN, FakeNorm
from tapernorm.model.decoder import build_model
from tapernorm.training import checkpoint as checkpoints
from tests.conftest import GPT2, NORMS, TINY, merge
from tests.training.test_training import EVERY_STEP, assert_same_weights, rows, run, weights

D = 16


def randomized(kind: type[FakeNorm], turns: tuple[float, ...]) -> FakeNorm:
    norm, generator = kind(D, 1e-5, turns), torch.Generator().manual_seed(0)
    for parameter in norm.parameters():
        parameter.data = torch.randn(D, generator=generator)
    return norm


def standard(norm: FakeNorm, h: Tensor) -> Tensor:
    if isinstance(norm, FakeLN):
        return F.layer_norm(h, (D,), norm.weight, norm.bias, 1e-5)
    return F.rms_norm(h, (D,), norm.weight, 1e-5)


@pytest.mark.parametrize("kind", [FakeNorm, FakeLN])
def test_the_norm_itself_then_a_fixed_map(kind: type[FakeNorm]) -> None:
    norm, h = randomized(kind, (0.5,)), 3 * torch.randn(2, 5, D) + 1
    assert torch.equal(norm(h), standard(norm, h))
    norm.set_gate(0.6, Phase.TAPERING)
    assert torch.equal(norm(h), standard(norm, h)), "not its turn yet"
    norm.calibrate(0.25)
    norm.set_gate(0.5, Phase.TAPERING)
    x = h - h.mean(-1, keepdim=True) if kind is FakeLN else h
    torch.testing.assert_close(norm(h), 0.25 * x * norm.weight + (0 if norm.bias is None else norm.bias))


@pytest.mark.parametrize("kind", [FakeNorm, FakeLN])
def test_an_attention_norm_goes_for_q_and_k_first(kind: type[FakeNorm]) -> None:
    norm, h = randomized(kind, (0.7, 0.2)), torch.randn(2, 5, D)
    norm.calibrate(0.5)
    norm.set_gate(0.4, Phase.TAPERING)
    qk, v = norm(h)
    assert torch.equal(v, standard(norm, h)) and not torch.allclose(qk, v)
    norm.set_gate(0.2, Phase.TAPERING)
    assert torch.equal(norm(h), qk), "one map for all three once V's turn has come"


def test_attention_reads_both_inputs() -> None:
    """Between the two turns: queries and keys by the frozen scale, values by the norm."""
    model = build_model(resolve(build(merge(TINY, {"norm": NORMS["fake_ln"], "model": GPT2})), 50))
    attention, x = model.blocks[0].attn, torch.randn(2, 2, 7, model.config.d_model)
    joint = attention.project((x[0], x[1]))
    a, b = attention.qkv(x[0]), attention.qkv(x[1])
    cut = 2 * model.config.d_model
    torch.testing.assert_close(joint, torch.cat([a[..., :cut], b[..., cut:]], -1))


def test_the_order_is_mlp_then_queries_and_keys_then_values_then_the_final_norm() -> None:
    order = removal_order(("attn", "mlp", "final"), 2)
    sites = ["0.mlp", "1.mlp", "0.attn", "1.attn", "0.attn", "1.attn", "final"]
    assert order == list(zip(["mlp", "mlp", "qk", "qk", "v", "v", "final"], sites, strict=True))
    assert removal_turns(("1.mlp", "0.attn"), 2) == {"1.mlp": (1 - 1 / 3,), "0.attn": (1 - 2 / 3, 0.0)}


def fake(tiny: Callable[..., Config], **sections: Any) -> Config:
    usual: dict[str, Any] = {
        "gate": {"shape": "sequential", "k_warmup": 8, "k_taper": None, "gaps": [1, 2, 2]},
        "optim": {"lr": 3e-3},
        "trainer": EVERY_STEP,
        "model": GPT2 | {"dropout": 0.0},
    }
    return tiny(norm="fake_ln", **merge(usual, sections))


def test_every_gap_is_kept(tiny: Callable[..., Config]) -> None:
    config = fake(tiny)
    schedule = GateSchedule.from_config(config)
    assert schedule.removals == (9, 10, 11, 13, 15, 17, 19) and config.gate.k_taper == 19
    assert [schedule.value(k) for k in (8, 9, 18, 19, 24)] == [1.0, 1 - 1 / 7, 1 - 6 / 7, 0.0, 0.0]
    norms = build_model(resolve(config, 50)).gated_norms()
    for step in range(1, 25):
        gone = sum(norm.turns_taken(schedule.value(step)) for norm in norms.values())
        assert gone == sum(removal <= step for removal in schedule.removals), step
    even = GateSchedule.from_config(fake(tiny, gate={"gaps": None, "k_taper": 20}))
    assert even.removals == (9, 11, 13, 14, 16, 18, 20)
    with pytest.raises(
        ConfigError, match=r"gate\.k_taper=20: gate\.gaps=\[1, 2, 2\] reaches the last removal at step 19"
    ):
        fake(tiny, gate={"k_taper": 20})
    with pytest.raises(ConfigError, match=r"gate\.k_taper=65 <= trainer\.max_steps=24"):
        fake(tiny, gate={"gaps": [9, 9, 10]})
    with pytest.raises(ConfigError, match=r"hold; gate\.first_removal is k_warmup; gate\.gaps=\[1, 2, 2\] .* step 36"):
        fake(tiny, gate={"k_warmup": None, "first_removal": 25})
    for gaps, message in (([1, 2], r"gaps=\[1, 2\]: should have 3 items$"), ([0, 1, 2], r"gaps\[0\]=0: .* than 0$")):
        with pytest.raises(ConfigError, match=message):
            fake(tiny, gate={"gaps": gaps})


def test_the_frozen_scale_is_the_running_mean_of_the_batch_means(tiny: Callable[..., Config], tmp_path: Path) -> None:
    """From forwards of the saved models on the batches that training took, by hand."""
    from tapernorm.data.batches import Batches
    from tapernorm.data.prepare import prepare

    config = fake(tiny, calibration={"window": 4, "decay": 0.5})
    run(config, tmp_path)
    data = prepare(config)
    config = resolve(config, data.tokenizer.n_vocab)
    batches = Batches(data.train.tokens, config.model.n_ctx, config.trainer.batch_size, config.seed)
    means = []
    for step in range(5, 9):  # the window; step k is taken with the weights of k - 1
        model = checkpoints.load_model(tmp_path / "checkpoints" / f"step-{step - 1:08d}")[0]
        taps: dict[str, Tensor] = {}
        model.trunk(batches.batch(step)[0], taps)
        means.append(token_scale(taps["0.mlp"], "layer", 1e-5).mean().item())
    share = [0.5**later for later in (3, 2, 1, 0)]
    expected = sum(m * w for m, w in zip(means, share, strict=True)) / sum(share)
    for step in (9, 24):  # 0.mlp goes before step 9 and stays as it is
        c = weights(tmp_path, step)["blocks.0.mlp_norm.c"].item()
        assert 1 / c == pytest.approx(expected, rel=1e-5), step
    attention = [weights(tmp_path, step)["blocks.0.attn_norm.c"].item() for step in (10, 11, 14, 15, 24)]
    assert attention[0] == 1.0 and attention[1] == attention[2] != attention[3] == attention[4]


@pytest.mark.parametrize("calibration", ["ema", "none"])
def test_removals_are_not_compiled(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calibration: str
) -> None:
    """Each changes the graph: seven compilations would be close to the limit, after which all of it runs eager."""
    from torch._dynamo.testing import CompileCounter

    counter, original = CompileCounter(), torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda f, **keys: original(f, backend=counter, **keys))
    run(fake(tiny, calibration={"kind": calibration, "window": 4}, trainer={"compile": True}), tmp_path)
    torch._dynamo.reset()
    assert counter.frame_count == 2, "before the first removal and after the last"


@pytest.mark.parametrize("step", [4, 12, 16, 22])
def test_P24_resumed_in_between_equals_uninterrupted(tiny: Callable[..., Config], tmp_path: Path, step: int) -> None:
    config = fake(tiny, anchor={"kind": "batch_mean"}, model={"dropout": 0.1})
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    summary = run(config, whole)
    assert summary["gate"] == 0.0
    shutil.copytree(whole, resumed)
    run(config, resumed, resumed / "checkpoints" / f"step-{step:08d}")
    assert_same_weights(weights(whole, 24), weights(resumed, 24))
    assert rows(whole) == rows(resumed)


def test_the_spread_of_the_scales_shrinks_under_the_batch_mean_anchor(
    tiny: Callable[..., Config], tmp_path: Path
) -> None:
    spread = {}
    for kind, weight in (("none", 0.0), ("batch_mean", 3.0)):
        config = fake(tiny, anchor={"kind": kind, "spread_weight": weight})
        run(config, tmp_path / kind)
        last = rows(tmp_path / kind)[-1]
        spread[kind] = last["scale/final_rms_p99"] / last["scale/final_rms_mean"]
        assert ("anchor/weighted" in last) is (kind == "batch_mean")
    assert spread["batch_mean"] < spread["none"]
    assert "anchor/weighted" in rows(tmp_path / "batch_mean")[0], "it acts from the first step"


def test_the_batch_mean_anchor_needs_no_warmup(tiny: Callable[..., Config], tmp_path: Path) -> None:
    usual = {"gate": {"k_warmup": 0}, "trainer": EVERY_STEP | {"max_steps": 3}}
    run(tiny(norm="baseline", anchor={"kind": "batch_mean"}, **usual), tmp_path)
    assert all(row["anchor/weighted"] > 0 and "scale/target" not in row for row in rows(tmp_path))
    with pytest.raises(ConfigError, match="leaves no step to calibrate on"):
        tiny(norm="baseline", anchor={"kind": "mean_log"}, **usual)
