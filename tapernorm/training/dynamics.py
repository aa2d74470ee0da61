"""Observers: what the norms, the residual stream, the logits and the gradients do. They read and never steer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapernorm.method.anchor import token_scale
from tapernorm.model.decoder import Decoder
from tapernorm.runtime import dist


def final_hidden(model: Decoder, tokens: Tensor, taps: dict[str, Tensor] | None = None) -> Tensor:
    """h_L (B, T, D) without dropout, which would also draw; the model's mode is restored."""
    was_training = model.training
    h = model.eval().trunk(tokens, taps)
    model.train(was_training)
    return h


def readout_gradient(model: Decoder, h: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per-token losses l (B, T), logits z (B, T, V) and the autograd gradient dl/dh_L (B, T, D).

    A token's loss depends on its own h_L alone, so one backward pass of the sum gives every token's gradient, and the
    trunk is not differentiated.
    """
    with torch.enable_grad():
        leaf = h.detach().requires_grad_()
        logits = model.readout(leaf)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), logits.detach(), gradient


def radial_theory(logits: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
    """E_p[z] - z_y per token, (B, T): what <dl/dh, h> equals where the logits are linear in h.

    `bias` (V,) is the head's image of an affine norm's beta, W beta: only z - W beta is linear in h.
    """
    linear = logits if bias is None else logits - bias
    expected = (torch.softmax(logits, -1) * linear).sum(-1)
    return expected - linear.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def constant_logits(model: Decoder) -> Tensor | None:
    """(V,) what the readout adds whatever h_L is: W beta of the final norm, or the head's bias where it was folded."""
    weight, constant = (model.embed.weight, None) if model.head is None else (model.head.weight, model.head.bias)
    beta = getattr(model.final_norm, "bias", None)
    if beta is None:
        return constant
    return F.linear(beta, weight, constant)


def margin_bound(logits: Tensor, targets: Tensor, radial: Tensor) -> float | None:
    """Share of tokens with margin m = z_y - max_other z > 0 that satisfy radial <= -(1 - p_y) m + 1e-5 (1 + |m|).

    None where no margin is positive.
    """
    own = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    others = logits.scatter(-1, targets.unsqueeze(-1), float("-inf")).amax(-1)
    margin = own - others
    miss = 1.0 - torch.softmax(logits, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    holds = radial <= -miss * margin + 1e-5 * (1.0 + margin.abs())
    positive = margin > 0
    return holds[positive].float().mean().item() if positive.any() else None


@torch.no_grad()
def probe(model: Decoder, tokens: Tensor, targets: Tensor, *, calibrated: bool = False) -> dict[str, float | None]:
    """The dynamics on one batch of ids (B, T), in float32: see docs/metrics.md for every name.

    Scales in units of the residual stream, radial quantities in nats per e-fold of scale. `calibrated`: whether c has
    been set, so that it can be held against the scales of now: the mismatch, mean_tokens ln(c s), is 0 where it fits.
    """
    config = model.config
    if config.norm_eps is None:
        raise ValueError("model.norm_eps is resolved by tapernorm.config.resolve")
    taps: dict[str, Tensor] = {}
    h = final_hidden(model, tokens, taps)
    losses, logits, gradient = readout_gradient(model, h, targets)
    radial = (gradient * h).sum(-1)
    gradient_norm = gradient.norm(dim=-1)
    fraction = radial.square() / (gradient_norm * h.norm(dim=-1)).square().clamp_min(torch.finfo(h.dtype).tiny)
    probabilities = torch.log_softmax(logits, -1)
    metrics: dict[str, float | None] = {
        "probe/loss": losses.mean().item(),
        "probe/entropy": -(probabilities.exp() * probabilities).sum(-1).mean().item(),
        "probe/accuracy": (logits.argmax(-1) == targets).float().mean().item(),
        "logits/norm_mean": logits.norm(dim=-1).mean().item(),
        "logits/abs_max": logits.abs().amax().item(),
        "logits/std": logits.std(-1).mean().item(),
        "radial/mean": radial.mean().item(),
        "radial/theory": radial_theory(logits, targets, constant_logits(model)).mean().item(),
        "radial/fraction": fraction.mean().item(),
        "radial/bound_ok": margin_bound(logits, targets, radial),
        "grad/final_hidden_norm": gradient_norm.mean().item(),
    }
    tapers = model.taper_norms()
    for site, x in taps.items():
        scale = token_scale(x, config.norm_family, config.norm_eps).flatten()
        mean, p99 = scale.mean().item(), torch.quantile(scale, 0.99).item()
        metrics[f"scale/rms.{site}"] = mean
        metrics[f"scale/rms_p99.{site}"] = p99
        if calibrated and site in tapers:
            metrics[f"calib/mismatch.{site}"] = (tapers[site].c.log() + scale.log().mean()).item()
        if site == "final":
            metrics["scale/final_rms_mean"], metrics["scale/final_rms_p99"] = mean, p99
    for site, gated in model.gated_norms().items():
        metrics[f"calib/c.{site}"] = gated.c.item()
    for site, norm in tapers.items():
        metrics[f"taper/gain_rms.{site}"] = norm.taper_weight.square().mean().sqrt().item()
    return metrics


@torch.no_grad()
def radial_tokens(model: Decoder, tokens: Tensor, targets: Tensor, count: int) -> dict[str, list[float]]:
    """Per token `theory` E_p[z] - z_y and `measured` <dl/dh_L, h_L>, nats per e-fold, of `count` of a batch (B, T)."""
    h = final_hidden(model, tokens)
    _, logits, gradient = readout_gradient(model, h, targets)
    found = {"theory": radial_theory(logits, targets, constant_logits(model)), "measured": (gradient * h).sum(-1)}
    every = -(-targets.numel() // count)
    return {name: values.flatten()[::every].tolist() for name, values in found.items()}


def worst_mismatch(metrics: Mapping[str, float | None]) -> float | None:
    """The largest |calib/mismatch| of a probe; None where there is none."""
    found = [abs(value) for name, value in metrics.items() if name.startswith("calib/mismatch.") and value is not None]
    return max(found, default=None)


class UpdateRatio:
    """||new - old|| / ||old|| over all parameters of one optimizer step, from a copy taken before it."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.before = [(p, p.detach().clone()) for p in parameters if p.requires_grad]

    @torch.no_grad()
    def value(self) -> float:
        moved = torch.stack([dist.whole((p - old).norm()) for p, old in self.before]).norm()
        size = torch.stack([dist.whole(old.norm()) for _, old in self.before]).norm()
        return (moved / size).item()


def first_nonfinite(model: Decoder, tokens: Tensor, targets: Tensor) -> str | None:
    """Where a batch (B, T) first turns non-finite: a parameter, a module's output, the loss, a gradient, or nowhere.

    Forward order for parameters and outputs; for gradients the first one that the backward pass reaches.
    """
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            return f"parameter {name}"
    leaves = {module: name for name, module in model.named_modules() if not any(module.children())}
    found: list[str] = []

    def look(module: nn.Module, inputs: object, output: object) -> None:
        parts = output if isinstance(output, tuple) else (output,)  # a FakeNorm's may be a pair
        if module in leaves and not all(torch.isfinite(part).all() for part in parts if isinstance(part, Tensor)):
            found.append(leaves[module])

    with nn.modules.module.register_module_forward_hook(look):
        loss, _ = model.loss(tokens, targets)
    if found:
        return found[0]
    if not torch.isfinite(loss):
        return "the logits or the loss"
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    bad = [name for (name, _), g in zip(named, gradients, strict=True) if g is not None and not torch.isfinite(g).all()]
    # The tied embedding is first by name and last in the backward pass.
    bad = [name for name in bad if name != "embed.weight"] or bad
    return f"the gradient of {bad[-1]}" if bad else None
