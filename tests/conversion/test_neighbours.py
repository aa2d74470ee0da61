"""Models that bypass, rename, omit or bend what a norm usually is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tapernorm

D = 16
transformers = pytest.importorskip("transformers")


def noisy(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = 0.3 * torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + noise if parameter.dim() == 1 else noise
    return model.eval()


@pytest.mark.parametrize("first", [True, False])
def test_P44_gradients_or_not_the_numbers_are_the_same(first: bool) -> None:
    layer = nn.TransformerEncoderLayer(D, 2, 32, dropout=0.0, batch_first=True, norm_first=first)
    norm = nn.LayerNorm(D) if first else None
    model = noisy(nn.TransformerEncoder(layer, 2, norm=norm, enable_nested_tensor=False))
    x = 3 * torch.randn(2, 5, D, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(x)
    handle = tapernorm.convert(model, ["*"], final=True)
    with torch.no_grad():
        assert torch.equal(model(x), before), "at gate 1 nothing changes"
    handle.calibrate([x])
    for gate in (1.0, 0.5, 0.0):
        handle.set_gate(gate)
        with torch.no_grad():
            without = model(x)
        torch.testing.assert_close(without, model(x).detach(), rtol=1e-5, atol=1e-6)
    assert (without - before).abs().max() > 0.01
    handle.set_gate(1.0)
    with torch.no_grad():
        assert torch.equal(model(x), before)


class NanoNorm(nn.Module):
    """As nanoGPT writes it: no eps to be seen."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Rms(nn.Module):
    def __init__(self, name: str = "eps", eps: Any = 1e-6, gain: str | None = "weight") -> None:
        super().__init__()
        if isinstance(eps, Tensor):
            self.register_buffer(name, eps)
        else:
            setattr(self, name, eps)
        self.named, self.gain = name, gain
        if gain:
            setattr(self, gain, nn.Parameter(torch.ones(D)))

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + getattr(self, self.named))
        return y * getattr(self, self.gain) if self.gain else y


class Stack(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear, self.last, self.head = norm, nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(x + self.linear(self.norm(x))))


@pytest.mark.parametrize(
    "norm",
    [NanoNorm(True), NanoNorm(False), Rms("norm_eps"), Rms("eps", torch.tensor(1e-6)), Rms("eps", 0.0), Rms("epsilon")],
    ids=lambda norm: getattr(norm, "named", "nanoGPT"),
)
def test_P45_norms_are_recognised_by_what_they_compute(norm: nn.Module) -> None:
    model = noisy(Stack(norm))
    x = torch.randn(4, 3, D)
    before = model(x)
    handle = tapernorm.convert(model)
    assert list(handle.norms) == ["norm"] and list(handle.left_alone) == ["last"]
    assert torch.equal(model(x), before)
    handle.calibrate([x])
    handle.set_gate(0.0)
    closed = model(x)
    assert handle.fold().not_folded == {}
    torch.testing.assert_close(model(x), closed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (Rms(gain="scale"), "its gain is called scale"),
        (Rms(gain="g"), "its gain is called g"),
        (Rms(gain="gamma"), "its gain is called gamma"),
        (Rms(gain=None), "it has no gain"),
        (nn.LayerNorm(D, elementwise_affine=False), "it has no gain"),
        (nn.BatchNorm1d(3), "it has more than a gain and a bias: num_batches_tracked, running_mean, running_var"),
    ],
)
def test_P45_what_is_left_alone_has_its_reason(norm: nn.Module, reason: str) -> None:
    model = Stack(norm)
    handle = tapernorm.convert(model, final=True)
    assert list(handle.norms) == ["last"] and handle.left_alone["norm"].startswith(reason)


def test_P45_what_is_no_norm_is_not_named() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(D))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    assert tapernorm.convert(Stack(Scale()), final=True).left_alone == {}


def llama(**keys: Any) -> Any:
    shape = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**shape, num_attention_heads=4, **keys)
    return noisy(transformers.LlamaForCausalLM(config))


def test_P48_a_folded_model_does_not_come_back_with_norms(tmp_path: Any) -> None:
    model, x = llama(), torch.arange(24).reshape(2, 12)
    handle = tapernorm.convert(model, ["*"], final=True)
    handle.calibrate([x])
    handle.set_gate(0.0)
    model.save_pretrained(tmp_path / "open")  # until it is folded it is the model that it was
    handle.fold()
    for part in (model, model.model):
        with pytest.raises(RuntimeError, match=r"from_pretrained would put new norms into a folded model"):
            part.save_pretrained(tmp_path / "folded")
    assert not (tmp_path / "folded").exists()
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(again(x).logits, model(x).logits)


def test_P49_norms_of_single_heads_are_known_by_their_shapes() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_a_proj, self.q_a_layernorm, self.q_b_proj = nn.Linear(D, 6), nn.RMSNorm(6), nn.Linear(6, D)
            self.q_norm, self.k_norm, self.full_q_norm = nn.RMSNorm(4), nn.RMSNorm(4), nn.RMSNorm(D)
            self.k_proj, self.o_proj = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            q = self.full_q_norm(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))).unflatten(-1, (4, 4))
            k = self.k_proj(x).unflatten(-1, (4, 4))
            return self.o_proj((self.q_norm(q) * self.k_norm(k)).flatten(-2))

    model = Stack(nn.RMSNorm(D))
    model.linear = Attention()
    handle = tapernorm.convert(model)
    assert sorted(handle.norms) == ["linear.full_q_norm", "linear.q_a_layernorm", "norm"]
    alone = "it norms single heads; name it in norms"
    assert handle.left_alone["linear.q_norm"] == handle.left_alone["linear.k_norm"] == alone


@pytest.mark.parametrize("fault", ["nan", "inf", "zeros", "padding"])
def test_P50_activations_that_say_nothing_leave_the_gate_at_1(fault: str) -> None:
    model = llama()
    handle = tapernorm.convert(model, ["*"], final=True)
    x: Any = {"input_ids": torch.arange(24).reshape(2, 12), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    if fault == "padding":
        x["attention_mask"][:] = 0
    else:
        model.model.embed_tokens.weight.data.fill_({"nan": math.nan, "inf": math.inf, "zeros": 0.0}[fault])
    with pytest.raises(
        ValueError, match=r"the norm model\.layers\.0\.input_layernorm reads is zero or not finite"
    ) as told:
        handle.calibrate([x])
    assert "\n" not in str(told.value) and handle.gate == 1.0
    assert all(norm.c.item() == 1.0 for norm in handle.norms.values())
    with pytest.raises(RuntimeError, match="call calibrate before the gate leaves 1"):
        handle.set_gate(0.5)
