"""GPT-2's architecture in the same decoder: sizes, start, dropout, and what every other module does with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor, nn

from tapernorm.cli import composition
from tapernorm.config.options import Config, OptimConfig
from tapernorm.config.resolve import build, resolve
from tapernorm.method.gate import Phase
from tapernorm.model.decoder import Decoder, build_model
from tapernorm.model.fold import certificate, fold
from tapernorm.model.generate import generate
from tapernorm.model.lean import lean
from tapernorm.training.dynamics import constant_logits, probe, radial_theory, readout_gradient
from tapernorm.training.optim import build_optimizer
from tests.conftest import GPT2, NORMS, TINY, merge
from tests.training.test_training import EVERY_STEP, assert_same_weights, rows, run, weights

VOCAB = 97
MODES = ("baseline", "internal_taper", "all_taper", "fake_ln")


def gpt2_of(norm: str, **model: Any) -> Decoder:
    """A float64 model at gate 0 with random gains, biases and scalars, and logits of order one."""
    tree = merge(TINY, {"norm": NORMS[norm], "model": GPT2 | model})
    decoder = build_model(resolve(build(tree), VOCAB)).double().eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in decoder.parameters():
        noise = torch.randn(parameter.shape, generator=generator).double()
        parameter.data = parameter.data + 0.3 * noise if parameter.dim() == 1 else 0.2 * noise
    for number, layer in enumerate(decoder.gated_norms().values()):
        layer.c.fill_(0.7 + 0.1 * number)
    decoder.set_gate(0.0, Phase.TAPERED)
    return decoder


def tokens(rows: int = 3, length: int = 32) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------------------------------------------- sizes, start, groups


@pytest.mark.parametrize(
    ("choice", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2_medium", 354_823_168),
        ("gpt2_large", 774_030_080),
        ("gpt2_xl", 1_557_611_200),
    ],
)
def test_sizes_as_published(choice: str, parameters: int) -> None:
    composition.register()
    with initialize_config_dir(str(composition.CONFIGS), version_base="1.3"):
        config = resolve(build(composition.plain(compose("train", [f"model={choice}", "norm=baseline"]))))
    with torch.device("meta"):
        model = Decoder(config.model, config.norm)
    assert model.n_parameters() == parameters
    assert (config.model.n_ctx, config.model.d_ff, config.model.norm_eps) == (1024, 4 * config.model.d_model, 1e-5)


def test_the_start_and_the_decay_groups_are_gpt2s(tiny: Callable[..., Config]) -> None:
    model = build_model(resolve(tiny(norm="baseline", model=GPT2 | {"d_model": 64}), 300))
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            assert not parameter.any(), name
        elif parameter.dim() == 2:
            wanted = 0.01 if name.endswith(("attn.out.weight", "mlp.down.weight")) else 0.02  # 0.02 / sqrt(2 * 2)
            assert parameter.std().item() == pytest.approx(wanted, rel=0.1), name
    decayed, plain = build_optimizer(model, OptimConfig(weight_decay=0.1)).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2} and {p.dim() for p in plain["params"]} == {1}
    assert len(plain["params"]) == 2 * 5 + 8  # gains and betas, and four biases a block


# --------------------------------------------------------------------------------- folding, cache, generation, dynamics


@pytest.mark.parametrize("norm", MODES)
@torch.no_grad()
def test_folded_equals_unfolded(norm: str) -> None:
    model = gpt2_of(norm)
    folded, reference = fold(model), model(tokens())
    assert reference.abs().max() > 1
    assert (folded(tokens()) - reference).abs().max() < 1e-9
    if norm in ("all_taper", "fake_ln"):
        assert not any(isinstance(module, nn.LayerNorm) for module in folded.modules())
        proof = certificate(model, folded, tokens(1))
        assert proof["norm_operations"]["folded"] == 0 and proof["errors"]["float32"]["max_logit_error"] < 1e-4


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("norm", MODES)
@torch.no_grad()
def test_cached_decode_is_the_full_forward_at_every_position(norm: str, fixed: bool) -> None:
    lengths, text = [1, 5, 17], tokens()
    for model in (gpt2_of(norm), fold(gpt2_of(norm))):
        full, cache = model(text), model.new_cache(3, fixed=fixed)
        model.trunk(text[:, :17], cache=cache)
        cache.truncate(lengths)
        for step in range(10):
            new = torch.stack([text[row, n + step] for row, n in enumerate(lengths)])[:, None]
            logits = model.readout(model.trunk(new, cache=cache))[:, 0]
            wanted = torch.stack([full[row, n + step] for row, n in enumerate(lengths)])
            assert (logits - wanted).abs().max() < 1e-10


@torch.no_grad()
def test_generation_does_not_depend_on_cache_or_neighbours_and_lean_is_the_same() -> None:
    model = gpt2_of("internal_taper")
    prompts = [row[:n].tolist() for row, n in zip(tokens(), (1, 9, 30), strict=True)]
    texts = generate(model, prompts, 12, temperature=0)  # beyond the context: the window moves
    assert texts == generate(model, prompts, 12, temperature=0, cache=False)
    assert texts == [generate(model, [prompt], 12, temperature=0)[0] for prompt in prompts]
    assert torch.equal(lean(model)(tokens()), model(tokens()))


@pytest.mark.parametrize("folded", [False, True])
def test_the_radial_gradient_is_the_theory_where_beta_is_a_heads_bias_too(folded: bool) -> None:
    model = fold(gpt2_of("all_taper")) if folded else gpt2_of("all_taper")
    inputs, targets = tokens(), tokens().flip(1)
    h = model.trunk(inputs).detach()
    _, logits, gradient = readout_gradient(model, h, targets)
    radial, theory = (gradient * h).sum(-1), radial_theory(logits, targets, constant_logits(model))
    assert radial.abs().max() > 0.1 and (radial - theory).abs().max() < 1e-9
    seen = probe(model.float(), inputs, targets)
    assert seen["radial/mean"] == pytest.approx(seen["radial/theory"], abs=1e-4)


# -------------------------------------------------------------------------------------------------------------- dropout


def test_dropout_acts_in_training_alone_and_a_probe_draws_nothing() -> None:
    model = gpt2_of("baseline").float().train()
    inputs = tokens()
    torch.manual_seed(0)
    first, second = model(inputs), model(inputs)
    torch.manual_seed(0)
    assert torch.equal(model(inputs), first) and not torch.equal(first, second)
    state = torch.get_rng_state()
    probed = probe(model, inputs, inputs)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    model.eval()
    assert probe(model, inputs, inputs) == probed and torch.equal(model(inputs), model(inputs))


def test_each_place_has_its_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for the embedding; in a block once for the attention and twice for the residual."""
    calls: list[str] = []
    attend, drop = nn.functional.scaled_dot_product_attention, nn.functional.dropout

    def attention(*arguments: Any, dropout_p: float = 0.0, **keys: Any) -> Tensor:
        calls.append(f"attention {dropout_p}")
        return attend(*arguments, dropout_p=dropout_p, **keys)

    def dropout(x: Tensor, p: float) -> Tensor:
        calls.append(f"dropout {p}")
        return drop(x, p)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(nn.functional, "dropout", dropout)
    gpt2_of("baseline").train()(tokens())
    block = ["attention 0.1", "dropout 0.1", "dropout 0.1"]
    assert calls == ["dropout 0.1", *block, *block]


@pytest.mark.parametrize("anchor", ["fixed_target", "mean_log"])
def test_with_dropout_bit_identical_to_the_baseline_until_the_taper(
    tiny: Callable[..., Config], tmp_path: Path, anchor: str
) -> None:
    keys: dict[str, Any] = {
        "model": GPT2,
        "anchor": {"kind": anchor},
        "trainer": EVERY_STEP | {"max_steps": 12, "accumulation": 2},
        "gate": {"k_warmup": 8, "k_taper": 11},
        "optim": {"lr": 3e-3},
    }
    run(tiny(norm="baseline", **keys), tmp_path / "baseline")
    run(tiny(norm="all_taper", **keys), tmp_path / "taper")
    baseline, taper = rows(tmp_path / "baseline"), rows(tmp_path / "taper")
    for a, b in zip(baseline[:8], taper[:8], strict=True):
        assert a["train/loss"] == b["train/loss"] and a["grad/norm"] == b["grad/norm"]
    a, b = weights(tmp_path / "baseline", 8), weights(tmp_path / "taper", 8)
    assert_same_weights(a, {name: b[name] for name in a})
    assert taper[-1]["gate/g"] == 0.0


@pytest.mark.parametrize("step", [4, 14, 20])
def test_with_dropout_resumed_equals_uninterrupted(tiny: Callable[..., Config], tmp_path: Path, step: int) -> None:
    config = tiny(
        norm="all_taper",
        model=GPT2,
        anchor={"kind": "mean_log"},
        optim={"lr": 3e-3},
        trainer={"save_interval": step, "keep_last": 9, "accumulation": 2},
    )
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run(config, whole)
    shutil.copytree(whole, resumed)
    run(config, resumed, resumed / "checkpoints" / f"step-{step:08d}")
    assert_same_weights(weights(whole, 24), weights(resumed, 24))
    assert rows(whole) == rows(resumed)


def test_with_dropout_observers_are_inert(tiny: Callable[..., Config], tmp_path: Path) -> None:
    often = {"log_interval": 1, "dynamics_interval": 1, "val_interval": 1, "save_interval": 1}
    rarely = {"log_interval": 1000, "dynamics_interval": 1000, "val_interval": 1000, "save_interval": 1000}
    for name, trainer in (("often", often), ("rarely", rarely)):
        run(tiny(norm="internal_taper", model=GPT2, optim={"lr": 3e-3}, trainer=trainer), tmp_path / name)
    assert_same_weights(weights(tmp_path / "often", 24), weights(tmp_path / "rarely", 24))
