"""What a module computes, found by feeding it: whether it is a norm or a projection, whatever its class."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapernorm.method.norms import TaperNorm


@dataclass(frozen=True)
class NormSpec:
    """What a norm was found to compute: 'rms' or 'layer' over the last dimension, with its width and eps.

    `shift` is gamma - weight: 0, or 1 where a norm keeps 1 + weight (Gemma's RMSNorm, Nemotron's LayerNorm).
    """

    family: str
    dim: int
    eps: float
    shift: float


def recognise(module: nn.Module) -> NormSpec | str | None:
    """The norm that a module computes, the reason why a norm cannot be tapered, or None for what is no norm.

    A class counts for nothing: a norm is what has a `weight` (D,), perhaps a `bias`, and no children, and agrees on
    probe input, with weights drawn at random, with RMSNorm or LayerNorm over D whose gain is `weight` or 1 + `weight`.
    Its eps is an attribute with that in its name, or one of the usual values.
    """
    if isinstance(module, TaperNorm):
        return "it is a tapered norm already"
    if any(module.children()):
        return None
    kept = {name: value for name, value in module._parameters.items() if value is not None}
    buffers = {name for name in module._buffers if "eps" not in name}
    eps = [value for name in dir(module) if "eps" in name.lower() and _is_eps(value := getattr(module, name, ""))]
    gains = [name for name in kept if name != "bias"]
    reason = None
    if not gains:
        reason = "it has no gain"
    elif gains != ["weight"]:
        reason = f"it has more than a gain and a bias: {', '.join(gains)}" if len(gains) > 1 else _renamed(gains[0])
    elif kept["weight"].dim() != 1:
        reason = f"its gain has the shape {tuple(kept['weight'].shape)}, not (D,)"
    elif extra := buffers | kept.keys() - {"weight", "bias"}:
        reason = f"it has more than a gain and a bias: {', '.join(sorted(extra))}"
    elif kept["weight"].is_meta:
        reason = "its weight is on the meta device"
    elif "forward" in vars(module):
        reason = "its forward was replaced on the instance"
    if reason is not None:  # of whatever has an eps, or is called a norm; else it is none
        return reason if eps or "norm" in type(module).__name__.lower() else None
    weight = kept["weight"]
    usual = torch.finfo(torch.promote_types(weight.dtype, torch.float32)).eps  # what None means to nn.RMSNorm
    for value in [usual if value is None else float(value) for value in eps] or USUAL_EPS:
        for family, shift in (("rms", 0.0), ("layer", 0.0), ("rms", 1.0), ("layer", 1.0)):
            if _agrees(module, spec := NormSpec(family, weight.numel(), value, shift)):
                return spec
    return "its forward is neither RMSNorm nor LayerNorm over the last dimension" if eps else None


USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-3, 0.0)


def _is_eps(value: Any) -> bool:
    return value is None or isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _renamed(name: str) -> str:
    return f"its gain is called {name}; a norm whose gain is called weight can be tapered"


@torch.no_grad()
def _agrees(module: Any, spec: NormSpec) -> bool:
    """Whether the module computes what `spec` says on rows of three sizes, one so small that the place of eps shows."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(module.weight)

    probe = copy.copy(module)  # shallow, so that neither the parameters nor the hooks of the module are involved
    probe._parameters = {name: value if value is None else draw(spec.dim) for name, value in module._parameters.items()}
    sizes = torch.tensor([1.0, 30.0, max(spec.eps, 1e-12) ** 0.5]).to(module.weight)
    h = (draw(2, 3, spec.dim) + 0.3) * sizes[:, None]
    try:
        out = probe.forward(h)
    except Exception:  # it takes other input: whatever it raises, it is not this norm
        return False
    exact = {name: value.double() for name, value in probe._parameters.items() if value is not None}
    x = h.double()
    x = x - x.mean(-1, keepdim=True) if spec.family == "layer" else x
    expected = F.rms_norm(x, (spec.dim,), exact["weight"] + spec.shift, spec.eps) + exact.get("bias", 0.0)
    tolerance = 1e-4 if module.weight.dtype in (torch.float64, torch.float32) else 5e-2
    return _is_close(out, expected, tolerance)


def _is_close(out: Any, expected: Tensor, tolerance: float) -> bool:
    same_shape = isinstance(out, Tensor) and out.shape == expected.shape
    return same_shape and torch.allclose(out.to(expected), expected, tolerance, tolerance)


@dataclass(frozen=True)
class Projection:
    """A module that computes x W^T + b; `transposed` where it keeps W as (in, out), as transformers' Conv1D does."""

    module: Any
    transposed: bool

    @property
    def weight(self) -> Tensor:
        """W (out, in)."""
        return self.module.weight.T if self.transposed else self.module.weight


def as_projection(module: nn.Module) -> Projection | None:
    """The module as a projection if it is one, whatever its class: it must agree with x W^T + b on probe input."""
    if type(module) is nn.Linear:
        return Projection(module, transposed=False)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or any(module.children()):
        return None
    generator = torch.Generator().manual_seed(0)
    for transposed in (False, True):
        matrix = weight.T if transposed else weight
        x = torch.randn(2, matrix.shape[1], generator=generator).to(weight)
        try:
            with torch.no_grad():
                out, expected = module.forward(x), F.linear(x, matrix, bias)
        except Exception:  # an embedding, a convolution, a matrix of another orientation: whatever it raises, no
            continue
        if _is_close(out, expected, 1e-2):
            return Projection(module, transposed)
    return None
