"""The explicit anchor: a loss that holds the scale of the residual stream that enters the final norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tapernorm.config.options import AnchorConfig
from tapernorm.method.norms import widened


def token_scale(h: Tensor, family: str, eps: float) -> Tensor:
    """s(h) per token, (..., D) -> (...): r(h) = sqrt(mean(h^2) + eps), or sigma(h) for LayerNorm models."""
    x = widened(h)
    if family == "layer":
        x = x - x.mean(-1, keepdim=True)
    return (x.square().mean(-1) + eps).sqrt()


class ScaleAnchor:
    """Scale loss on s = s(h_L), added to the cross-entropy after step k_warmup.

    fixed_target  lambda * mean_tokens (s - s_tgt)^2               Kanavalau et al., arXiv 2602.10408
    log_target    lambda * mean_tokens (ln s - ln s_tgt)^2         ours
    mean_log      lambda * (mean_tokens ln s - ln s_tgt)^2         ours: holds the level, leaves the spread free
    batch_mean    lambda * mean_tokens (s - mean_batch s)^2        Baroni et al., arXiv 2507.02559: squeezes the spread,
                                                                   leaves the level free; the mean has no gradient
    z_loss        lambda * mean_tokens (ln sum_i exp z_i)^2        Chowdhery et al., arXiv 2204.02311: on the logits z

    s_tgt is the batch mean of s after step k_warmup: the level at which the stream then stands. It is measured for
    every run, also with anchor=none. batch_mean needs none and acts from the first step on.
    """

    def __init__(self, config: AnchorConfig, *, k_warmup: int = 0, family: str, eps: float) -> None:
        self.config = config
        self.k_warmup = k_warmup
        self.family, self.eps = family, eps
        self.target: float | None = None

    @property
    def strength(self) -> float:
        """lambda; 0 without an anchor, or before the target. `weight`, dimensionless, is lambda * s_tgt^2 or lambda."""
        config = self.config
        if config.kind == "batch_mean":
            return config.spread_weight
        if config.kind == "none" or self.target is None:
            return 0.0
        if config.kind == "z_loss":
            return config.z_weight
        if config.kind == "fixed_target":
            return config.weight / self.target**2 if config.absolute_weight is None else config.absolute_weight
        return config.weight

    def scale(self, h: Tensor) -> Tensor:
        """s (B, T) of the residual stream h (B, T, D) at the final norm."""
        return token_scale(h, self.family, self.eps)

    def subject(self, h: Tensor, readout: Callable[[Tensor], Tensor]) -> Tensor:
        """(B, T) what the loss is a function of: s(h), or for z_loss ln sum_i exp z_i of the logits z = readout(h)."""
        return widened(readout(h)).logsumexp(-1) if self.config.kind == "z_loss" else self.scale(h)

    def follow(self, kappa: float) -> None:
        """The stream has been divided by kappa: so is s_tgt, and a lambda that belongs to it goes with 1/s_tgt^2."""
        if self.target is not None:
            self.target /= kappa

    def set_target(self, target: float) -> None:
        self.target = target

    @property
    def active(self) -> bool:
        """Whether the loss acts: an anchor was chosen, and the target that it may need is frozen."""
        return self.config.kind == "batch_mean" or (self.target is not None and self.config.kind != "none")

    def acts(self, step: int) -> bool:
        """Whether the loss was part of this step's, which has been taken."""
        return self.active and (self.config.kind == "batch_mean" or step > self.k_warmup)

    @property
    def needs_batch_mean(self) -> bool:
        """Whether a token's loss depends on the whole batch, whose `level` is then needed before any backward pass."""
        return self.active and self.config.kind in ("mean_log", "batch_mean")

    def level(self, scale: Tensor) -> Tensor:
        """mean_tokens s for batch_mean, else mean_tokens ln s; a scalar."""
        return scale.mean() if self.config.kind == "batch_mean" else scale.log().mean()

    def loss(self, scale: Tensor, batch_level: Tensor | None = None) -> Tensor:
        """The weighted loss of one microbatch's `subject` (B, T), a scalar.

        Its mean over a step's equal microbatches, and the mean of its gradients, are those of the whole batch.
        For mean_log and batch_mean, `batch_level` is the whole batch's `level` (None: this microbatch is all of it);
        the value returned for mean_log is then already the whole batch's.
        """
        return self.strength * self._deviation(scale, batch_level).square().mean()

    def _deviation(self, scale: Tensor, batch_level: Tensor | None) -> Tensor:
        """What the loss is the mean square of."""
        kind = self.config.kind
        if kind == "batch_mean":
            return scale - (self.level(scale) if batch_level is None else batch_level).detach()
        if self.target is None:
            raise RuntimeError("the scale target is not frozen yet")
        if kind == "z_loss":
            return scale
        if kind == "fixed_target":
            return scale - self.target
        if kind == "log_target":
            return scale.log() - math.log(self.target)
        if kind == "mean_log":
            level = self.level(scale)
            if batch_level is not None:  # its value, and this microbatch's part of its gradient
                level = batch_level.detach() + (level - level.detach())
            return level - math.log(self.target)
        raise ValueError(f"anchor={kind} has no loss")

    @staticmethod
    def force(loss: Tensor, h: Tensor) -> Tensor:
        """d loss / d ln(scale of h), a scalar in nats per e-fold: <d loss/dh, h>. Positive pulls the scale down.

        `loss` is a weighted one of this stream h, of which it keeps the graph. The mean over a step's equal
        microbatches is the whole batch's.
        """
        (gradient,) = torch.autograd.grad(loss, h, retain_graph=True)
        return (gradient * h.detach()).sum()

    def describe(self) -> str:
        """One line for people: s_tgt, lambda and the dimensionless lambda * s_tgt^2."""
        if self.target is None:
            return "anchor: no target yet"
        line = f"  anchor {self.config.kind}: s_tgt {self.target:.4g}"
        if self.config.kind in ("batch_mean", "z_loss"):
            line += " (measured, not used)"
        if self.active:
            line += f", lambda {self.strength:.4g}, lambda * s_tgt^2 {self.strength * self.target**2:.4g}"
        return line

    def state_dict(self) -> dict[str, Any]:
        return {"target": self.target}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.target = state["target"]


def force_at(kind: Any, strength: float, scale: float, target: float) -> float:
    """`ScaleAnchor.force` where every token's s is `scale`; `strength` is lambda."""
    config = AnchorConfig(kind=kind, weight=strength, absolute_weight=strength if kind == "fixed_target" else None)
    anchor = ScaleAnchor(config, family="rms", eps=0.0)
    anchor.set_target(target)
    s = torch.tensor([scale], dtype=torch.float64, requires_grad=True)
    return anchor.force(anchor.loss(s), s).item()
