"""The decoder: equal to transformers' Llama, sizes as published, equal draws for every norm mode."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tapernorm.config.options import Config
from tapernorm.config.resolve import build, resolve
from tapernorm.config.schema import ConfigError
from tapernorm.method.norms import TaperNorm
from tapernorm.model.decoder import Decoder, build_model
from tapernorm.model.hf import to_llama


@pytest.mark.parametrize("tied", [True, False])
def test_baseline_equals_transformers_llama(tiny: Callable[..., Config], tied: bool) -> None:
    pytest.importorskip("transformers")
    config = resolve(tiny(norm="baseline", model={"tied": tied}), 300)
    model = build_model(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = 1 + 0.3 * torch.randn_like(parameter)
        else:
            parameter.data *= 10  # logits of order one, so that the comparison means something
    tokens = torch.randint(0, 300, (3, 32))
    with torch.no_grad():
        ours, theirs = model(tokens), to_llama(model.eval())(tokens).logits
    assert ours.abs().max() > 1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * ours.abs().max().item())


@pytest.mark.parametrize(("width", "millions"), [(64, 1.03), (128, 2.85), (256, 8.9), (512, 30.3)])
def test_published_sizes(width: int, millions: float) -> None:
    with torch.device("meta"):
        model = Decoder(resolve(build({"model": {"d_model": width}}), 10000).model, build({}).norm)
    assert model.n_parameters() / 1e6 == pytest.approx(millions, rel=0.02)


def test_baseline_has_no_tapernorm_at_all(tiny: Callable[..., Config]) -> None:
    model = build_model(resolve(tiny(norm="baseline"), 300))
    assert not any(isinstance(module, TaperNorm) for module in model.modules())
    assert not any("taper" in name or name.endswith(".c") for name in model.state_dict())
    assert {type(norm) for _, norm in model.norms()} == {nn.RMSNorm}


@pytest.mark.parametrize("norm", ["internal_taper", "all_taper", "final_taper", "none"])
def test_every_mode_starts_from_the_baselines_weights(tiny: Callable[..., Config], norm: str) -> None:
    baseline = dict(build_model(resolve(tiny(norm="baseline"), 300)).named_parameters())
    for name, parameter in build_model(resolve(tiny(norm=norm), 300)).named_parameters():
        if not name.endswith("taper_weight"):
            assert torch.equal(parameter, baseline[name]), name


def test_the_radial_input_changes_no_number(tiny: Callable[..., Config]) -> None:
    model = build_model(resolve(tiny(), 300))
    x, y = torch.randint(0, 300, (2, 2, 32))
    plain, _ = model.loss(x, y)
    plain.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    log_scale = torch.zeros((), requires_grad=True)
    observed, _ = model.loss(x, y, log_scale)
    observed.backward()
    assert torch.equal(plain, observed)
    assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters() if p.grad is not None)
    assert log_scale.grad is not None


def test_only_a_baseline_of_rms_norms_is_a_llama(tiny: Callable[..., Config]) -> None:
    pytest.importorskip("transformers")
    for sections in ({"norm": "all_taper"}, {"norm": "baseline", "model": {"norm_family": "layer"}}):
        with pytest.raises(ConfigError, match=r"Llama has an RMSNorm with a gain at 0\.attn"):
            to_llama(build_model(resolve(tiny(**sections), 300)))
