"""Normalization layers: the standard ones, TaperNorm and TaperLN, and the comparators DyT and Derf.

A model is built with the norms that its configuration names: a baseline contains no TaperNorm at all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapernorm.config import (
    AnyNormConfig,
    DerfConfig,
    DyTConfig,
    FoldedNormConfig,
    ModelConfig,
    NoNormConfig,
    StandardNormConfig,
    TaperNormConfig,
    select_sites,
)
from tapernorm.gate import Phase


class TaperNorm(nn.Module):
    """out = g * h/r * gamma + (1-g) * c * h * gamma_t,  r = sqrt(mean(h^2) + eps).

    Shapes: h (..., D) -> (..., D). g is the global gate, c a calibrated scalar (a buffer, never trained), gamma
    (`weight`) and gamma_t (`taper_weight`) are per-feature gains.

    Three phases, set by `set_gate`: normalized runs the framework's own fused RMSNorm and is bit-identical to it;
    tapering mixes both branches in a single pass over h; tapered computes no per-token statistic.

    Source: Kanavalau, Amo Alonso, Lall, arXiv 2602.10408.
    """

    gate: Tensor
    c: Tensor
    bias: nn.Parameter | None

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.phase = Phase.NORMALIZED
        self.weight = nn.Parameter(torch.ones(dim))
        self.taper_weight = nn.Parameter(torch.ones(dim), requires_grad=False)
        self.bias = None
        self.register_buffer("c", torch.ones(()))
        # A tensor, so that a compiled graph does not depend on its value; a function of the step, so not saved.
        self.register_buffer("gate", torch.ones(()), persistent=False)
        self.recording = False
        self.recorded: Tensor | None = None
        self.recorded_rows = 0

    def forward(self, h: Tensor) -> Tensor:
        if self.phase is Phase.NORMALIZED:
            if self.recording:
                self._record(h)
            return self.standard(h)
        x = self.center(h)
        gain = self.c * self.taper_weight
        if self.phase is Phase.TAPERING:
            inverse = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
            gain = self.gate * inverse * self.gain() + (1.0 - self.gate) * gain
        return x * gain if self.bias is None else torch.addcmul(self.bias, x, gain)

    def standard(self, h: Tensor) -> Tensor:
        """The norm that this layer starts as: (..., D) -> (..., D)."""
        return F.rms_norm(h, (self.dim,), self.weight, self.eps)

    def gain(self) -> Tensor:
        """gamma (D,)."""
        return self.weight

    def center(self, h: Tensor) -> Tensor:
        """The linear part in front of the statistic; nothing for RMSNorm."""
        return h

    def set_gate(self, gate: float, phase: Phase) -> None:
        """Enter the phase with this gate value; also decides which of the two gains trains.

        gamma_t has no gradient (None, not zero, which would change clipping) before the taper; gamma none after it.
        """
        self.phase = phase
        self.gate.fill_(gate)
        self.weight.requires_grad_(phase is not Phase.TAPERED)
        self.taper_weight.requires_grad_(phase is not Phase.NORMALIZED)

    @torch.no_grad()
    def _record(self, h: Tensor) -> None:
        """Add this microbatch's sums over tokens of ||h*gamma||^2 / r(h) and ||h*gamma||^2, in float32."""
        x = self.center(h.detach().float()).flatten(0, -2)
        r = (x.square().mean(-1) + self.eps).sqrt()
        power = (x * self.gain().float()).square().sum(-1)
        sums = torch.stack([(power / r).sum(), power.sum()])
        self.recorded = sums if self.recorded is None else self.recorded + sums
        self.recorded_rows += x.shape[0]

    def take_statistics(self) -> Tensor:
        """(2,) means over the tokens recorded since the last call: E[||h*gamma||^2 / r], E[||h*gamma||^2]."""
        if self.recorded is None:
            raise RuntimeError("no forward pass was recorded: set recording = True before the step")
        mean = self.recorded / self.recorded_rows
        self.recorded, self.recorded_rows = None, 0
        return mean

    @torch.no_grad()
    def calibrate(self, c: Tensor | float) -> None:
        """Freeze c and start the linear branch from the trained gain: gamma_t := gamma."""
        self.c.fill_(c)
        self.taper_weight.copy_(self.gain())

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, phase={self.phase.value}"


class TaperLN(TaperNorm):
    """out = g * xc/sigma * gamma + (1-g) * c * xc * gamma_t + beta,  xc = h - mean(h),  sigma = sqrt(mean(xc^2) + eps).

    Shapes: h (..., D) -> (..., D). Centering is linear, so it stays in the end map; beta is shared by both branches
    (our choice).
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps)
        self.bias = nn.Parameter(torch.zeros(dim))

    def standard(self, h: Tensor) -> Tensor:
        return F.layer_norm(h, (self.dim,), self.weight, self.bias, self.eps)

    def center(self, h: Tensor) -> Tensor:
        return h - h.mean(-1, keepdim=True)


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


def is_folded(norm: AnyNormConfig, model: ModelConfig, site: str) -> bool:
    """Whether the linear part of the norm at a site has moved into the projection that reads it."""
    if not isinstance(norm, FoldedNormConfig):
        return False
    return norm.source.kind == "taper" if site in select_sites(norm.sites, model.n_layer) else norm.gains


def needs_bias(norm: AnyNormConfig, model: ModelConfig, site: str) -> bool:
    """Whether the projection that reads a site's norm needs a bias, also in a model without: a folded beta's image."""
    return model.norm_family == "layer" and is_folded(norm, model, site)


def build_norm(norm: AnyNormConfig, model: ModelConfig, site: str) -> nn.Module:
    """The norm at a site ('0.attn', ..., 'final') of a resolved model configuration."""
    if model.norm_eps is None:
        raise ValueError("model.norm_eps is resolved by tapernorm.config.resolve")
    dim, eps = model.d_model, model.norm_eps
    if site not in select_sites(norm.sites, model.n_layer):
        return standard_norm(model.norm_family, dim, eps, gain=not is_folded(norm, model, site))
    match norm:
        case FoldedNormConfig():
            return nn.Identity() if is_folded(norm, model, site) else build_norm(norm.source, model, site)
        case TaperNormConfig():
            return {"rms": TaperNorm, "layer": TaperLN}[model.norm_family](dim, eps)
        case DyTConfig(alpha=alpha):
            return DyT(dim, alpha)
        case DerfConfig(alpha=alpha, shift=shift):
            return Derf(dim, alpha, shift)
        case NoNormConfig():
            return nn.Identity()
        case StandardNormConfig():
            return standard_norm(model.norm_family, dim, eps)
