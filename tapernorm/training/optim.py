"""AdamW's parameter groups and the learning-rate schedule."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.config.options import OptimConfig
from tapernorm.model.decoder import Decoder
from tapernorm.runtime import dist

# What a parameter does, by the end of its name; the first that fits. The tied head is the embedding.
ROLES = {
    "embed": r"(^|\.)(position_)?embed\.weight$",
    "writers": r"(attn\.out|mlp\.down)\.(weight|bias)$",
    "final_gain": r"final_norm\.\w+$",
    "gains": r"_norm\.\w+$",
    "readers": "",
}


def role(name: str) -> str:
    """The key of `optim.multipliers` that a parameter of this name follows."""
    return next(role for role, pattern in ROLES.items() if re.search(pattern, name))


def _groups(model: nn.Module, config: OptimConfig, gamma_t: bool) -> list[dict[str, Any]]:
    """Parameter groups, of gamma_t alone or of all the rest: matrices decay; each has its role's multiplier."""
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    named = [(name, p) for name, p in model.named_parameters() if name.endswith("taper_weight") is gamma_t]
    for name, parameter in sorted(named, key=lambda item: item[1].dim() < 2):
        key = parameter.dim() >= 2, getattr(config.multipliers, role(name)) or 1.0
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": members, "weight_decay": config.weight_decay * decays, "multiplier": factor}
        for (decays, factor), members in groups.items()
    ]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over all parameters but gamma_t; `set_learning_rates` sets lr before every step."""
    betas = config.beta1, config.beta2
    return torch.optim.AdamW(_groups(model, config, False), lr=0.0, betas=betas, eps=config.eps, fused=True)


def add_taper_gains(optimizer: torch.optim.Optimizer, model: nn.Module, config: OptimConfig) -> None:
    """Let the optimizer train gamma_t, without decay and with fresh moments; called when the taper starts."""
    for group in _groups(model, config, True):
        optimizer.add_param_group(group)


def set_learning_rates(optimizer: torch.optim.Optimizer, step: int, config: OptimConfig) -> None:
    """Before a step: lr(k) * m in every group, its weight decay over m, as AdamW takes off their product.

    m is the group's multiplier, 1 up to step `optim.multipliers.after_step`.
    """
    for group in optimizer.param_groups:
        factor = group.get("multiplier", 1.0) if step > config.multipliers.after_step else 1.0
        group["lr"] = learning_rate(step, config) * factor
        if group["weight_decay"]:
            group["weight_decay"] = config.weight_decay / factor


@torch.no_grad()
@torch.no_grad()
def rescale(model: Decoder, optimizer: torch.optim.Optimizer, kappa: float, eps: bool = True) -> None:
    """Divide the residual stream by kappa and leave the function as it is: the lever `calibration.level`.

    The embeddings and the writers are divided by kappa, eps of every norm by kappa^2; where the head is tied, so that
    it is divided too, the final norm's gain and bias are multiplied by kappa. A parameter times a has gradients over a:
    Adam's moments go with them. From here on this equals multiplying the learning rate of embedding and writers by
    kappa (their weight decay by 1/kappa) and dividing the final gain's by kappa, but for clipping and Adam's eps.
    `eps` False leaves the norms' as it is, for a kappa near 1: a compiled graph has it as a constant.
    """
    factors = {"embed": 1 / kappa, "writers": 1 / kappa, "final_gain": kappa if model.head is None else 1.0}
    for name, parameter in model.named_parameters():
        factor = factors.get(role(name), 1.0)
        parameter.mul_(factor)
        if moments := optimizer.state.get(parameter):
            moments["exp_avg"].div_(factor)
            moments["exp_avg_sq"].div_(factor**2)
    if eps:
        model.divide_eps(kappa)


def drop_state_of_frozen(optimizer: torch.optim.Optimizer) -> None:
    """Free the moments of parameters that no longer train (gamma after gate 0)."""
    for parameter in [p for p in optimizer.state if not p.requires_grad]:
        del optimizer.state[parameter]


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The l2 norm of the whole gradient, a scalar."""
    gradients = [[p.grad for p in kind if p.grad is not None] for kind in dist.kinds(parameters)]
    norms = [dist.whole(torch.nn.utils.get_total_norm(kind)) for kind in gradients]
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
