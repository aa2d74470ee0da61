"""AdamW's parameter groups and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tapernorm import dist
from tapernorm.config import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only; gamma_t stays out until `add_taper_gains`."""
    named = [(name, p) for name, p in model.named_parameters() if not name.endswith("taper_weight")]
    groups = [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,  # set by the loop before every step
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def add_taper_gains(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Let the optimizer train gamma_t, without decay and with fresh moments; called when the taper starts."""
    gains = [p for name, p in model.named_parameters() if name.endswith("taper_weight")]
    if gains:
        optimizer.add_param_group({"params": gains, "weight_decay": 0.0})


def drop_state_of_frozen(optimizer: torch.optim.Optimizer) -> None:
    """Free the moments of parameters that no longer train (gamma after gate 0)."""
    for parameter in [p for p in optimizer.state if not p.requires_grad]:
        del optimizer.state[parameter]


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The l2 norm of the whole gradient, a scalar."""
    norms = [
        dist.whole(torch.nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]))
        for kind in dist.kinds(parameters)
    ]
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float, norm: Tensor) -> None:
    """Scale all gradients by limit / norm where `norm`, that of the whole gradient, is larger."""
    for kind in dist.kinds(parameters):
        torch.nn.utils.clip_grads_with_norm_(kind, limit, norm)


def learning_rate(step: int, config: OptimConfig) -> float:
    """lr(k) for the 1-based step k: linear over warmup_steps, then a cosine to min_lr_ratio * lr at decay_steps."""
    if config.lr is None or config.warmup_steps is None or config.decay_steps is None:
        raise ValueError("the optimizer's horizons are resolved by tapernorm.config.resolve")
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    t = min(1.0, (step - config.warmup_steps) / max(1, config.decay_steps - config.warmup_steps))
    low = config.min_lr_ratio
    return config.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * t)))
