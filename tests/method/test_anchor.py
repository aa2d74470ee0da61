"""The scale losses: formulas, gradients, microbatches, targets."""

import math

import pytest
import torch

from tapernorm.config.options import AnchorConfig
from tapernorm.method.anchor import ScaleAnchor, token_scale

KINDS = ("fixed_target", "log_target", "mean_log")


def anchor(kind: str, **keys: float) -> ScaleAnchor:
    config = AnchorConfig(kind=kind, **keys)
    return ScaleAnchor(config, k_warmup=4, family="rms", eps=1e-6)


@pytest.mark.parametrize("kind", [*KINDS, "batch_mean"])
def test_losses_by_hand(kind: str) -> None:
    subject = anchor(kind, weight=0.7)
    subject.set_target(2.0)
    h = 3 * torch.randn(2, 5, 16)
    s = (h.square().mean(-1) + 1e-6).sqrt()
    expected = {
        "batch_mean": 0.1 * (s - s.mean()).square().mean(),
        "fixed_target": 0.7 / 4.0 * (s - 2.0).square().mean(),
        "log_target": 0.7 * (s.log() - math.log(2.0)).square().mean(),
        "mean_log": 0.7 * (s.log().mean() - math.log(2.0)).square(),
    }[kind]
    torch.testing.assert_close(subject.loss(subject.scale(h)), expected)


def test_absolute_weight() -> None:
    subject = anchor("fixed_target", absolute_weight=0.1)
    subject.set_target(5.0)
    assert subject.strength == 0.1
    assert "lambda * s_tgt^2 2.5" in subject.describe()


@pytest.mark.parametrize("kind", [*KINDS, "batch_mean"])
def test_P25_microbatches_give_the_whole_batchs_loss_and_gradient(kind: str) -> None:
    subject = anchor(kind)
    subject.set_target(2.0)
    h = (3 * torch.randn(8, 5, 16)).double()
    whole = h.clone().requires_grad_()
    loss = subject.loss(subject.scale(whole))
    loss.backward()
    parts = h.clone().requires_grad_()
    level = subject.level(subject.scale(h)) if subject.needs_batch_mean else None
    total = 0.0
    for part in parts.chunk(4):
        micro = subject.loss(subject.scale(part), level) / 4
        micro.backward()
        total += micro.item()
    assert total == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_pulls_the_scale_to_its_target(kind: str) -> None:
    subject = anchor(kind)
    subject.set_target(2.0)
    for factor, sign in ((3.0, 1), (0.3, -1)):
        log_scale = torch.zeros((), requires_grad=True)
        h = factor * torch.nn.functional.normalize(torch.randn(4, 16), dim=-1) * 4.0 * 2.0
        subject.loss(subject.scale(h * (1 + log_scale))).backward()
        assert math.copysign(1, log_scale.grad.item()) == sign


@pytest.mark.parametrize("family", ["rms", "layer"])
@pytest.mark.parametrize("kind", KINDS)
def test_force_is_the_derivative_of_the_loss_by_the_log_scale(kind: str, family: str) -> None:
    """Also where eps counts, and in microbatches."""
    config = AnchorConfig(kind=kind, weight=0.7)
    subject = ScaleAnchor(config, k_warmup=4, family=family, eps=0.5)
    subject.set_target(2.0)
    h = 1.7 * torch.randn(8, 5, 16)
    log_scale = torch.zeros((), requires_grad=True)
    subject.loss(subject.scale(h * (1 + log_scale))).backward()
    assert log_scale.grad is not None
    h.requires_grad_()
    torch.testing.assert_close(subject.force(subject.loss(subject.scale(h)), h), log_scale.grad)
    level = subject.level(subject.scale(h)).detach()
    parts = [part.detach().requires_grad_() for part in h.chunk(4)]
    forces = [subject.force(subject.loss(subject.scale(part), level), part) for part in parts]
    torch.testing.assert_close(torch.stack(forces).mean(), log_scale.grad)


def test_layernorm_family_measures_sigma() -> None:
    h = torch.randn(3, 16) + 100.0
    assert token_scale(h, "layer", 1e-5).max() < 5
    assert token_scale(h, "rms", 1e-6).min() > 90
