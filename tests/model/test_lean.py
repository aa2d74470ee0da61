"""A model without nn.Module around it computes the same, bit for bit, and calls the hooks that are there."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapernorm.config.options import Config
from tapernorm.config.resolve import resolve
from tapernorm.method.gate import Phase
from tapernorm.model.decoder import build_model
from tapernorm.model.fold import fold
from tapernorm.model.generate import generate
from tapernorm.model.lean import lean

TOKENS = torch.arange(60).view(3, 20)


@pytest.mark.parametrize("family", ["rms", "layer"])
@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("norm", ["baseline", "internal_taper", "all_taper", "none", "dyt", "derf"])
@torch.no_grad()
def test_the_same_numbers(tiny: Callable[..., Config], norm: str, phase: Phase, family: str) -> None:
    config = tiny(norm=norm, model={"norm_family": family, "init_std": 0.2})
    unfolded = build_model(resolve(config, 300)).eval()
    unfolded.set_gate({Phase.NORMALIZED: 1.0, Phase.TAPERING: 0.3, Phase.TAPERED: 0.0}[phase], phase)
    tapered = phase is Phase.TAPERED or not unfolded.gated_norms()
    for model in [unfolded, fold(unfolded)] if tapered else [unfolded]:
        plain = lean(model)
        assert not isinstance(plain, nn.Module)
        assert torch.equal(plain(TOKENS), model(TOKENS))
        caches = [plain.new_cache(3), model.new_cache(3)]
        for part in TOKENS.split([7, 1, 12], 1):
            ours, reference = plain.trunk(part, cache=caches[0]), model.trunk(part, cache=caches[1])
            assert torch.equal(plain.readout(ours), model.readout(reference))


def test_the_tensors_are_shared_and_hooks_are_called(tiny: Callable[..., Config]) -> None:
    model = build_model(resolve(tiny(), 300)).eval()
    plain = lean(model)
    before = plain(TOKENS)
    with torch.no_grad():
        model.embed.weight.mul_(2)
    assert not torch.equal(plain(TOKENS), before)
    heard: list[Tensor] = []
    model.blocks[1].mlp.down.register_forward_hook(lambda module, inputs, output: heard.append(output))
    model.blocks[0].register_forward_pre_hook(lambda module, inputs: heard.append(inputs[0]))
    generate(model, [[1, 2, 3]], 4)
    assert len(heard) == 8


@pytest.mark.parametrize("bias", [True, False])
def test_big_products_without_a_gradient_are_the_same_up_to_rounding(bias: bool) -> None:
    layer, x = nn.Linear(256, 300, bias=bias), torch.randn(2, 3, 256)
    with torch.no_grad():
        fast = lean(layer)(x)
        reference = copy.deepcopy(layer).double()(x.double())
    assert (fast - reference).abs().max() < 1e-5
    lean(layer)(x).sum().backward()
    assert layer.weight.grad is not None


def test_a_tied_head_is_a_big_product_too(tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    """And training's model knows nothing of it."""
    products: list[tuple[int, ...]] = []

    def onednn(x: Tensor, weight: Tensor, bias: Tensor | None, *_: object) -> Tensor:
        products.append(tuple(weight.shape))
        return F.linear(x, weight, bias)

    monkeypatch.setattr("tapernorm.model.lean.ONEDNN", onednn)
    model = build_model(resolve(tiny(model={"d_model": 256, "n_layer": 1}), 300)).eval()
    with torch.inference_mode():
        assert torch.equal(lean(model)(TOKENS), model(TOKENS))
    assert products == [(768, 256), (256, 256), (2 * model.config.d_ff, 256), (256, model.config.d_ff), (300, 256)]
