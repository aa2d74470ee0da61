"""The norms: equal to the framework's at gate 1, linear at gate 0, the stated mixture in between."""

import pytest
import torch
from torch import nn

from tapernorm.config.resolve import build, resolve
from tapernorm.method.gate import Phase
from tapernorm.method.norms import Derf, DyT, TaperLN, TaperNorm
from tapernorm.model.decoder import build_model
from tests.conftest import TINY, merge

D = 24
PAIRS = [(TaperNorm, nn.RMSNorm, 1e-6), (TaperLN, nn.LayerNorm, 1e-5)]


def randomized(norm: TaperNorm, seed: int = 0) -> TaperNorm:
    generator = torch.Generator().manual_seed(seed)
    for parameter in norm.parameters():
        parameter.data = 1.0 + 0.5 * torch.randn(parameter.shape, generator=generator)
    norm.c.fill_(1.7)
    return norm


@pytest.mark.parametrize(("taper", "standard", "eps"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_normalized_phase_is_the_frameworks_norm_bit_for_bit(taper, standard, eps, dtype) -> None:
    norm = randomized(taper(D, eps)).to(dtype)
    reference = standard(D, eps=eps).to(dtype)
    reference.weight.data = norm.weight.data.clone()
    if norm.bias is not None:
        reference.bias.data = norm.bias.data.clone()
    h = (3 * torch.randn(5, 7, D)).to(dtype)
    a, b = h.clone().requires_grad_(), h.clone().requires_grad_()
    out, expected = norm(a), reference(b)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(out, expected)
    assert torch.equal(a.grad, b.grad)
    assert torch.equal(norm.weight.grad, reference.weight.grad)
    assert norm.taper_weight.grad is None


@pytest.mark.parametrize(("taper", "standard", "eps"), PAIRS)
def test_tapered_phase_is_affine(taper, standard, eps) -> None:
    norm = randomized(taper(D, eps)).double()
    norm.set_gate(0.0, Phase.TAPERED)
    x, y = torch.randn(3, D).double(), torch.randn(3, D).double()
    zero = norm(torch.zeros(3, D).double())
    torch.testing.assert_close(norm(2.5 * x - 4 * y) - zero, 2.5 * (norm(x) - zero) - 4 * (norm(y) - zero))
    if taper is TaperNorm:
        torch.testing.assert_close(norm(x), 1.7 * x * norm.taper_weight)


@pytest.mark.parametrize(("taper", "standard", "eps"), PAIRS)
@pytest.mark.parametrize("g", [1.0, 0.6, 0.0])
def test_tapering_phase_is_the_stated_mixture(taper, standard, eps, g) -> None:
    norm = randomized(taper(D, eps)).double()
    norm.set_gate(g, Phase.TAPERING)
    h = torch.randn(4, D).double()
    x = h - h.mean(-1, keepdim=True) if taper is TaperLN else h
    scale = (x.square().mean(-1, keepdim=True) + eps).sqrt()
    expected = norm.gate * x / scale * norm.weight + (1 - norm.gate) * norm.c * x * norm.taper_weight
    if norm.bias is not None:
        expected = expected + norm.bias
    # The statistic is float32 by design, also in a float64 model.
    torch.testing.assert_close(norm(h), expected, rtol=1e-6, atol=1e-6)


def test_which_gain_trains_in_which_phase() -> None:
    norm = TaperNorm(D, 1e-6)
    grads = {}
    for phase, g in [(Phase.NORMALIZED, 1.0), (Phase.TAPERING, 0.5), (Phase.TAPERED, 0.0)]:
        norm.zero_grad(set_to_none=True)
        norm.set_gate(g, phase)
        norm(torch.randn(2, D)).sum().backward()
        grads[phase] = (norm.weight.grad is not None, norm.taper_weight.grad is not None)
    assert grads == {Phase.NORMALIZED: (True, False), Phase.TAPERING: (True, True), Phase.TAPERED: (False, True)}


@pytest.mark.parametrize("phase", list(Phase))
def test_statistics_stay_float32_under_bfloat16_autocast(phase: Phase) -> None:
    norm = randomized(TaperNorm(D, 1e-6))
    norm.set_gate(0.5, phase)
    norm.recording = True
    h = 100 * torch.randn(64, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = norm(h)
    plain = norm(h)
    torch.testing.assert_close(out.float(), plain, rtol=1e-6, atol=1e-6)
    if phase is Phase.NORMALIZED:
        assert norm.take_statistics().dtype == torch.float32


def test_comparators() -> None:
    h = torch.randn(3, D)
    dyt, derf = DyT(D, 0.5), Derf(D, 0.5, 0.25)
    torch.testing.assert_close(dyt(h), torch.tanh(0.5 * h))
    torch.testing.assert_close(derf(h), torch.erf(0.5 * h + 0.25))


def test_sites_are_chosen_one_by_one() -> None:
    chosen = {"kind": "taper", "name": "some", "sites": ["1.attn", "final"]}
    model = build_model(resolve(build(merge(TINY, {"norm": chosen})), 300))
    assert list(model.taper_norms()) == ["1.attn", "final"]
    assert type(dict(model.norms())["0.attn"]) is nn.RMSNorm
