"""The radial gradient in float64: zero under a final norm, E_p[z] - z_y without it; the other observations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tapernorm.config.options import Config
from tapernorm.config.resolve import build, resolve
from tapernorm.method.gate import Phase
from tapernorm.model.decoder import Decoder, build_model
from tapernorm.training.dynamics import first_nonfinite, margin_bound, probe, radial_theory, readout_gradient
from tests.conftest import NORMS, TINY, merge

VOCAB = 97


def model_of(norm: dict[str, Any], family: str = "rms") -> Decoder:
    """A float64 model with random gains, biases and scalars, and logits of order one."""
    torch.manual_seed(3)
    tree = merge(TINY, {"norm": norm, "model": {"norm_family": family}})
    model = build_model(resolve(build(tree), VOCAB)).double()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
        else:
            parameter.data *= 4
    for taper in model.gated_norms().values():
        taper.c.fill_(0.8)
    model.set_gate(0.0, Phase.TAPERED)
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randint(0, VOCAB, (2, 3, 32), generator=generator))


def head_bias(model: Decoder) -> Tensor | None:
    bias = getattr(model.final_norm, "bias", None)
    return None if bias is None else model.embed.weight @ bias


@pytest.mark.parametrize("family", ["rms", "layer"])
@pytest.mark.parametrize("norm", ["all_taper", "final_taper", "none"])
def test_radial_gradient_is_the_theory_per_token_without_a_final_norm(norm: str, family: str) -> None:
    model = model_of(NORMS[norm], family)
    tokens, targets = batch()
    h = model.trunk(tokens).detach()
    _, logits, gradient = readout_gradient(model, h, targets)
    radial = (gradient * h).sum(-1)
    theory = radial_theory(logits, targets, head_bias(model))
    assert radial.abs().max() > 0.1
    assert (radial - theory).abs().max() < 1e-9


@pytest.mark.parametrize("family", ["rms", "layer"])
@pytest.mark.parametrize("norm", ["baseline", "internal_taper"])
def test_radial_gradient_vanishes_under_a_final_norm(norm: str, family: str) -> None:
    model = model_of(NORMS[norm], family)
    tokens, targets = batch()
    h = model.trunk(tokens).detach()
    _, logits, gradient = readout_gradient(model, h, targets)
    x = h - h.mean(-1, keepdim=True) if family == "layer" else h
    eps = model.config.norm_eps
    # Exactly: z - W beta scales with s / sqrt(s^2 + eps), so the radial gradient is eps / (s^2 + eps) of the theory's.
    share = eps / (x.square().mean(-1) + eps)
    theory = radial_theory(logits, targets, head_bias(model))
    assert ((gradient * h).sum(-1) - share * theory).abs().max() < 1e-9
    assert ((gradient * h).sum(-1).abs() <= share * theory.abs() + 1e-9).all()


def test_log_scale_is_the_same_radial_gradient() -> None:
    model = model_of(NORMS["all_taper"])
    tokens, targets = batch()
    log_scale = torch.zeros((), dtype=torch.float64, requires_grad=True)
    loss, h = model.loss(tokens, targets, log_scale)
    loss.backward()
    _, _, gradient = readout_gradient(model, h, targets)
    assert log_scale.grad.item() == pytest.approx((gradient * h).sum(-1).mean().item(), rel=1e-5)


def test_theory_matches_a_finite_difference_of_the_scale() -> None:
    model = model_of(NORMS["all_taper"])
    tokens, targets = batch()
    h, step = model.trunk(tokens).detach(), 1e-5

    def loss(scale: float) -> float:
        logits = model.readout(h * scale)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()

    slope = (loss(math.exp(step)) - loss(math.exp(-step))) / (2 * step)
    logits = model.readout(h)
    assert radial_theory(logits, targets).mean().item() == pytest.approx(slope, rel=1e-6)


def test_margin_bound_holds_where_the_logits_are_linear() -> None:
    model = model_of(NORMS["all_taper"])
    tokens, _ = batch()
    h = model.trunk(tokens).detach()
    targets = model.readout(h).argmax(-1)  # every margin is positive
    _, logits, gradient = readout_gradient(model, h, targets)
    radial = (gradient * h).sum(-1)
    assert margin_bound(logits, targets, radial) == 1.0
    assert margin_bound(logits, targets, radial + 100.0) == 0.0
    worst = logits.argmin(-1)
    assert margin_bound(logits, worst, radial) is None


@pytest.mark.parametrize("norm", ["baseline", "all_taper", "none"])
def test_probe_names_and_values(norm: str, tiny: Callable[..., Config]) -> None:
    model = build_model(resolve(tiny(norm=norm), VOCAB))
    model.set_gate(0.0, Phase.TAPERED)
    tokens, targets = batch()
    seen = probe(model, tokens, targets)
    logits = model(tokens)
    assert seen["logits/norm_mean"] == pytest.approx(logits.norm(dim=-1).mean().item(), rel=1e-5)
    assert seen["logits/abs_max"] == pytest.approx(logits.abs().max().item(), rel=1e-5)
    assert {f"scale/rms.{site}" for site, _ in model.norms()} <= seen.keys()
    assert seen["scale/final_rms_mean"] == seen["scale/rms.final"]
    assert 0 <= seen["radial/fraction"] <= 1
    if norm != "baseline":  # float32: the two ways of computing it differ by rounding alone
        assert seen["radial/mean"] == pytest.approx(seen["radial/theory"], abs=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_first_nonfinite_names_the_place() -> None:
    model = model_of(NORMS["none"]).float()
    tokens, targets = batch()
    with torch.no_grad():
        model.blocks[1].mlp.down.weight.mul_(1e38).mul_(1e10)
    assert first_nonfinite(model, tokens, targets) == "parameter blocks.1.mlp.down.weight"
    model = model_of(NORMS["none"]).float()
    with torch.no_grad():
        for parameter in model.blocks[1].mlp.parameters():
            parameter.mul_(1e30)
    assert first_nonfinite(model, tokens, targets).startswith("blocks.1.mlp")
    assert first_nonfinite(model_of(NORMS["none"]).float(), tokens, targets) is None
    half = model_of(NORMS["fake_ln"]).float()
    half.set_gate(0.4, Phase.TAPERING)  # all Q and K by a frozen scale, all V by the norm
    half.blocks[1].attn_norm.c.fill_(1e38).mul_(10)
    assert isinstance(half.blocks[1].attn_norm(torch.ones(1, 1, half.config.d_model)), tuple)
    assert first_nonfinite(half, tokens, targets) == "blocks.1.attn_norm"
