"""Folding: the same function with fewer layers, refused while a gate is open, certified, saved and loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tapernorm import checkpoint as checkpoints
from tapernorm.config import Config, ConfigError, EvaluateConfig, build, resolve, to_dict
from tapernorm.evaluation import evaluate_checkpoint
from tapernorm.fold import certificate, count_norm_operations, describe, fold
from tapernorm.gate import Phase
from tapernorm.model import Decoder, build_model
from tapernorm.run import check_keys, run_single
from tests.conftest import NORMS, TINY, merge
from tests.test_training import run

VOCAB = 61
CHOICES = NORMS | {
    "selected_taper": {"kind": "taper", "name": "selected_taper", "sites": ["0.attn", "1.mlp", "final"]},
    "dyt": {"kind": "dyt", "name": "dyt", "sites": ["attn"]},
}
FAMILIES = ("rms", "layer")


def config_of(norm: str, **model: Any) -> Config:
    tree = merge(TINY, {"norm": CHOICES[norm], "model": {"n_ctx": 16, "d_model": 16, "head_dim": 8, **model}})
    return resolve(build(tree), VOCAB)


def tapered(config: Config, dtype: torch.dtype = torch.float64) -> Decoder:
    """A model at gate 0 whose gains, biases and scalars are all random, with logits of order one."""
    model = build_model(config)
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = parameter.data + 0.5 * noise if parameter.dim() == 1 else 0.3 * noise
    for number, norm in enumerate(model.taper_norms().values()):
        norm.c.fill_(0.4 + 0.1 * number)
    model.set_gate(0.0, Phase.TAPERED)
    return model.to(dtype)


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(0, VOCAB, (rows, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("norm", CHOICES)
def test_P32_folded_equals_unfolded_with_random_gains_biases_and_scalars(norm: str, family: str, tied: bool) -> None:
    model = tapered(config_of(norm, norm_family=family, tied=tied))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folded, x = fold(model), tokens()
    reference = model(x)
    assert reference.abs().max() > 1
    assert (folded(x) - reference).abs().max() < 1e-9
    error = (fold(model.float())(x) - model(x)).abs().max() / reference.abs().max()
    assert error < 1e-5
    model.double()
    for name, tensor in model.state_dict().items():  # not touched (beyond the trip through float32)
        assert torch.allclose(tensor, before[name], rtol=1e-6)
    assert torch.equal(folded.embed.weight, before["embed.weight"])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_left(family: str) -> None:
    """Nothing at a tapered site, a statistic without gain at a standard one, the layer itself where it cannot fold."""
    weightless = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}[family]

    def left(norm: str, **options: bool) -> dict[str, nn.Module]:
        return dict(fold(tapered(config_of(norm, norm_family=family)), **options).norms())

    for norm, gone in {"internal_taper": 4, "all_taper": 5, "selected_taper": 3, "baseline": 0, "none": 5}.items():
        layers = list(left(norm).values())
        others = [layer for layer in layers if not isinstance(layer, nn.Identity)]
        assert len(layers) - len(others) == gone, norm
        assert all(type(layer) is weightless and not list(layer.parameters()) for layer in others), norm
    assert left("internal_taper", gains=False)["final"].weight is not None
    dyt = tapered(config_of("dyt", norm_family=family))
    report = certificate(dyt, fold(dyt), tokens(1))
    wanted = {"removed": [], "weightless": ["0.mlp", "1.mlp", "final"], "not_folded": ["0.attn", "1.attn"]}
    assert report["sites"] == wanted
    assert "not folded, left as they are: 0.attn, 1.attn" in "\n".join(describe(report))


def test_the_head_is_untied_only_if_something_folds_into_it() -> None:
    for norm, gains, tied in (
        ("all_taper", True, False),
        ("internal_taper", True, False),
        ("internal_taper", False, True),
        ("final_taper", False, False),
        ("none", True, True),
    ):
        folded = fold(tapered(config_of(norm)), gains=gains)
        assert folded.config.tied is tied and (folded.head is None) is tied, (norm, gains)
    assert fold(tapered(config_of("all_taper", norm_family="layer"))).head.bias is not None
    assert fold(tapered(config_of("all_taper"))).head.bias is None


def test_folding_draws_no_random_number() -> None:
    model = tapered(config_of("all_taper"))
    state = torch.get_rng_state()
    fold(model)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("gate", "phase"), [(1.0, Phase.NORMALIZED), (0.35, Phase.TAPERING)])
def test_P32_an_open_gate_is_refused_in_one_line(gate: float, phase: Phase) -> None:
    model = tapered(config_of("selected_taper"))
    model.set_gate(gate, phase)
    with pytest.raises(ConfigError, match=rf"gate {gate:.4g} at 0\.attn, 1\.mlp, final\)") as fault:
        fold(model)
    assert "\n" not in str(fault.value)
    model.set_gate(0.0, Phase.TAPERED)
    model.final_norm.set_gate(gate, phase)
    with pytest.raises(ConfigError, match=rf"gate {gate:.4g} at final\)"):
        fold(model)


def test_a_folded_model_is_not_folded_again() -> None:
    with pytest.raises(ConfigError, match="folded already"):
        fold(fold(tapered(config_of("all_taper"))))


# -------------------------------------------------------------------------------------------------------- certificate


@pytest.mark.parametrize("family", FAMILIES)
def test_norm_operations_of_eight_layers(family: str) -> None:
    def count(norm: str, gate: float | None, folded: bool = False) -> int:
        model = tapered(config_of(norm, n_layer=8, norm_family=family), torch.float32)
        if gate is not None:
            model.set_gate(gate, Phase.NORMALIZED if gate == 1 else Phase.TAPERING if gate else Phase.TAPERED)
        return count_norm_operations(fold(model) if folded else model, tokens(1))

    if family == "rms":
        assert count("baseline", None) == 17
        assert count("all_taper", 1.0) == 17
    assert count("internal_taper", 0.5) == 17
    assert count("internal_taper", 0.0, folded=True) == 1
    assert count("all_taper", 0.0, folded=True) == 0


class Written(nn.Module):
    """A model with one norm written by hand in front of a projection, and a scaled attention that is no norm."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm, self.out = norm, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) if self.norm else x
        scores = x @ x.mT / torch.sqrt(torch.tensor(8.0))  # a root of a constant
        y = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return self.out(scores.softmax(-1) @ x + y)


@pytest.mark.parametrize(
    "norm",
    [
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True) * 8**0.5,
        lambda x: x / (torch.einsum("btd,btd->bt", x, x) / 8 + 1e-6).sqrt()[..., None],
        lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-6) ** -0.5,
        lambda x: x / x.norm(dim=-1, keepdim=True),
        lambda x: torch.nn.functional.normalize(x, dim=-1),
        lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
        lambda x: torch.nn.functional.rms_norm(x, (8,)),
        lambda x: torch.nn.functional.layer_norm(x, (8,)),
    ],
    ids=["mean_rsqrt", "vector_norm", "einsum_sqrt", "power", "norm", "normalize", "std", "rms_norm", "layer_norm"],
)
def test_the_count_finds_norms_however_they_are_written(norm: Any) -> None:
    x = torch.randn(1, 4, 8)
    assert count_norm_operations(Written(norm), x) == 1
    assert count_norm_operations(Written(None), x) == 0


def test_certificate_in_three_precisions() -> None:
    model = tapered(config_of("all_taper"), torch.float32)
    report = certificate(model, fold(model), tokens())
    assert json.loads(json.dumps(report)) == report
    errors = report["errors"]
    assert errors["float64"]["max_logit_error"] < 1e-9
    assert errors["float64"]["max_logit_error"] < errors["float32"]["max_logit_error"]
    assert errors["float32"]["max_logit_error"] < 1e-4 * report["max_logit"]
    assert errors["float32"]["max_logit_error"] < errors["bfloat16"]["max_logit_error"]
    assert 0 < errors["bfloat16"]["max_probability_error"] < 1
    assert (report["tokens"], report["head"]) == (32, "untied by folding")
    assert report["norm_operations"] == {"unfolded": 0, "folded": 0}
    # A wrong fold does not pass.
    wrong = fold(model)
    wrong.blocks[0].attn.qkv.weight.data *= 1.1
    error = certificate(model, wrong, tokens())["errors"]["float32"]
    assert error["max_logit_error"] > 100 * error["rounding_error"]


# -------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("norm", CHOICES)
def test_a_folded_configuration_is_plain_data(norm: str) -> None:
    config = config_of(norm)
    folded = fold(tapered(config))
    tree = to_dict(Config(model=folded.config, norm=folded.norm_config))
    again = resolve(build(tree))
    assert again.norm == folded.norm_config and again.norm.name == f"{norm}_folded"
    Decoder(again.model, again.norm).load_state_dict(folded.state_dict(), strict=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folded_checkpoint_evaluates_and_resumes_nowhere(family: str, tmp_path: Path) -> None:
    run_dir, saved = tmp_path / "run", tmp_path / "folded"
    short = {"max_steps": 6, "save_interval": 2, "keep_last": 9}
    keys = {"gate": {"k_warmup": 2, "k_taper": 5}, "calibration": {"window": 2}, "trainer": short}
    tree = merge(TINY, {"norm": NORMS["all_taper"], "model": {"norm_family": family}, **keys})
    config = resolve(build(tree))
    run(config, run_dir)
    said: list[str] = []
    common: dict[str, Any] = {"samples": 0, "device": "cpu"}
    report = evaluate_checkpoint(
        EvaluateConfig(checkpoint=str(run_dir), fold=True, save_folded=str(saved), **common), said.append
    )
    proof = report["folded"]["certificate"]
    assert json.loads((run_dir / "evaluation.json").read_text())["folded"] == report["folded"]
    assert json.loads((saved / "certificate.json").read_text()) == proof
    assert proof["errors"]["float64"]["max_logit_error"] < 1e-9
    assert any(
        "5 of 5 norms removed, head untied by folding, norm operations left in the graph: 0" in line for line in said
    )
    assert report["folded"]["loss"] == pytest.approx(report["loss"], abs=1e-5)

    again = evaluate_checkpoint(EvaluateConfig(checkpoint=str(saved), **common), said.append)
    assert again["loss"] == report["folded"]["loss"]
    assert (again["norm"], again["gate"], again["step"]) == ("all_taper_folded", 0.0, 6)
    model, loaded, _ = checkpoints.load_model(saved)
    source, _, _ = checkpoints.load_model(checkpoints.find(run_dir))
    x = torch.randint(0, loaded.model.vocab_size, (2, 32))
    assert torch.equal(model(x), fold(source)(x))

    for options, message in [
        ({"checkpoint": str(saved), "fold": True}, "folded already"),
        ({"checkpoint": str(run_dir), "save_folded": str(saved)}, "exists already"),
        (
            {"checkpoint": str(run_dir / "checkpoints" / "step-00000004"), "fold": True},
            r"open gate .* 0\.25 at 0\.attn",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            evaluate_checkpoint(EvaluateConfig(**options, **common), said.append)
    resumed = to_dict(config_of("all_taper")) | {"resume": str(saved)}
    with pytest.raises(ConfigError, match="a folded model cannot be trained; resume the run"):
        run_single(resumed, overrides=[f"resume={saved}"])
    with pytest.raises(ConfigError, match="a folded model cannot be trained"):
        check_keys(to_dict(loaded))
    with pytest.raises(ConfigError, match="it is folded and has no training state"):
        run(config, run_dir, saved)
