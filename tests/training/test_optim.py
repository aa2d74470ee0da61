"""Multipliers of the learning rate by role, and the rescaling of the residual stream, which equals some of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tapernorm.config.options import Config, ModelConfig, MultipliersConfig, OptimConfig, TaperNormConfig
from tapernorm.config.resolve import resolve
from tapernorm.method.anchor import token_scale
from tapernorm.method.calibration import Calibration
from tapernorm.method.gate import GateSchedule, Phase
from tapernorm.model.decoder import build_model
from tapernorm.training.optim import (
    add_taper_gains,
    build_optimizer,
    drop_state_of_frozen,
    rescale,
    role,
    set_learning_rates,
)

KAPPA, STEPS, K_WARMUP, K_TAPER = 4.0, 70, 20, 50


def shape(**keys: object) -> Config:
    model = ModelConfig(n_layer=2, n_ctx=16, d_model=32, head_dim=16, **keys)
    return Config(model=model, norm=TaperNormConfig(sites=("attn", "mlp", "final")))


def test_every_parameter_has_a_role() -> None:
    gpt2 = {"positions": "learned", "mlp": "gelu", "biases": True, "norm_family": "layer", "tied": False}
    found: dict[str, set[str]] = {}
    for keys in ({}, gpt2):
        for name, _ in build_model(resolve(shape(**keys), 64)).named_parameters():
            found.setdefault(role(name), set()).add(name.replace("blocks.1.", "blocks.0."))
    assert found["embed"] == {"embed.weight", "position_embed.weight"}
    out, down = "blocks.0.attn.out", "blocks.0.mlp.down"
    assert found["writers"] == {f"{out}.weight", f"{out}.bias", f"{down}.weight", f"{down}.bias"}
    assert found["final_gain"] == {f"final_norm.{name}" for name in ("weight", "bias", "taper_weight")}
    norms = ("blocks.0.attn_norm", "blocks.0.mlp_norm")
    assert found["gains"] == {f"{norm}.{name}" for norm in norms for name in ("weight", "bias", "taper_weight")}
    assert {"head.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.gate_up.weight"} < found["readers"]


def test_multipliers_act_on_the_rate_and_inversely_on_the_decay_after_their_step() -> None:
    config = resolve(shape(), 64)
    multipliers = MultipliersConfig(embed=4.0, final_gain=0.25, after_step=3)
    optim = dataclasses.replace(config.optim, multipliers=multipliers, weight_decay=0.1)
    model = build_model(config)
    plain, optimizer = build_optimizer(model, config.optim), build_optimizer(model, optim)
    add_taper_gains(optimizer, model, optim)
    assert [len(group["params"]) for group in plain.param_groups] == [9, 5], "the groups of older checkpoints"
    rates = {}
    for step in (3, 4):
        set_learning_rates(plain, step, config.optim)
        set_learning_rates(optimizer, step, optim)
        base = plain.param_groups[0]["lr"]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                rates[step, id(parameter)] = group["lr"] / base, group["weight_decay"]
    expected = {"embed.weight": (4.0, 0.025), "final_norm.weight": (0.25, 0.0), "final_norm.taper_weight": (0.25, 0.0)}
    for name, parameter in model.named_parameters():
        decay = 0.1 if parameter.dim() == 2 else 0.0
        assert rates[3, id(parameter)] == pytest.approx((1.0, decay))
        assert rates[4, id(parameter)] == pytest.approx(expected.get(name, (1.0, decay))), name


@pytest.mark.parametrize("family", ["rms", "layer"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_rescaling_divides_the_stream_and_preserves_the_function(
    family: str, tied: bool, dtype: torch.dtype, bound: float
) -> None:
    """Also where eps counts: with the embedding's scale of 0.02, eps is up to a tenth of it."""
    positions = "rotary" if family == "rms" else "learned"
    keys = {"norm_family": family, "tied": tied, "positions": positions, "norm_eps": 1e-4, "biases": family == "layer"}
    config = resolve(shape(**keys), 64)
    model = build_model(config).to(dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    tokens = torch.randint(0, 64, (4, 16), generator=generator)
    with torch.no_grad():
        logits, h = model(tokens), model.trunk(tokens)
        rescale(model, build_optimizer(model, config.optim), 7.3)
        assert (model(tokens) - logits).abs().max() < bound * logits.abs().max()
        torch.testing.assert_close(7.3 * model.trunk(tokens), h)
    assert model.config.norm_eps == pytest.approx(1e-4 / 7.3**2)
    assert token_scale(h, family, 1e-4).mean() > 0


@pytest.mark.parametrize("gate", [0.999, 0.4, 0.0])
@pytest.mark.parametrize("fit", ["log", "least_squares", "inverse_mean"])
def test_a_held_level_preserves_the_function_and_what_c_follows(gate: float, fit: Any) -> None:
    config = resolve(shape(norm_eps=1e-30), 64)
    model = build_model(config).double()
    model.set_gate(1.0, Phase.NORMALIZED)
    given = dataclasses.replace(config.calibration, fit=fit)
    calibration = Calibration(given, 1, model.gated_norms(), 9)
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    with calibration.measuring(), torch.no_grad():
        model.loss(tokens, tokens)
    before = calibration.finish()
    model.set_gate(gate, Phase.TAPERING if gate else Phase.TAPERED)
    with torch.no_grad():
        logits, h = model(tokens), model.trunk(tokens)
        rescale(model, build_optimizer(model, config.optim), 1.3, eps=False)
        calibration.follow(1.3)
        torch.testing.assert_close(model(tokens), logits, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(1.3 * model.trunk(tokens), h, rtol=1e-12, atol=1e-12)
    for site, norm in calibration.tapers.items():
        assert norm.c.item() == pytest.approx(1.3 * before[site], rel=1e-6)
        assert norm.fitted(calibration.averages[site].mean).item() == pytest.approx(1.3 * before[site], rel=1e-6)


def losses(*, divided: bool) -> list[float]:
    """70 steps through warmup, calibration and taper in float64; after the warmup the stream is divided by kappa, or
    the learning rates are multiplied instead."""
    config = resolve(shape(norm_eps=1e-30), 64)
    factors = {} if divided else {"embed": KAPPA, "writers": KAPPA, "final_gain": 1 / KAPPA}
    optim = OptimConfig(
        lr=3e-3, warmup_steps=5, decay_steps=STEPS, weight_decay=0.1, eps=1e-30, clip=None,
        multipliers=MultipliersConfig(**{"embed": 1.0} | factors, after_step=K_WARMUP),
    )  # fmt: skip
    model = build_model(config).double()
    optimizer = build_optimizer(model, optim)
    schedule = GateSchedule("cosine", K_WARMUP, K_TAPER)
    calibration = Calibration(config.calibration, K_WARMUP, model.gated_norms(), K_TAPER - 1)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, 64, (STEPS, 4, 17), generator=generator) // torch.tensor([1, 2] * 8 + [4])
    found = []
    for step in range(1, STEPS + 1):
        phase, before = schedule.phase(step), schedule.phase(step - 1)
        model.set_gate(schedule.value(step), phase)
        if phase is not before:
            if before is schedule.phase(1):
                add_taper_gains(optimizer, model, optim)
            else:
                drop_state_of_frozen(optimizer)
        set_learning_rates(optimizer, step, optim)
        x, y = text[step - 1, :, :-1], text[step - 1, :, 1:]
        with calibration.recording(step):
            loss, _ = model.loss(x, y)
            loss.backward()
        found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == K_WARMUP:
            if divided:
                rescale(model, optimizer, KAPPA)
            with calibration.measuring(), torch.no_grad():
                model.loss(x, y)
            calibration.finish()
    return found


def test_dividing_the_stream_equals_multiplying_learning_rates() -> None:
    """Through a whole taper, float64, eps to 0, no clipping: the two runs compute the same losses."""
    divided, multiplied = losses(divided=True), losses(divided=False)
    assert divided[0] - divided[-1] > 0.1, "it trains"
    assert divided == pytest.approx(multiplied, rel=1e-12)
