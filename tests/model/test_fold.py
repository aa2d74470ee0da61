"""Folding: the same function with fewer layers, refused while a gate is open, certified, saved and loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tapernorm.analysis.evaluate import evaluate_checkpoint
from tapernorm.cli.resume import check_keys
from tapernorm.cli.run import run_single
from tapernorm.config.options import Config
from tapernorm.config.programs import EvaluateConfig
from tapernorm.config.resolve import build, resolve
from tapernorm.config.schema import ConfigError, to_dict
from tapernorm.method.gate import Phase
from tapernorm.model.decoder import Decoder, build_model
from tapernorm.model.fold import certificate, count_norm_operations, describe, fold
from tapernorm.model.generate import generate
from tapernorm.training import checkpoint as checkpoints
from tests.conftest import NORMS, TINY, merge
from tests.training.test_training import run

VOCAB = 61
CHOICES = NORMS | {
    "selected_taper": {"kind": "taper", "name": "selected_taper", "sites": ["0.attn", "1.mlp", "final"]},
    "dyt": {"kind": "dyt", "name": "dyt", "sites": ["attn"]},
    "all_but_first": {"kind": "taper", "name": "all_but_first", "sites": ["1-.attn", "mlp", "final"]},
    "internal_but_first": {"kind": "taper", "name": "internal_but_first", "sites": ["1-.attn", "mlp"]},
}
TABLES = ("all_but_first", "internal_but_first", "baseline")
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
    for number, norm in enumerate(model.gated_norms().values()):
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
    wanted = {"removed": [], "table": [], "weightless": ["0.mlp", "1.mlp", "final"], "not_folded": ["0.attn", "1.attn"]}
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


# --------------------------------------------------------------------------------------------------- table of 0.attn


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest of b."""
    assert b.abs().max() > 1
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("gains", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("norm", TABLES)
@torch.no_grad()
def test_a_norm_of_the_embedding_alone_is_a_table(norm: str, family: str, gains: bool, tied: bool) -> None:
    model, x = tapered(config_of(norm, norm_family=family, tied=tied, biases=not tied)), tokens()
    folded, plain = fold(model, gains=gains, table=True), fold(model, gains=gains)
    taps: dict[str, Tensor] = {}
    assert distance(folded.readout(folded.trunk(x, taps)), model(x)) < 1e-12
    assert torch.equal(taps["0.attn"], model.embed(x))
    single = fold(model.float(), gains=gains, table=True)
    assert single.table is not None and single.table.weight.dtype is torch.float32
    assert distance(single(x), model(x)) < 1e-5

    # One layer and its weights fewer, V x D more.
    assert isinstance(folded.blocks[0].attn_norm, nn.Identity) and plain.table is None
    gone = sum(parameter.numel() for parameter in plain.blocks[0].attn_norm.parameters())
    beta = plain.blocks[0].attn.qkv.bias is not None and folded.blocks[0].attn.qkv.bias is None
    assert folded.n_parameters() - plain.n_parameters() == VOCAB * 16 - gone - 48 * beta
    assert count_norm_operations(folded, x) == count_norm_operations(plain, x) - 1
    kept = {"all_but_first": 0, "internal_but_first": 1, "baseline": 4}[norm]
    assert count_norm_operations(folded, x) == kept

    report = certificate(model, single, tokens(1))
    assert report["errors"]["float64"]["max_logit_error"] < 1e-12 * report["max_logit"]
    assert report["sites"]["table"] == ["0.attn"] and report["norm_operations"]["folded"] == kept
    assert "  0.attn reads a table by token id, in which its norm is done" in describe(report)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_table_decodes_with_the_cache_at_every_position(family: str, fixed: bool) -> None:
    model, x = tapered(config_of("all_but_first", norm_family=family)), tokens(3)
    folded, wanted = fold(model, table=True), model(x)
    cache, lengths = folded.new_cache(3, fixed=fixed), [1, 4, 9]
    logits = folded.readout(folded.trunk(x[:, :9], cache=cache))
    cache.truncate(lengths)
    assert all(distance(logits[row, :n], wanted[row, :n]) < 1e-12 for row, n in enumerate(lengths))
    for step in range(7):
        ids = torch.stack([x[row, n + step] for row, n in enumerate(lengths)])
        logits = folded.readout(folded.trunk(ids[:, None], cache=cache))[:, 0]
        assert all(distance(logits[row], wanted[row, n + step]) < 1e-12 for row, n in enumerate(lengths))
    prompts = [row[:n].tolist() for row, n in zip(x, lengths, strict=True)]
    texts = [generate(m, prompts, 20, temperature=0, eot=-1) for m in (model, folded)]  # past the context, too
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("norm", "keys", "message"),
    [
        ("all_but_first", {"positions": "learned"}, "fold_table: with model.positions=learned 0.attn reads more than"),
        *(
            (norm, {}, rf"fold_table: norm {norm} has no standard norm at 0\.attn to make a table of; norm\.sites=")
            for norm in ("all_taper", "dyt", "fake_ln", "none")
        ),
    ],
)
def test_a_table_is_refused_in_one_line(norm: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as fault:
        fold(tapered(config_of(norm, **keys)), table=True)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_table_is_evaluated_saved_and_loaded(family: str, tmp_path: Path, said: list[str]) -> None:
    run_dir, saved = tmp_path / "run", tmp_path / "folded"
    tree = merge(TINY, {"norm": CHOICES["all_but_first"], "model": {"norm_family": family, "dropout": 0.1}})
    run(resolve(build(tree)), run_dir)
    common: dict[str, Any] = {"samples": 0, "device": "cpu"}
    given = EvaluateConfig(checkpoint=str(run_dir), fold_table=True, save_folded=str(saved), **common)
    report = evaluate_checkpoint(given)
    folded = report["folded"]
    assert folded["table"] is True and folded["loss"] == pytest.approx(report["loss"], abs=1e-5)
    assert folded["certificate"]["errors"]["float64"]["max_logit_error"] < 1e-12 * folded["certificate"]["max_logit"]
    assert any("4 of 5 norms removed" in line and "norm operations left in the graph: 0" in line for line in said)

    assert evaluate_checkpoint(EvaluateConfig(checkpoint=str(saved), **common))["loss"] == folded["loss"]
    model, config, _ = checkpoints.load_model(saved)
    source, _, _ = checkpoints.load_model(checkpoints.find(run_dir))
    x = torch.randint(0, config.model.vocab_size, (2, 32))
    assert torch.equal(model.eval()(x), fold(source.eval(), table=True)(x))
    with pytest.raises(ConfigError, match="folded already"):
        evaluate_checkpoint(EvaluateConfig(checkpoint=str(saved), fold_table=True, **common))


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
    assert tree["norm"].pop("table") is False  # as older checkpoints say it
    again = resolve(build(tree))
    assert again.norm == folded.norm_config and again.norm.name == f"{norm}_folded"
    Decoder(again.model, again.norm).load_state_dict(folded.state_dict(), strict=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folded_checkpoint_evaluates_and_resumes_nowhere(family: str, tmp_path: Path, said: list[str]) -> None:
    run_dir, saved = tmp_path / "run", tmp_path / "folded"
    short = {"max_steps": 6, "save_interval": 2, "keep_last": 9}
    keys = {"gate": {"k_warmup": 2, "k_taper": 5}, "calibration": {"window": 2}, "trainer": short}
    tree = merge(TINY, {"norm": NORMS["all_taper"], "model": {"norm_family": family}, **keys})
    config = resolve(build(tree))
    run(config, run_dir)
    common: dict[str, Any] = {"samples": 0, "device": "cpu"}
    report = evaluate_checkpoint(EvaluateConfig(checkpoint=str(run_dir), fold=True, save_folded=str(saved), **common))
    proof = report["folded"]["certificate"]
    assert json.loads((run_dir / "evaluation.json").read_text())["folded"] == report["folded"]
    assert json.loads((saved / "certificate.json").read_text()) == proof
    assert proof["errors"]["float64"]["max_logit_error"] < 1e-9
    assert any(
        "5 of 5 norms removed, head untied by folding, norm operations left in the graph: 0" in line for line in said
    )
    assert report["folded"]["loss"] == pytest.approx(report["loss"], abs=1e-5)

    again = evaluate_checkpoint(EvaluateConfig(checkpoint=str(saved), **common))
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
            evaluate_checkpoint(EvaluateConfig(**options, **common))
    resumed = to_dict(config_of("all_taper")) | {"resume": str(saved)}
    with pytest.raises(ConfigError, match="a folded model cannot be trained; resume the run"):
        run_single(resumed, overrides=[f"resume={saved}"])
    with pytest.raises(ConfigError, match="a folded model cannot be trained"):
        check_keys(to_dict(loaded))
    with pytest.raises(ConfigError, match="it is folded and has no training state"):
        run(config, run_dir, saved)
