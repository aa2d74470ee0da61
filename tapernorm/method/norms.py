"""Normalization layers: the standard ones, TaperNorm and TaperLN, and the comparators FakeLN, DyT and Derf.

A model is built with the norms that its configuration names: a baseline contains no TaperNorm at all.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapernorm.config.options import (
    GATED,
    AnyNormConfig,
    DerfConfig,
    DyTConfig,
    FakeNormConfig,
    FoldedNormConfig,
    ModelConfig,
    NoNormConfig,
    StandardNormConfig,
    TaperNormConfig,
)
from tapernorm.config.sites import removal_turns, select_sites
from tapernorm.method.gate import Phase


def widened(x: Tensor) -> Tensor:
    """In float32, or in float64 where it is: the precision of every statistic and loss, whatever autocast does."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class GatedNorm(nn.Module):
    """A standard norm that the global gate g takes away: what TaperNorm and FakeNorm share, in RMSNorm's form.

    Shapes: h (..., D) -> (..., D). gamma (`weight`) is a per-feature gain, c a calibrated scalar (a buffer, never
    trained): the stand-in for 1/r(h), r = sqrt(mean(h^2) + eps). `fit` says what makes it a good one, over all tokens:

        least_squares  E[p / r] / E[p], p = ||h*gamma||^2: the least E||h/r * gamma - c * h * gamma||^2
        inverse_mean   1 / E[r]
        log            exp(-E[ln r]): the mean of ln(c r) is 0, however far single tokens stick out
    """

    gate: Tensor
    c: Tensor
    recorded: Tensor
    bias: nn.Parameter | None

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.phase = Phase.NORMALIZED
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = None
        self.register_buffer("c", torch.ones(()))
        # A tensor, so that a compiled graph does not depend on its value; a function of the step, so not saved.
        self.register_buffer("gate", torch.ones(()), persistent=False)
        self.fit = "least_squares"
        self.recording = False
        # A buffer that forwards add to in place, so that a compiled graph can.
        self.register_buffer("recorded", torch.zeros(2), persistent=False)

    def standard(self, h: Tensor) -> Tensor:
        """The norm that this layer starts as: (..., D) -> (..., D)."""
        return F.rms_norm(h, (self.dim,), self.weight, self.eps)

    def gain(self) -> Tensor:
        """gamma (D,)."""
        return self.weight

    def end_gain(self) -> Tensor:
        """(D,) what the centred h is multiplied by at gate 0."""
        raise NotImplementedError

    def center(self, h: Tensor) -> Tensor:
        """The linear part in front of the statistic; nothing for RMSNorm."""
        return h

    def set_gate(self, gate: float, phase: Phase) -> None:
        """Enter the phase with this gate value."""
        self.phase = phase
        self.gate.fill_(gate)

    def inverse_scale(self, x: Tensor) -> Tensor:
        """1/r of centred inputs x (..., D), in float32: (..., 1)."""
        return torch.rsqrt(widened(x).square().mean(-1, keepdim=True) + self.eps)

    @torch.no_grad()
    def calibrate(self, c: Tensor | float) -> None:
        """Set c."""
        self.c.fill_(c)

    @torch.no_grad()
    def record(self, x: Tensor, inverse: Tensor) -> None:
        """Add the sums over tokens that c is fitted to: of centred inputs x (..., D) and their 1/r (..., 1)."""
        sums = [values.sum() for values in self.per_token(x.detach(), inverse.detach().squeeze(-1))]
        # add_: += also sets the attribute, which a compiled graph of a checkpointed segment refuses.
        self.recorded.add_(torch.stack(sums))

    def per_token(self, x: Tensor, inverse: Tensor) -> list[Tensor]:
        """Two, of centred inputs x (..., D) and their 1/r (...): c is fitted to the sums over tokens of these (...)."""
        if self.fit == "log":
            return [inverse.log(), torch.ones_like(inverse)]
        if self.fit == "inverse_mean":
            return [torch.ones_like(inverse), inverse.reciprocal()]
        power = (widened(x) * widened(self.gain())).square().sum(-1)
        return [power * inverse, power]

    def record_standard(self, h: Tensor) -> None:
        """`record` while the standard norm runs, whose statistic is out of reach."""
        if self.recording:
            x = self.center(widened(h.detach()))
            self.record(x, self.inverse_scale(x))

    def take_statistics(self) -> Tensor:
        """(2,) what was recorded since the last call; `fitted` makes c of it, or of an average of several."""
        sums = self.recorded.clone()
        self.recorded.zero_()
        return sums

    def fitted(self, statistics: Tensor) -> Tensor:
        """c (a scalar) for recorded statistics (2,)."""
        quotient = statistics[0] / statistics[1]
        return quotient.exp() if self.fit == "log" else quotient

    def divide(self, statistics: Tensor, kappa: float) -> None:
        """Make recorded statistics (2,) those of a stream divided by kappa, in place: c is kappa times larger."""
        if self.fit == "log":
            statistics[0] += statistics[1] * math.log(kappa)
        else:
            statistics[1] /= kappa

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, phase={self.phase.value}"


class LayerForm(GatedNorm):
    """Mixed in, LayerNorm instead of RMSNorm: h - mean(h) and sigma in place of h and r, and a bias beta (D,)."""

    def __init__(self, dim: int, eps: float, *more: Any) -> None:
        super().__init__(dim, eps, *more)
        self.bias = nn.Parameter(torch.zeros(dim))

    def standard(self, h: Tensor) -> Tensor:
        return F.layer_norm(h, (self.dim,), self.weight, self.bias, self.eps)

    def center(self, h: Tensor) -> Tensor:
        return h - h.mean(-1, keepdim=True)


class TaperNorm(GatedNorm):
    """out = g * h/r * gamma + (1-g) * c * h * gamma_t,  r = sqrt(mean(h^2) + eps).

    Shapes: h (..., D) -> (..., D). g is the global gate; gamma (`weight`) and gamma_t (`taper_weight`) are gains (D,).
    Normalized, it runs the framework's own fused RMSNorm, bit for bit; tapering, it mixes both branches in one pass
    over h; tapered, it computes no per-token statistic. Source: Kanavalau et al., arXiv 2602.10408.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps)
        self.taper_weight = nn.Parameter(torch.ones(dim), requires_grad=False)

    def forward(self, h: Tensor) -> Tensor:
        if self.phase is Phase.NORMALIZED:
            self.record_standard(h)
            return self.standard(h)
        x = self.center(h)
        gain = self.end_gain()
        if self.phase is Phase.TAPERING:
            inverse = self.inverse_scale(x)
            if self.recording:
                self.record(x, inverse)
            gain = self.gate * inverse * self.gain() + (1.0 - self.gate) * gain
        return x * gain if self.bias is None else torch.addcmul(self.bias, x, gain)

    def end_gain(self) -> Tensor:
        return self.c * self.taper_weight

    def set_gate(self, gate: float, phase: Phase) -> None:
        super().set_gate(gate, phase)
        # No gradient at all (zeros would change clipping) for gamma_t before the taper and for gamma after it.
        self.weight.requires_grad_(phase is not Phase.TAPERED)
        self.taper_weight.requires_grad_(phase is not Phase.NORMALIZED)

    @torch.no_grad()
    def calibrate(self, c: Tensor | float) -> None:
        """Set c and start the linear branch from the trained gain: gamma_t := gamma."""
        super().calibrate(c)
        self.taper_weight.copy_(self.gain())


class TaperLN(LayerForm, TaperNorm):
    """out = g * xc/sigma * gamma + (1-g) * c * xc * gamma_t + beta,  xc = h - mean(h),  sigma = sqrt(mean(xc^2) + eps).

    Centering is linear, so it stays in the end map; beta is shared by both branches (our choice).
    """


class FakeNorm(GatedNorm):
    """out = h/r * gamma until the layer's own turn, then c * h * gamma: 1/c is the frozen running mean of r.

    The gate is shared: a layer goes once the gate has fallen to its `turns`, one layer after the other. The norm of an
    attention has two, first for what Q and K read, then for what V reads; between them the output is the pair of both.
    c is read again at the second (our choice), so that one linear map is left. Source: Baroni et al., arXiv 2507.02559.
    """

    def __init__(self, dim: int, eps: float, turns: tuple[float, ...]) -> None:
        super().__init__(dim, eps)
        self.turns, self.removed = turns, 0
        self.fit = "inverse_mean"

    def forward(self, h: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        done = self.removed == len(self.turns)
        if not done:
            self.record_standard(h)
        if not self.removed:
            return self.standard(h)
        x, gain = self.center(h), self.end_gain()
        linear = x * gain if self.bias is None else torch.addcmul(self.bias, x, gain)
        return linear if done else (linear, self.standard(h))

    def end_gain(self) -> Tensor:
        return self.c * self.weight

    def turns_taken(self, gate: float) -> int:
        """How many of the layer's turns have come at this gate value."""
        return sum(gate <= turn + 1e-9 for turn in self.turns)

    def set_gate(self, gate: float, phase: Phase) -> None:
        super().set_gate(gate, phase)
        self.removed = self.turns_taken(gate)


class FakeLN(LayerForm, FakeNorm):
    """out = xc/sigma * gamma + beta until the layer's own turn, then c * xc * gamma + beta; see FakeNorm."""


class DyT(nn.Module):
    """out = gamma * tanh(alpha * h) + beta.  (..., D) -> (..., D).

    Source: Zhu, Chen, He, LeCun, Liu, 'Transformers without Normalization', arXiv 2503.10622.
    """

    def __init__(self, dim: int, alpha: float) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(alpha))
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, h: Tensor) -> Tensor:
        return torch.addcmul(self.bias, torch.tanh(self.alpha * h), self.weight)


class Derf(nn.Module):
    """out = gamma * erf(alpha * h + s) + beta.  (..., D) -> (..., D).

    Source: Chen et al., 'Stronger Normalization-Free Transformers', arXiv 2512.10938.
    """

    def __init__(self, dim: int, alpha: float, shift: float) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(alpha))
        self.shift = nn.Parameter(torch.tensor(shift))
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, h: Tensor) -> Tensor:
        return torch.addcmul(self.bias, torch.erf(self.alpha * h + self.shift), self.weight)


def standard_norm(family: str, dim: int, eps: float, gain: bool = True) -> nn.Module:
    """The framework's own RMSNorm or LayerNorm, with or without its gain and bias."""
    return {"rms": nn.RMSNorm, "layer": nn.LayerNorm}[family](dim, eps=eps, elementwise_affine=gain)


def is_table(norm: AnyNormConfig, site: str) -> bool:
    """Whether folding has made the norm at a site a table by token id, which only 0.attn's can be."""
    return isinstance(norm, FoldedNormConfig) and norm.table and site == "0.attn"


def is_folded(norm: AnyNormConfig, model: ModelConfig, site: str) -> bool:
    """Whether the linear part of the norm at a site has moved into the projection that reads it."""
    if not isinstance(norm, FoldedNormConfig) or is_table(norm, site):
        return False
    return norm.source.kind in GATED if site in select_sites(norm.sites, model.n_layer) else norm.gains


def needs_bias(norm: AnyNormConfig, model: ModelConfig, site: str) -> bool:
    """Whether the projection that reads a site's norm needs a bias, also in a model without: a folded beta's image."""
    return model.norm_family == "layer" and is_folded(norm, model, site)


def build_norm(norm: AnyNormConfig, model: ModelConfig, site: str) -> nn.Module:
    """The norm at a site ('0.attn', ..., 'final') of a resolved model configuration."""
    if model.norm_eps is None:
        raise ValueError("model.norm_eps is resolved by tapernorm.config.resolve")
    if is_table(norm, site):
        return nn.Identity()
    dim, eps = model.d_model, model.norm_eps
    if site not in select_sites(norm.sites, model.n_layer):
        return standard_norm(model.norm_family, dim, eps, gain=not is_folded(norm, model, site))
    match norm:
        case FoldedNormConfig():
            return nn.Identity() if is_folded(norm, model, site) else build_norm(norm.source, model, site)
        case TaperNormConfig():
            return {"rms": TaperNorm, "layer": TaperLN}[model.norm_family](dim, eps)
        case FakeNormConfig():
            turns = removal_turns(norm.sites, model.n_layer)[site]
            return {"rms": FakeNorm, "layer": FakeLN}[model.norm_family](dim, eps, turns)
        case DyTConfig(alpha=alpha):
            return DyT(dim, alpha)
        case DerfConfig(alpha=alpha, shift=shift):
            return Derf(dim, alpha, shift)
        case NoNormConfig():
            return nn.Identity()
        case StandardNormConfig():
            return standard_norm(model.norm_family, dim, eps)
