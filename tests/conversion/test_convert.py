"""Tapering any model: the same numbers at gate 1, the linear map at gate 0, and folded the same again."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.pytorch_utils import Conv1D

import tapernorm
from tapernorm.conversion.fold import absorb_upstream
from tapernorm.conversion.handle import FITS, Fit, Tapering
from tapernorm.conversion.layers import HeldLN, HeldNorm
from tapernorm.conversion.recognise import as_projection, recognise
from tapernorm.method.anchor import token_scale
from tapernorm.method.gate import GateSchedule, Phase
from tapernorm.method.norms import TaperLN, TaperNorm

VOCAB, D, LAYERS = 31, 32, 2
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def llama(tied: bool) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=D,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        **SPECIAL,
    )
    return LlamaForCausalLM(config)


def qwen3(tied: bool) -> nn.Module:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=D,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
        **SPECIAL,
    )
    return Qwen3ForCausalLM(config)


def neox(tied: bool) -> nn.Module:
    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=D,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        **SPECIAL,
    )
    return GPTNeoXForCausalLM(config)


def gpt2(tied: bool) -> nn.Module:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=D,
        n_layer=LAYERS,
        n_head=4,
        n_positions=32,
        tie_word_embeddings=tied,
        **dropout,
        **SPECIAL,
    )
    return GPT2LMHeadModel(config)


FAMILIES: dict[str, Callable[[bool], nn.Module]] = {"llama": llama, "qwen3": qwen3, "neox": neox, "gpt2": gpt2}
FINAL = {"llama": "model.norm", "qwen3": "model.norm", "neox": "gpt_neox.final_layer_norm", "gpt2": "transformer.ln_f"}
every_family = pytest.mark.parametrize("family", FAMILIES)


def build(family: str, tied: bool = False) -> Any:
    """A model with random gains and biases and logits of order one."""
    torch.manual_seed(0)
    model = FAMILIES[family](tied).eval()
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += 0.3 * noise if parameter.dim() == 1 else 0.1 * noise
    return model


def tokens(seed: int = 1, rows: int = 3, length: int = 12) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))}


def closed(model: nn.Module, batch: Any = None, **options: Any) -> Tapering:
    """The model converted, calibrated on one batch, with gains that differ from the originals', at gate 0."""
    handle = tapernorm.convert(model, **options)
    handle.calibrate([tokens() if batch is None else batch])
    generator = torch.Generator().manual_seed(3)
    for gain in handle.taper_parameters():
        gain.data += 0.2 * torch.randn(gain.shape, generator=generator).to(gain)
    handle.set_gate(0.0)
    return handle


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, TaperNorm) or recognise(module) is not None


# ------------------------------------------------------------------------------------------------------------ the gate


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_one_is_the_original_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    def logits_and_gradients(model: Any) -> dict[str, Tensor]:
        out = model(**tokens(), labels=tokens()["input_ids"])
        out.loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"logits": out.logits.detach(), **gradients}

    expected = logits_and_gradients(build(family).to(dtype))
    model = build(family).to(dtype)
    handle = tapernorm.convert(model, ["*"], final=True)
    found = logits_and_gradients(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(handle.norms) == (4 if family == "qwen3" else 2) * LAYERS + 1
    handle.calibrate([tokens()])
    handle.set_gate(0.0)
    handle.set_gate(1.0)
    assert torch.equal(model(**tokens()).logits, expected["logits"])


@every_family
def test_parameters_stay_the_same_objects_under_the_same_names(family: str) -> None:
    model = build(family)
    before, keys = dict(model.named_parameters()), set(model.state_dict())
    handle = tapernorm.convert(model, final=True)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    new = {f"{name}.{key}" for name in handle.norms for key in ("taper_weight", "c")}
    assert set(model.state_dict()) - keys == new
    assert {id(p) for p in handle.taper_parameters()} == {id(after[name]) for name in after.keys() - before.keys()}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("g", [0.6, 0.0])
def test_below_one_it_is_the_stated_mixture(family: str, g: float) -> None:
    handle = closed(build(family).double(), final=True)
    handle.set_gate(g)
    for norm in handle.norms.values():
        h = torch.randn(2, 5, D).double()
        x = h - h.mean(-1, keepdim=True) if family == "gpt2" else h
        linear = norm.c.double() * x * norm.taper_weight
        if family == "gpt2":
            linear = linear + norm.bias
        torch.testing.assert_close(norm(h), g * norm.original(h) + (1 - g) * linear, rtol=1e-6, atol=1e-6)
        assert isinstance(norm, TaperLN) == (family == "gpt2")


@every_family
def test_every_phase_runs_and_stays_in_bfloat16(family: str) -> None:
    model = build(family).to(torch.bfloat16)
    handle = tapernorm.convert(model, ["*"], final=True)
    handle.calibrate([tokens()])
    for g in (1.0, 0.999, 0.5, 0.0):
        handle.set_gate(g)
        out = model(**tokens()).logits
        assert out.dtype == torch.bfloat16 and out.isfinite().all()
    handle.set_gate(1.0)
    one = model(**tokens()).logits.float()
    handle.set_gate(0.9999)
    assert (model(**tokens()).logits.float() - one).norm() < 0.05 * one.norm()
    handle.set_gate(0.0)
    assert handle.fold().not_folded == {}


def test_mixed_precision_keeps_the_dtype_of_the_original() -> None:
    for norm, dtype in ((nn.LayerNorm(D), torch.float32), (nn.LayerNorm(D).to(torch.bfloat16), torch.bfloat16)):
        model = nn.Sequential(norm, nn.Linear(D, D))
        handle = tapernorm.convert(model, final=True)
        h = torch.randn(4, D)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            handle.calibrate([h.to(norm.weight.dtype)])
            for g in (1.0, 0.5, 0.0):
                handle.set_gate(g)
                assert model[0](h.to(norm.weight.dtype)).dtype == dtype


# --------------------------------------------------------------------------------------------------------- calibration


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("fit", FITS)
def test_c_is_the_stated_fit_over_real_tokens(family: str, padded: bool, fit: Fit) -> None:
    model = build(family).train()
    handle = tapernorm.convert(model, ["*"], final=True)
    batches = [tokens(seed) for seed in (1, 2)]
    mask = torch.ones(3, 12, dtype=torch.long)
    if padded:
        mask[0, 7:] = mask[2, 3:] = 0
        batches = [batch | {"attention_mask": mask} for batch in batches]
    seen: dict[str, list[Tensor]] = {name: [] for name in handle.norms}
    hooks = [
        norm.register_forward_pre_hook(lambda module, args, name=name: seen[name].append(args[0][mask.bool()]))
        for name, norm in handle.norms.items()
    ]
    chosen = handle.calibrate(batches, fit=fit)
    for hook in hooks:
        hook.remove()
    assert model.training and all(module.training for module in model.modules())
    for name, norm in handle.norms.items():
        h = torch.cat(seen[name]).double().numpy().reshape(-1, norm.dim)
        x = h - h.mean(-1, keepdims=True) if family == "gpt2" else h
        r, gamma = np.sqrt((x**2).mean(-1, keepdims=True) + norm.eps), norm.weight.detach().double().numpy()
        expected = {
            "least_squares": np.linalg.lstsq((x * gamma).reshape(-1, 1), (x / r * gamma).ravel(), rcond=None)[0][0],
            "inverse_mean": 1 / r.mean(),
            "log": np.exp(-np.log(r).mean()),
        }[fit]
        assert chosen[name] == pytest.approx(expected, rel=1e-5)
        assert norm.c.item() == pytest.approx(expected, rel=1e-5)
        assert torch.equal(norm.taper_weight, norm.weight)
        if name == FINAL[family]:
            level = np.exp(np.log(r).mean()) if fit == "log" else r.mean()
            assert handle.target == pytest.approx(level, rel=1e-5)


def test_one_token_that_sticks_out_moves_least_squares_alone() -> None:
    """A share 1/1024 of the tokens at 30 times the scale, as GPT-2's first positions: c r of all others."""
    h = torch.randn(1, 1024, D)
    h = h / h.square().mean(-1, keepdim=True).sqrt()
    h[0, 0] *= 30
    found = {}
    for fit in FITS:
        handle = tapernorm.convert(nn.Sequential(nn.RMSNorm(D), nn.Linear(D, D)), final=True)
        found[fit] = handle.calibrate([h], fit=fit)["0"]
    assert found == pytest.approx({"log": 0.997, "inverse_mean": 0.972, "least_squares": 0.548}, abs=2e-3)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_mismatches_are_the_means_of_ln_c_r(family: str) -> None:
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[0, 7:] = mask[2, 3:] = 0
    batches = [tokens(1) | {"attention_mask": mask}, tokens(2)]
    model = build(family)
    handle = tapernorm.convert(model, ["*"], final=True)
    handle.calibrate(batches)
    assert handle.mismatches(batches) == pytest.approx(dict.fromkeys(handle.norms, 0.0), abs=1e-5)
    handle.set_gate(0.0)
    first, *_ = handle.norms
    handle.norms[first].c *= 2
    assert handle.mismatches(batches)[first] == pytest.approx(np.log(2), abs=1e-5)
    model.get_input_embeddings().weight.data *= 3
    if family == "llama":
        assert handle.mismatches(iter(batches))[first] == pytest.approx(np.log(6), abs=1e-4)
    with pytest.raises(TypeError, match="pass several"):
        handle.mismatches(tokens())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_target_is_the_level_at_the_call_so_that_mean_log_starts_at_0(family: str) -> None:
    model = build(family)
    handle = tapernorm.convert(model, final=True)
    handle.calibrate([tokens()])
    before = handle.target
    for parameter in model.parameters():
        parameter.data *= 1.5
    handle.calibrate([tokens()])  # again, because the stream has moved on
    assert before is not None and handle.target is not None and abs(np.log(handle.target / before)) > 0.1
    model(**tokens())
    assert handle.scale_loss("mean_log").item() < 1e-10


def training_steps(
    handle: Tapering, model: Any, steps: range, batches: Callable[[int], list[dict[str, Tensor]]], rate: float = 0.1
) -> None:
    """Plain gradient descent with a gate that falls from 1 to 0 within eight steps."""
    for step in steps:
        handle.set_gate(max(0.0, 1.0 - step / 8))
        model.zero_grad()
        for batch in batches(step):
            model(**batch, labels=batch["input_ids"]).loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.data -= rate * parameter.grad


def padded_batches(step: int) -> list[dict[str, Tensor]]:
    """The two microbatches of a step, with padding in one of them."""
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[0, 7:] = mask[2, 3:] = 0
    return [tokens(10 * step) | {"attention_mask": mask}, tokens(10 * step + 1)]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("fit", FITS)
def test_tracked_c_is_the_average_over_steps_until_the_gate_closes(family: str, fit: Fit) -> None:
    """Of all microbatches and no padding, in training alone; independently computed from what the norms read."""
    model = build(family).train()
    handle = tapernorm.convert(model, final=True)
    first = handle.calibrate([tokens()], fit=fit, decay=0.7)
    name, norm = list(handle.norms.items())[2]
    seen: list[np.ndarray] = []

    def note(module: Any, args: Any) -> None:
        if model.training and torch.is_grad_enabled():
            h = args[0].detach().double()
            h = h - h.mean(-1, keepdim=True) if family == "gpt2" else h
            seen.append(h[reading.bool()].numpy())

    norm.register_forward_pre_hook(note)
    reading = torch.ones(3, 12)

    def batches(step: int) -> Any:
        nonlocal reading
        for batch in padded_batches(step):
            reading = batch.get("attention_mask", torch.ones(3, 12))
            yield batch

    weighted, weight = np.log(first[name]), 1.0
    for step in range(1, 8):
        model.get_input_embeddings().weight.data *= 1.2  # so that there is something to follow
        gamma = norm.gain().detach().double().numpy()
        training_steps(handle, model, range(step, step + 1), batches)
        with torch.no_grad():
            model(**tokens(99))
        model.eval()
        model(**tokens(98))
        model.train()
        x = np.concatenate(seen)
        r, power = np.sqrt((x**2).mean(-1) + norm.eps), ((x * gamma) ** 2).sum(-1)
        c = {"log": np.exp(-np.log(r).mean()), "inverse_mean": 1 / r.mean()}.get(fit, (power / r).sum() / power.sum())
        weighted, weight = 0.7 * weighted + np.log(c), 0.7 * weight + 1
        seen.clear()
    handle.set_gate(0.0)
    frozen = {name: norm.c.item() for name, norm in handle.norms.items()}
    assert frozen[name] == pytest.approx(np.exp(weighted / weight), rel=1e-4)
    assert abs(np.log(frozen[name] / first[name])) > 0.1
    training_steps(handle, model, range(8, 11), padded_batches)
    assert {name: norm.c.item() for name, norm in handle.norms.items()} == frozen


def test_untracked_c_stays() -> None:
    model = build("llama").train()
    handle = tapernorm.convert(model, final=True)
    chosen = handle.calibrate([tokens()], fit="least_squares", tracked=False)
    training_steps(handle, model, range(1, 10), padded_batches)
    assert {name: norm.c.item() for name, norm in handle.norms.items()} == pytest.approx(chosen, rel=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers: a newer name for the same switch
def test_tracked_c_does_not_depend_on_checkpointed_blocks(reentrant: bool) -> None:
    found = []
    for checkpointed in (False, True):
        model = build("llama").train()
        handle = tapernorm.convert(model, final=True)
        handle.calibrate([tokens()])
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        training_steps(handle, model, range(1, 5), padded_batches)
        found.append({name: norm.c.item() for name, norm in handle.norms.items()})
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_recompute_of_another_batch_than_the_mask_of_is_left_out() -> None:
    model = build("llama").train()
    handle = tapernorm.convert(model, final=True)
    handle.calibrate([tokens()])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    handle.set_gate(0.5)
    short, long = ({**tokens(2, 3, n), "attention_mask": torch.ones(3, n)} for n in (5, 12))
    (model(**short).logits.sum() + model(**long).logits.sum()).backward()
    handle.set_gate(0.4)
    assert all(norm.c.isfinite() for norm in handle.norms.values())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("at", [3, 6, 8])
def test_a_resumed_run_is_bit_identical(family: str, at: int, tmp_path: Path) -> None:
    """Also at step `at` alone, behind a step whose statistics are in no average yet."""
    finals = []
    for interrupted in (False, True):
        model = build(family).train()
        handle = tapernorm.convert(model, final=True)
        handle.calibrate([tokens()])
        training_steps(handle, model, range(1, at), padded_batches)
        if interrupted:
            torch.save({"model": model.state_dict(), "tapering": handle.state_dict()}, tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt", weights_only=True)
            model = build(family).train()
            handle = tapernorm.convert(model, final=True)
            model.load_state_dict(state["model"])
            handle.load_state_dict(state["tapering"])
        training_steps(handle, model, range(at, 11), padded_batches)
        finals.append(model.state_dict())
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("fit", FITS)
def test_what_is_no_statistic_never_enters_c(value: float, fit: Fit) -> None:
    model = nn.Sequential(nn.Linear(D, D, bias=False), nn.RMSNorm(D), nn.Linear(D, D))
    handle = tapernorm.convert(model, final=True)
    h = torch.randn(8, D)
    with pytest.raises(ValueError, match="what the norm 1 reads is zero or not finite: the gate stays 1"):
        handle.calibrate([h, torch.full((8, D), value)] if value else [0 * h], fit=fit)
    assert handle.gate == 1.0 and handle.target is None and handle.norms["1"].c == 1.0
    with pytest.raises(RuntimeError, match="call calibrate before"):
        handle.set_gate(0.5)
    c = handle.calibrate([h], fit=fit)["1"]
    for bad in (True, True, False):
        handle.set_gate(0.5)
        model(torch.full((8, D), value) if bad else h)
        assert handle.norms["1"].c.item() == pytest.approx(c, rel=1e-6)
    handle.set_gate(0.0)
    assert handle.norms["1"].c.item() == pytest.approx(c, rel=1e-6)


def test_c_and_the_target_are_of_the_tokens_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that have unequal numbers of tokens, the second of which runs first, and one that has all of them."""
    every = torch.randn(2, 6, D) * torch.tensor([1, 2, 2, 2, 2, 2])[:, None]

    def run(h: Tensor) -> tuple[float, float | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(D, D), nn.RMSNorm(D), nn.Linear(D, D))
        handle = tapernorm.convert(model, final=True)
        handle.calibrate([h])
        handle.set_gate(0.5)
        model(h + 1)
        model(2 * h)
        handle.set_gate(0.4)
        return handle.norms["1"].c.item(), handle.target

    expected, sent = run(every), []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda sums: sent.append(sums.clone()))
    run(every[:, 1:])
    assert len(sent) == 3
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda sums: sums.add_(sent.pop(0)))
    assert run(every[:, :1]) == pytest.approx(expected, rel=1e-5)


def test_batches_may_be_tuples_tensors_or_anything_that_forward_takes() -> None:
    ids = tokens()["input_ids"]
    constants = []
    for batch, forward in ((ids, None), ((ids,), None), ({"x": ids}, lambda b, model: model(b["x"]))):
        model = build("llama")
        run = None if forward is None else lambda b, model=model, forward=forward: forward(b, model)
        constants.append(tapernorm.convert(model).calibrate([batch], forward=run))
    assert constants[0] == constants[1] == constants[2]


def test_the_final_norm_must_be_the_last_that_runs() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.inner, self.head = nn.RMSNorm(D), nn.RMSNorm(D), nn.Linear(D, 5)

        def forward(self, h: Tensor) -> Tensor:
            return self.head(self.out(h + self.inner(h)))

    h = torch.randn(4, 3, D)
    with pytest.raises(ValueError, match="the last norm that runs is out, not inner: convert with final_norm='out'"):
        tapernorm.convert(Backwards()).calibrate([h])
    handle = tapernorm.convert(Backwards(), final_norm="out")
    handle.calibrate([h])
    assert list(handle.norms) == ["inner"] and handle.final == "out"
    norms = nn.ModuleDict({"out": nn.RMSNorm(D), "blocks": nn.ModuleList(nn.RMSNorm(D) for _ in range(2))})
    assert tapernorm.convert(norms).final == "out"
    assert tapernorm.convert(nn.Sequential(nn.Sequential(nn.RMSNorm(D)), nn.RMSNorm(D), nn.Linear(D, D))).final == "1"


# ------------------------------------------------------------------------------------------------------------- folding


@every_family
@pytest.mark.parametrize("tied", [True, False])
def test_P32_folded_equals_unfolded(family: str, tied: bool) -> None:
    """With random gains and biases, in nn.Linear and (GPT-2) Conv1D."""
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        model = build(family, tied).to(dtype)
        handle = closed(model, norms=["*"], final=True)
        embedding = model.get_input_embeddings().weight.detach().clone()
        other = tokens(seed=9)
        expected = model(**other).logits
        assert expected.abs().max() > 0.5
        report = handle.fold()
        assert relative(model(**other).logits, expected) < tolerance
        assert report.not_folded == {} and handle.norms == {} and report.error < tolerance
        assert not any(is_norm(module) for module in model.modules())
        assert report.folded[FINAL[family]] == ["lm_head"]
        assert report.untied == (["lm_head"] if tied else [])
        assert torch.equal(model.get_input_embeddings().weight, embedding)
        assert not model.config.tie_word_embeddings


@every_family
def test_padded_batches_fold_too(family: str) -> None:
    model = build(family)
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[0, 7:] = mask[1, :3] = 0
    batch = tokens() | {"attention_mask": mask}
    handle = closed(model, batch, norms=["*"], final=True)
    expected = model(**batch).logits
    assert handle.fold().not_folded == {}
    assert relative(model(**batch).logits, expected) < 1e-4


def test_the_projections_that_read_each_norm() -> None:
    report = closed(build("qwen3"), norms=["model.layers.1.*"]).fold()
    attn, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    assert report.folded == {
        f"{attn}.q_norm": [f"{attn}.q_proj"],
        f"{attn}.k_norm": [f"{attn}.k_proj"],
        "model.layers.1.input_layernorm": [f"{attn}.{name}_proj" for name in "kqv"],
        "model.layers.1.post_attention_layernorm": [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
    }
    report = closed(build("gpt2"), norms=["*.0.*"]).fold()
    block = "transformer.h.0"
    assert report.folded == {f"{block}.ln_1": [f"{block}.attn.c_attn"], f"{block}.ln_2": [f"{block}.mlp.c_fc"]}
    report = closed(build("neox"), norms=["*.0.*"]).fold()
    block = "gpt_neox.layers.0"
    assert report.folded == {
        f"{block}.input_layernorm": [f"{block}.attention.query_key_value"],
        f"{block}.post_attention_layernorm": [f"{block}.mlp.dense_h_to_4h"],
    }


@every_family
def test_by_default_the_final_norm_and_the_per_head_norms_stay(family: str) -> None:
    model = build(family, tied=True)
    handle = closed(model)
    expected = model(**tokens()).logits
    assert handle.left_alone[FINAL[family]] == "it is the final norm, kept as the anchor (final=False)"
    per_head = [name for name in handle.left_alone if name.endswith(("q_norm", "k_norm"))]
    assert len(per_head) == (4 if family == "qwen3" else 0)
    assert all("name it in norms" in handle.left_alone[name] for name in per_head)
    assert len(handle.norms) == 2 * LAYERS
    report = handle.fold()
    assert len(report.folded) == 2 * LAYERS and report.untied == []
    assert relative(model(**tokens()).logits, expected) < 1e-4
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert sum(is_norm(module) for module in model.modules()) == len(per_head) + 1


ROUTED = "its output is read by linear, getitem"
RESIDUAL = "its output is also read by add"
LOOKED_AT = "without it the model fails: AttributeError: 'Identity' object has no attribute 'weight'"
SHAPE = {"vocab_size": VOCAB, "hidden_size": D, "num_hidden_layers": 1, "num_attention_heads": 4}
GROUPED = SHAPE | {"intermediate_size": 48, "num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
OTHERS: dict[
    str, tuple[str, dict[str, Any], int, dict[str, str]]
] = {  # class, config, norms folded, reasons of the rest
    "Mistral": ("ForCausalLM", GROUPED, 3, {}),
    "Gemma2": ("ForCausalLM", GROUPED | {"head_dim": 8}, 5, {}),  # a gain of 1 + weight; norms behind the writers too
    "Olmo2": ("ForCausalLM", GROUPED, 5, {}),
    "Nemotron": ("ForCausalLM", GROUPED, 3, {}),
    "Phi": ("ForCausalLM", SHAPE | {"intermediate_size": 48}, 2, {}),
    "OPT": ("ForCausalLM", SHAPE | {"ffn_dim": 48, "word_embed_proj_dim": D, "max_position_embeddings": 32}, 3, {}),
    "Bloom": (
        "ForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": D, "n_layer": 1, "n_head": 4},
        3,
        {"embeddings": RESIDUAL},
    ),
    "Mixtral": ("ForCausalLM", GROUPED | EXPERTS, 2, {"post_attention_layernorm": ROUTED}),
    "Mamba": ("ForCausalLM", {"vocab_size": VOCAB, "hidden_size": D, "num_hidden_layers": 1}, 1, {"0.norm": LOOKED_AT}),
    "Bert": ("ForMaskedLM", SHAPE | {"intermediate_size": 48}, 2, {"embeddings": RESIDUAL, "attention": RESIDUAL}),
}


@pytest.mark.filterwarnings("ignore:c outside")  # random models may have any scale
@pytest.mark.parametrize("name", OTHERS)
def test_other_families_without_a_line_about_them(name: str) -> None:
    suffix, options, folded, reasons = OTHERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, name + suffix)(getattr(transformers, name + "Config")(**options, **SPECIAL)).eval()
    for parameter in model.parameters():
        parameter.data += (0.3 if parameter.dim() == 1 else 0.1) * torch.randn_like(parameter)
    expected = model(**tokens()).logits
    handle = tapernorm.convert(model, ["*"], final=True)
    assert torch.equal(model(**tokens()).logits, expected) and handle.left_alone == {}
    handle.calibrate([tokens()])
    handle.set_gate(0.0)
    expected = model(**tokens()).logits
    report = handle.fold()
    assert relative(model(**tokens()).logits, expected) < 1e-4
    assert len(report.folded) == folded and len(report.not_folded) == len(reasons)
    for part, reason in reasons.items():
        assert [found for norm, found in report.not_folded.items() if part in norm] == [reason]


class Plain(nn.Module):
    """Pre-norms, one of which the residual path reads too, a router's, and a post-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.shared_path = nn.LayerNorm(D)
        self.pre = nn.RMSNorm(D)
        self.routed = nn.LayerNorm(D, bias=False)
        self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.post = nn.LayerNorm(D)
        self.last = nn.RMSNorm(D, eps=1e-5)
        self.head = nn.Linear(D, 7, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        x = self.shared_path(h)
        h = x + self.a(x)
        h = h + self.b(self.pre(h).transpose(0, 1)).transpose(0, 1)
        x = self.routed(h)
        h = h + self.c(x) * torch.sigmoid(x.mean(-1, keepdim=True))
        h = self.post(h)
        h = h + F.relu(h)
        return self.head(self.last(h))


def test_a_plain_model_and_the_reasons_for_what_does_not_fold() -> None:
    model = Plain().double()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    h = torch.randn(4, 6, D).double()
    handle = closed(model, h, final=True)
    assert {type(norm) for norm in handle.norms.values()} == {HeldNorm, HeldLN}
    expected = model(h)
    report = handle.fold()
    assert report.folded == {"pre": ["b"], "last": ["head"]}
    assert report.not_folded == {
        "shared_path": "its output is also read by add",
        "routed": "its output is also read by mean",
        "post": "its output is read by relu, add",
    }
    assert set(handle.norms) == set(report.not_folded)
    assert relative(model(h), expected) < 1e-9
    assert handle.fold(h).not_folded == report.not_folded


def test_a_fold_that_the_numbers_contradict_is_undone() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(D), nn.Linear(D, D, bias=False)

        def forward(self, h: Tensor) -> Tensor:
            return self.linear(self.norm(h)) + F.linear(h, self.linear.weight)  # the matrix has a second use

    model, h = Functional(), torch.randn(3, 5, D)
    handle = closed(model, h, final=True)
    handle.norms["norm"].bias.data.fill_(0.5)
    expected, keys = model(h), set(model.state_dict())
    report = handle.fold()
    assert "the output of the model moves by" in report.not_folded["norm"] and report.folded == {}
    assert torch.equal(model(h), expected) and set(model.state_dict()) == keys and report.error == 0


def test_a_norm_that_the_model_looks_at_stays() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.RMSNorm(D), nn.Linear(D, D)

        def forward(self, h: Tensor) -> Tensor:
            return self.linear(self.norm(h.to(self.norm.weight.dtype)))

    model, h = Looks(), torch.randn(3, D)
    handle = closed(model, h, final=True)
    expected = model(h)
    reason = "without it the model fails: AttributeError: 'Identity' object has no attribute 'weight'"
    assert handle.fold().not_folded == {"norm": reason}
    assert torch.equal(model(h), expected)


def test_one_projection_that_reads_two_norms_or_has_another_width_takes_in_neither() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.wide, self.last = nn.RMSNorm(D), nn.RMSNorm(D), nn.RMSNorm(D), nn.RMSNorm(D)
            self.linear, self.short = nn.Linear(D, D), nn.Linear(D // 2, D)

        def forward(self, h: Tensor) -> Tensor:
            h = h + self.linear(self.a(h)) + self.linear(self.b(h))
            return h + self.short(self.wide(h).unflatten(-1, (2, -1))).sum(-2) + self.last(h)

    h = torch.randn(3, D)
    report = closed(Two(), h, final=True).fold()
    assert report.not_folded == {
        "a": "linear, which reads it, also reads b",
        "b": "linear, which reads it, also reads a",
        "wide": "short, which reads it, has 16 inputs, not 32",
        "last": "its output is read by add",
    }


def test_what_the_model_returns_is_read_and_what_does_not_run_is_not() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.norm, self.linear = nn.RMSNorm(D), nn.RMSNorm(D), nn.Linear(D, D)
            self.embed = nn.Embedding(5, D)

        def forward(self, ids: Tensor, both: bool = False) -> dict[str, Tensor]:
            h = self.embed(ids)
            h = h + self.unused(h) if both else h
            x = self.norm(h)
            return {"hidden": x, "out": self.linear(x)}

    handle = tapernorm.convert(Body(), final=True)
    handle.calibrate([(torch.arange(5), True)])
    handle.set_gate(0.0)
    report = handle.fold(torch.arange(5))
    assert report.not_folded == {
        "unused": "the example does not reach it",
        "norm": "its output is also read by the model's output",
    }
    with pytest.raises(ValueError, match="no batch reaches the norm unused: leave it out of norms"):
        tapernorm.convert(Body(), final=True).calibrate([torch.arange(5)])


def test_writing_to_an_output_is_reading_it_and_so_is_a_second_use_of_what_a_norm_reads() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.RMSNorm(D), nn.RMSNorm(D), nn.RMSNorm(D)
            self.first, self.second, self.third = (nn.Linear(D, D) for _ in range(3))

        def forward(self, h: Tensor) -> Tensor:
            h = h + self.first(F.relu_(self.a(h)))
            x = self.second(h)
            h = h + torch.sigmoid(self.b(x)) * x
            return torch.sigmoid(self.c(self.third(h)))

    model, h = Reads(), torch.randn(3, D)
    handle = closed(model, h, final=True)
    expected = model(h)
    report = handle.fold()
    assert report.folded == {"c": ["third"]}
    assert report.not_folded == {"a": "its output is also read by relu", "b": "its output is read by sigmoid"}
    assert relative(model(h), expected) < 1e-5


@pytest.mark.parametrize("bias", [True, False])
def test_layernorm_of_heads_folds_into_the_rows_of_what_it_reads(bias: bool) -> None:
    norm = TaperLN(8, 1e-5).double()
    norm.c.fill_(0.7)
    for parameter in norm.parameters():
        parameter.data = torch.randn(8).double()
    linear = nn.Linear(D, 24, bias=bias).double()
    norm.set_gate(0.0, Phase.TAPERED)
    h = torch.randn(5, D).double()
    expected = norm(linear(h).unflatten(-1, (3, 8))).flatten(-2)
    weight, shift = absorb_upstream(norm, linear.weight, linear.bias)
    torch.testing.assert_close(F.linear(h, weight, shift), expected)


def test_projections_are_recognised_by_what_they_compute() -> None:
    square = Conv1D(D, D)
    assert as_projection(square).transposed is True
    assert as_projection(nn.Linear(D, D)).transposed is False
    assert as_projection(nn.Embedding(D, D)) is None
    assert as_projection(nn.Conv1d(D, D, 1)) is None

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    assert as_projection(Scaled(D, D)) is None


# ------------------------------------------------------------------------------------------------------------ training


@every_family
def test_training_to_gate_zero_with_an_optimizer_made_before(family: str) -> None:
    """150 steps on 'the next token is three further'; the anchor acts and every norm is gone at the end."""
    torch.manual_seed(0)
    model: Any = FAMILIES[family](False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    handle = tapernorm.convert(model, final=True)
    optimizer.add_param_group({"params": handle.taper_parameters(), "weight_decay": 0.0})
    schedule, losses = GateSchedule("cosine", k_warmup=40, k_taper=100), []
    generator = torch.Generator().manual_seed(1)

    def batch() -> Tensor:
        return (torch.randint(0, VOCAB, (8, 1), generator=generator) + 3 * torch.arange(12)) % VOCAB

    for step in range(1, 151):
        if step == schedule.k_warmup + 1:
            handle.calibrate([batch() for _ in range(4)])
            gains = [gain.clone() for gain in handle.taper_parameters()]
        handle.set_gate(schedule.value(step))
        if step == schedule.k_taper:
            mismatches = handle.mismatches([{"input_ids": batch()}])
        ids = batch()
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        if handle.target is not None:
            loss = loss + handle.scale_loss("mean_log")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert np.isfinite(losses).all()
    assert abs(mismatches.pop(handle.final)) < 0.15, "not tracked, held by the anchor"
    assert max(map(abs, mismatches.values())) < 0.05
    warm, end = np.mean(losses[30:40]), np.mean(losses[-10:])
    assert end < 0.8 * warm < 0.8 * losses[0]
    assert handle.gate == 0.0
    assert not any(torch.equal(gain, old) for gain, old in zip(handle.taper_parameters(), gains, strict=True))
    assert len(handle.fold().folded) == 2 * LAYERS + 1


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("final", [True, False])
def test_scale_loss_is_the_anchors_formula_with_gradient(family: str, final: bool) -> None:
    model = build(family)
    handle = tapernorm.convert(model, final=final)
    with pytest.raises(RuntimeError, match="call calibrate first"):
        handle.scale_loss()
    handle.calibrate([tokens()])
    with pytest.raises(RuntimeError, match="no forward has reached the final norm"):
        handle.scale_loss()
    seen: list[Tensor] = []
    model.get_submodule(FINAL[family]).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    mask = torch.ones(3, 12)
    mask[1, 4:] = 0
    handle.set_gate(0.5)
    model(**tokens(4))
    family_of, eps = {"llama": ("rms", 1e-6), "gpt2": ("layer", 1e-5)}[family]
    s, target = token_scale(seen[-1], family_of, eps), handle.target
    assert target is not None
    real = s[mask.bool()]
    pairs = {
        "fixed_target": ((s / target - 1).square().mean(), (real / target - 1).square().mean()),
        "log_target": ((s / target).log().square().mean(), (real / target).log().square().mean()),
        "mean_log": ((s / target).log().mean().square(), (real / target).log().mean().square()),
    }
    for kind, (expected, masked) in pairs.items():
        torch.testing.assert_close(handle.scale_loss(kind), expected)
        torch.testing.assert_close(handle.scale_loss(kind, weight=3.0, mask=mask), 3 * masked)
    handle.scale_loss().backward()
    assert model.get_input_embeddings().weight.grad.abs().max() > 0
    with torch.no_grad():
        model(**tokens())
        handle.scale_loss()
    with pytest.raises(RuntimeError, match="ran without gradients"):
        handle.scale_loss()
    with pytest.raises(ValueError, match="unknown kind 'square', one of fixed_target, log_target, mean_log"):
        handle.scale_loss("square")


@every_family
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers: a newer name for the same switch
def test_checkpointed_blocks_do_not_change_the_anchor(family: str) -> None:
    gradients = []
    for checkpointed in (False, True):
        model = build(family).train()
        handle = tapernorm.convert(model, final=True)
        handle.calibrate([tokens()])
        handle.set_gate(0.5)
        if checkpointed:
            model.gradient_checkpointing_enable()
        model(**tokens(2), use_cache=False)
        handle.scale_loss().backward()
        gradients.append(model.get_input_embeddings().weight.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 0


# -------------------------------------------------------------------------------------- what is chosen and what is not


class GemmaLike(nn.Module):
    """A norm whose gain is kept as its distance from `one`."""

    def __init__(self, family: str = "rms", one: float = 1.0) -> None:
        super().__init__()
        self.family, self.one = family, one
        self.weight, self.eps = nn.Parameter(torch.zeros(D)), 1e-6

    def forward(self, h: Tensor) -> Tensor:
        norm: Any = {"rms": F.rms_norm, "layer": F.layer_norm}[self.family]
        return norm(h, (D,), weight=self.one + self.weight, eps=self.eps)


@pytest.mark.parametrize("family", ["rms", "layer"])
def test_a_gain_that_is_kept_as_its_distance_from_one(family: str) -> None:
    model, h = nn.Sequential(GemmaLike(family), nn.Linear(D, D)).double(), torch.randn(9, D).double()
    model[0].weight.data.normal_()
    original, gain = model[0], 1 + model[0].weight.detach()
    handle = tapernorm.convert(model, final=True)
    handle.calibrate([h], fit="least_squares")
    norm = handle.norms["0"]
    assert torch.equal(norm(h), original(h)) and torch.equal(norm.taper_weight, gain)
    x = h - h.mean(-1, keepdim=True) if family == "layer" else h
    left, right = (original(h), x * gain)
    assert norm.c.item() == pytest.approx(((left * right).sum() / right.square().sum()).item(), rel=1e-5)
    handle.set_gate(0.25)
    torch.testing.assert_close(norm(h), 0.25 * left + 0.75 * norm.c * right, rtol=1e-6, atol=1e-6)
    handle.set_gate(0.0)
    expected = model(h)
    assert handle.fold().folded == {"0": ["1"]}
    assert relative(model(h), expected) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norms_are_recognised_by_what_they_compute(dtype: torch.dtype) -> None:
    for norm, family in ((nn.RMSNorm(D), "rms"), (nn.RMSNorm(D, 1e-3), "rms"), (nn.LayerNorm(D, bias=False), "layer")):
        spec = recognise(norm.to(dtype))
        assert not isinstance(spec, str) and spec is not None and (spec.family, spec.dim) == (family, D)


def test_the_place_of_eps_decides() -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(D)), 1e-6

        def forward(self, h: Tensor) -> Tensor:
            return h / (h.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight

    assert recognise(Outside()) == "its forward is neither RMSNorm nor LayerNorm over the last dimension"


def test_left_alone_reasons() -> None:
    patched = nn.LayerNorm(D)
    patched.forward = lambda h: h  # type: ignore[method-assign]
    odd = {
        "odd": GemmaLike(one=2.0),
        "gainless": nn.LayerNorm(D, elementwise_affine=False),
        "image": nn.LayerNorm((4, D)),
        "batch": nn.BatchNorm1d(D),
        "group": nn.GroupNorm(4, D),
        "patched": patched,
        "meta": nn.LayerNorm(D, device="meta"),
    }
    model = nn.ModuleDict({**odd, "good": nn.RMSNorm(D), "linear": nn.Linear(D, D), "last": nn.RMSNorm(D)})
    handle = tapernorm.convert(model)
    assert list(handle.norms) == ["good"]
    assert handle.left_alone == {
        "odd": "its forward is neither RMSNorm nor LayerNorm over the last dimension",
        "gainless": "it has no gain",
        "image": f"its gain has the shape (4, {D}), not (D,)",
        "batch": "it has more than a gain and a bias: num_batches_tracked, running_mean, running_var",
        "group": "its forward is neither RMSNorm nor LayerNorm over the last dimension",
        "patched": "its forward was replaced on the instance",
        "meta": "its weight is on the meta device",
        "last": "it is the final norm, kept as the anchor (final=False)",
    }
    assert tapernorm.convert(model, final=True).left_alone["good"] == "it is a tapered norm already"


def test_norms_are_chosen_by_patterns_or_a_predicate() -> None:
    first = [f"model.layers.0.{name}_layernorm" for name in ("input", "post_attention")]
    handle = tapernorm.convert(build("llama"), ["model.layers.0.*"])
    assert list(handle.norms) == first
    assert handle.left_alone["model.layers.1.input_layernorm"] == "norms does not select it"
    handle = tapernorm.convert(build("llama"), "*.input_layernorm", final=True)
    assert list(handle.norms) == [f"model.layers.{i}.input_layernorm" for i in range(LAYERS)] + ["model.norm"]
    assert list(tapernorm.convert(build("llama"), [], final=True).norms) == ["model.norm"]
    chosen = tapernorm.convert(build("llama"), lambda name, module: ".0." in name and module.weight.numel() == D)
    assert list(chosen.norms) == first


def test_errors_are_one_line() -> None:
    def refused(kind: type[Exception], action: Callable[[], Any]) -> str:
        with pytest.raises(kind) as fault:
            action()
        assert "\n" not in str(fault.value)
        return str(fault.value)

    convert, model = tapernorm.convert, build("llama")
    assert "no norm to taper in Linear" in refused(ValueError, lambda: convert(nn.Linear(2, 2)))
    only_odd = nn.Sequential(GemmaLike(one=2.0))
    assert "0: its forward is neither" in refused(ValueError, lambda: convert(only_odd))
    single = nn.Sequential(nn.RMSNorm(D), nn.Linear(D, D))
    assert "0 is the final one; pass final=True" in refused(ValueError, lambda: convert(single))
    said = refused(ValueError, lambda: convert(model, ["model.layers.*.input_layernom"]))
    assert "'model.layers.*.input_layernom' matches no norm; nearest: model.layers." in said
    assert "input_layernorm" in said
    said = refused(ValueError, lambda: convert(model, lambda name, module: False, final=True))
    assert said == "norms: the predicate selects none of the 5 norms, such as model.layers.0.input_layernorm"
    assert "nearest: model.norm" in refused(ValueError, lambda: convert(model, final_norm="model.norms"))
    assert not any(isinstance(module, TaperNorm) for module in model.modules())  # nothing half done
    handle = convert(model)
    for gate in (-0.1, 1.5, float("nan")):
        assert f"gate {gate}" in refused(ValueError, lambda gate=gate: handle.set_gate(gate))
    assert "call calibrate before" in refused(RuntimeError, lambda: handle.set_gate(0.5))
    assert "[batch]" in refused(TypeError, lambda: handle.calibrate(tokens()))
    assert "there is no batch" in refused(ValueError, lambda: handle.calibrate([]))
    assert "'l2', one of log, inv" in refused(ValueError, lambda: handle.calibrate([tokens()], fit="l2"))
    assert "decay 1.0" in refused(ValueError, lambda: handle.calibrate([tokens()], decay=1.0))
    handle.calibrate([tokens()])
    for gate in (1.0, 0.25):
        handle.set_gate(gate)
        said = refused(RuntimeError, lambda: handle.fold())
        assert said == f"norm model.layers.0.input_layernorm has an open gate ({gate:.4g}): set it to 0 before folding"
    assert "calibrate while the gate is 1" in refused(RuntimeError, lambda: handle.calibrate([tokens()]))
    assert "only while the gate is 1" in refused(RuntimeError, lambda: handle.restore())
    fresh = convert(build("llama"))
    fresh.load_state_dict(handle.state_dict() | {"gate": 0.0})
    assert "pass an example batch" in refused(RuntimeError, lambda: fresh.fold())
    model(**tokens())
    assert "does not line up" in refused(ValueError, lambda: handle.scale_loss(mask=torch.ones(3, 5)))


def test_an_implausible_c_is_said() -> None:
    handle = tapernorm.convert(nn.Sequential(nn.RMSNorm(D), nn.Linear(D, D)), final=True)
    with pytest.warns(UserWarning, match=r"c outside 0\.02 to 50\.0: 0 "):
        handle.calibrate([1e-3 * torch.randn(8, D)])


# ----------------------------------------------------------------------------------- the model stays the user's model


def test_a_shared_norm_is_one_norm_and_folds_into_all_that_read_it() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.RMSNorm(D)
            self.second = self.first
            self.tied = nn.RMSNorm(D)
            self.tied.weight = self.first.weight
            self.a, self.b, self.c = (nn.Linear(D, D) for _ in range(3))

        def forward(self, h: Tensor) -> Tensor:
            h = h + self.a(self.first(h))
            h = h + self.b(self.second(h))
            return self.c(self.tied(h))

    model, h = Shared().double(), torch.randn(4, D).double()
    model.first.weight.data.normal_()
    handle = closed(model, h, final=True)
    assert list(handle.norms) == ["first", "tied"]
    assert model.first is model.second is handle.norms["first"] and model.tied.weight is model.first.weight
    expected = model(h)
    assert handle.fold().folded == {"first": ["a", "b"], "tied": ["c"]}
    assert relative(model(h), expected) < 1e-9
    assert isinstance(model.second, nn.Identity)


def test_hooks_modes_and_frozen_gains_are_kept() -> None:
    model = build("llama")
    norm = model.model.layers[0].input_layernorm
    calls: list[str] = []
    first = norm.register_forward_hook(lambda *args: calls.append("forward"))
    norm.register_full_backward_hook(lambda *args: calls.append("backward"))
    norm.weight.requires_grad_(False)
    handle = tapernorm.convert(model)
    model(**tokens()).logits.sum().backward()
    assert calls == ["forward", "backward"]
    first.remove()
    handle.calibrate([tokens()])
    assert calls == ["forward", "backward"]
    handle.set_gate(0.5)
    held = handle.norms["model.layers.0.input_layernorm"]
    assert not held.training and not held.weight.requires_grad and not held.taper_weight.requires_grad
    assert handle.norms["model.layers.1.input_layernorm"].taper_weight.requires_grad


def test_restore_gives_the_original_modules_back() -> None:
    model = build("gpt2")
    before, keys = dict(model.named_modules()), list(model.state_dict())
    handle = tapernorm.convert(model, final=True)
    handle.calibrate([tokens()])
    handle.restore()
    assert dict(model.named_modules()) == before and list(model.state_dict()) == keys and handle.norms == {}
    for gate in (0.5, 0.4):  # there is nothing left to set, and no c to follow
        handle.set_gate(gate)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_converted_model_is_saved_loaded_and_copied(family: str, tmp_path: Path) -> None:
    model = build(family)
    handle = closed(model)
    handle.set_gate(0.5)
    model(**tokens()).logits.sum().backward()  # the handle now holds a tensor with a graph
    expected = model(**tokens()).logits
    assert torch.equal(copy.deepcopy(model)(**tokens()).logits, expected)
    torch.save({"model": model.state_dict(), "tapering": handle.state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    torch.manual_seed(5)
    other = FAMILIES[family](False).eval()
    again = tapernorm.convert(other)
    other.load_state_dict(state["model"], assign=True)  # parameters are replaced, the originals' too
    again.load_state_dict(state["tapering"])
    assert (again.gate, again.target) == (0.5, handle.target)
    assert torch.equal(other(**tokens()).logits, expected)
    for both in (handle, again):
        both.set_gate(1.0)
    assert torch.equal(other(**tokens()).logits, model(**tokens()).logits)
    handle.set_gate(0.0)
    again.set_gate(0.0)
    expected = model(**tokens()).logits
    again.fold(tokens())
    assert relative(other(**tokens()).logits, expected) < 1e-4


def test_it_compiles_in_every_phase_with_the_anchor() -> None:
    """One graph a phase, without a break, and the gate's value is not part of it."""
    torch.compiler.reset()
    model, h, graphs = Plain(), torch.randn(4, 6, D), []
    handle = tapernorm.convert(model)
    handle.calibrate([h])

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for g in (1.0, 0.7, 0.3, 0.1, 0.0):
        handle.set_gate(g)
        out = compiled(h)
        handle.scale_loss("mean_log").backward()
        torch.testing.assert_close(out, model(h), rtol=1e-4, atol=1e-5)
    assert model.a.weight.grad.abs().max() > 0
    assert len(graphs) == 3
    torch.compiler.reset()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_compiled_model_tracks_c_as_another_does(checkpointed: bool) -> None:
    """In one graph, with padding and checkpointed segments, whose second forward a graph leaves out."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pre, self.post, self.last = nn.LayerNorm(D), nn.RMSNorm(D), nn.RMSNorm(D)
            self.linear = nn.Linear(D, D)

        def forward(self, h: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            def block(h: Tensor) -> Tensor:
                return h + self.post(self.linear(self.pre(h)))

            return self.last(checkpoint(block, h, use_reentrant=False) if checkpointed else block(h))

    torch.compiler.reset()
    h, mask, found = torch.randn(4, 6, D), torch.ones(4, 6), []
    mask[0, 3:] = 0
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Padded()
        handle = tapernorm.convert(model)
        handle.calibrate([h])
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for g in (0.7, 0.3, 0.1, 0.0):
            handle.set_gate(g)
            run((1 + g) * h, attention_mask=mask).sum().backward()
        found.append({name: norm.c.item() for name, norm in handle.norms.items()})
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0]["pre"] < 0.9  # it has followed
    torch.compiler.reset()


def test_import_stays_light() -> None:
    light = "import sys, tapernorm; assert 'torch' not in sys.modules; assert tapernorm.__version__"
    done = subprocess.run([sys.executable, "-c", light], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert callable(tapernorm.convert)  # also once its module is imported
    with pytest.raises(AttributeError, match="no attribute 'covert'"):
        tapernorm.covert  # type: ignore[attr-defined]  # noqa: B018


def test_the_example_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "convert.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    exec(compile(block, "docs/convert.md", "exec"), {"__name__": "example"})
    assert "folded 8 norms, left: {}" in capsys.readouterr().out
