"""The explicit anchor: a fixed-target loss on the scale of the residual stream that enters the final norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tapernorm import dist
from tapernorm.calibration import Ema
from tapernorm.config import AnchorConfig


def token_scale(h: Tensor, family: str, eps: float) -> Tensor:
    """s(h) per token, (..., D) -> (...), float32: r(h) = sqrt(mean(h^2) + eps), or sigma(h) for LayerNorm models."""
    x = h.float()
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

    s_tgt is the bias-corrected EMA of the batch mean of s over the statistics window, frozen at k_warmup. It is
    measured for every run, also with anchor=none, because it is the yardstick of logit chasing. batch_mean needs none
    and acts from the first step on.
    `weight` is dimensionless: lambda = weight / s_tgt^2 for fixed_target, lambda = weight for the log forms.
    """

    def __init__(
        self, config: AnchorConfig, *, k_warmup: int, window: int, decay: float, family: str, eps: float
    ) -> None:
        self.config = config
        self.k_warmup, self.window = k_warmup, window
        self.family, self.eps = family, eps
        self.average = Ema(decay)
        self.step_means: list[Tensor] = []
        self.target: float | None = None
        self.strength = config.spread_weight if config.kind == "batch_mean" else 0.0

    def scale(self, h: Tensor) -> Tensor:
        """s (B, T) of the residual stream h (B, T, D) at the final norm: what everything else here is a function of."""
        return token_scale(h, self.family, self.eps)

    def records(self, step: int) -> bool:
        return self.k_warmup - self.window < step <= self.k_warmup

    @torch.no_grad()
    def record(self, scale: Tensor) -> None:
        """Note one microbatch (B, T) of a step of the window."""
        self.step_means.append(scale.mean())

    def end_step(self) -> None:
        mean = torch.stack(self.step_means).mean()
        dist.average([mean])
        self.average.update(mean)
        self.step_means = []

    def freeze(self) -> None:
        """Fix s_tgt and resolve lambda at step k_warmup."""
        self.set_target(self.average.mean.item())

    def set_target(self, target: float) -> None:
        self.target = target
        match self.config:
            case AnchorConfig(kind="none"):
                self.strength = 0.0
            case AnchorConfig(kind="fixed_target", absolute_weight=None):
                self.strength = self.config.weight / target**2
            case AnchorConfig(kind="fixed_target", absolute_weight=float(strength)):
                self.strength = strength
            case AnchorConfig(kind="batch_mean"):
                self.strength = self.config.spread_weight
            case _:
                self.strength = self.config.weight

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
        """The weighted loss of one microbatch (B, T), a scalar.

        Its mean over a step's equal microbatches, and the mean of its gradients, are those of the whole batch.
        For mean_log and batch_mean, `batch_level` is the whole batch's `level` (None: this microbatch is all of it);
        the value returned for mean_log is then already the whole batch's.
        """
        if self.config.kind == "batch_mean":
            middle = scale.mean() if batch_level is None else batch_level
            return self.strength * (scale - middle.detach()).square().mean()
        if self.target is None:
            raise RuntimeError("the scale target is not frozen yet")
        target, log_target = self.target, math.log(self.target)
        match self.config.kind:
            case "fixed_target":
                return self.strength * (scale - target).square().mean()
            case "log_target":
                return self.strength * (scale.log() - log_target).square().mean()
            case "mean_log":
                level = self.level(scale)
                if batch_level is None:
                    return self.strength * (level - log_target).square()
                # d/dtheta of (level_batch - t)^2 is 2 (level_batch - t) dlevel: linear in the microbatches' levels.
                gap = batch_level.detach() - log_target
                return self.strength * (gap.square() + 2.0 * gap * (level - level.detach()))
        raise ValueError(f"anchor={self.config.kind} has no loss")

    @torch.no_grad()
    def force(self, scale: Tensor, batch_level: Tensor | None = None) -> Tensor:
        """d loss / d ln(scale) of one microbatch (B, T), a scalar in nats per e-fold; positive pulls the scale down.

        fixed_target  2 lambda mean_tokens k s (s - s_tgt)      log_target  2 lambda mean_tokens k ln(s / s_tgt)
        mean_log      2 lambda (mean_tokens ln s - ln s_tgt) mean_tokens k
        batch_mean    2 lambda mean_tokens k s (s - mean_batch s)

        with k = d ln s / d ln||h|| = 1 - eps/s^2. Its mean over a step's equal microbatches is the whole batch's.
        """
        follows = 1.0 - self.eps / scale.square()
        if self.config.kind == "batch_mean":
            middle = scale.mean() if batch_level is None else batch_level
            return 2.0 * self.strength * (follows * scale * (scale - middle)).mean()
        if self.target is None:
            raise RuntimeError("the scale target is not frozen yet")
        target = self.target
        match self.config.kind:
            case "fixed_target":
                return 2.0 * self.strength * (follows * scale * (scale - target)).mean()
            case "log_target":
                return 2.0 * self.strength * (follows * (scale / target).log()).mean()
            case "mean_log":
                level = scale.log().mean() if batch_level is None else batch_level
                return 2.0 * self.strength * (level - math.log(target)) * follows.mean()
        raise ValueError(f"anchor={self.config.kind} has no force")

    def describe(self) -> str:
        """One line for people: s_tgt, lambda and the dimensionless lambda * s_tgt^2."""
        if self.target is None:
            return "anchor: no target yet"
        line = f"  anchor {self.config.kind}: s_tgt {self.target:.4g}"
        if self.config.kind == "batch_mean":
            line += " (measured, not used)"
        if self.active:
            line += f", lambda {self.strength:.4g}, lambda * s_tgt^2 {self.strength * self.target**2:.4g}"
        return line

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average.state_dict(), "target": self.target}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.average.load_state_dict(state["average"], device)
        if state["target"] is not None:
            self.set_target(state["target"])
