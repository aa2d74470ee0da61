"""Folding the tapered norms of any model: into whatever reads them, as a traced run shows, checked by another run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.conversion.layers import HeldNorm, replace
from tapernorm.conversion.recognise import Projection, as_projection
from tapernorm.conversion.trace import Trace, tensors
from tapernorm.method.norms import TaperNorm
from tapernorm.model.fold import absorb

# How far folding may move a model's output, relative, before it counts as a disagreement: rounding, not algebra.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}  # else 5e-2


@dataclass
class FoldReport:
    """What folding did: the projections that took each norm in, the reasons of the others, the heads that were untied.

    `error` is ||z' - z|| / ||z|| over the outputs z on the example, in the model's precision.
    """

    folded: dict[str, list[str]] = field(default_factory=dict)
    not_folded: dict[str, str] = field(default_factory=dict)
    untied: list[str] = field(default_factory=list)
    error: float = 0.0


def fold_norms(model: nn.Module, norms: dict[str, HeldNorm], run: Callable[[], Any]) -> FoldReport:
    """Fold each norm that can be, and take it out of `norms`; `run` is the model's forward on an example."""
    report = FoldReport()
    candidates = {name: as_projection(module) for name, module in model.named_modules()}
    projections = {name: projection for name, projection in candidates.items() if projection is not None}
    trace = Trace(norms, projections)
    latest = reference = trace.run(run)
    for name, norm in list(norms.items()):
        plan = trace.plan(name, norm.dim)
        if isinstance(plan, str):
            report.not_folded[name] = plan
            continue
        names, upstream = plan
        shared = [projection for projection in names if is_shared(model, projections[projection].module)]
        undo = [take_in(norm, projections[projection], upstream) for projection in names]
        identity = nn.Identity()
        replace(model, norm, identity)
        # Against the output before this fold, so that the roundings of many do not add up.
        latest, reason = agrees(run, latest, norm.weight.dtype)
        if reason is None:
            del norms[name]
            report.folded[name] = names
            report.untied += shared
        else:
            replace(model, identity, norm)
            for step in undo:
                step()
            report.not_folded[name] = reason
    report.error = distance(latest, reference)
    return report


def take_in(norm: TaperNorm, projection: Projection, upstream: bool) -> Callable[[], None]:
    """Fold the norm's linear part into a projection; returns what undoes it.

    The projection gets new parameters, so that a matrix that it shares with others (a tied head) stays theirs.
    """
    module = projection.module
    old, old_bias = module.weight, getattr(module, "bias", None)
    weight, bias = (absorb_upstream if upstream else absorb)(norm, projection.weight, old_bias)
    module.weight = _like(weight.T if projection.transposed else weight, old)
    if old_bias is not None or norm.bias is not None:
        module.bias = _like(bias, old)

    def undo() -> None:
        module.weight, module.bias = old, old_bias

    return undo


def absorb_upstream(norm: TaperNorm, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """diag(s) M W (out, in) and diag(s) M b + beta (out,): the norm folds into the rows of what it reads.

    s = c * gamma_t and beta (K,) repeat over the out / K heads; M centres within a head, for LayerNorm. float64, CPU.
    """

    def exact(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", torch.float64)

    def scaled(rows: Tensor) -> Tensor:  # (..., out): each head as the closed norm would put it out, without beta
        return (norm.center(rows.unflatten(-1, (-1, norm.dim))) * exact(norm.end_gain())).flatten(-2)

    shift = torch.zeros(len(weight), dtype=torch.float64) if bias is None else scaled(exact(bias))
    if norm.bias is not None:
        shift = shift + exact(norm.bias).repeat(len(weight) // norm.dim)
    return scaled(exact(weight).T).T, shift


def _like(value: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(value.to(parameter).contiguous(), requires_grad=parameter.requires_grad)


def is_shared(model: nn.Module, module: Any) -> bool:
    """Whether another module of the model holds the same matrix."""
    others = (other for other in model.modules() if other is not module)
    return any(parameter is module.weight for other in others for parameter in other._parameters.values())


def distance(output: Any, reference: Any) -> float:
    """||z' - z|| / ||z|| over all floating-point tensors of a model's output, in float64."""
    pairs = zip(tensors(output), tensors(reference), strict=True)
    floats = [(a.double(), b.double()) for a, b in pairs if b.is_floating_point()]
    if not floats:
        raise ValueError("the model's output holds no tensor to compare by: pass forward= that returns its logits")
    moved = sum((a - b).square().sum().item() for a, b in floats)
    size = sum(b.square().sum().item() for _, b in floats)
    return (moved / max(size, torch.finfo(torch.float64).tiny)) ** 0.5


def agrees(run: Callable[[], Any], reference: Any, dtype: torch.dtype) -> tuple[Any, str | None]:
    """The output of a run and None; or, if it fails or puts out something else, the reference and the reason."""
    try:
        output = run()
        error = distance(output, reference)
    except Exception as fault:  # the model may look at the norm that is no more: whatever it raises, it needs it
        return reference, f"without it the model fails: {type(fault).__name__}: {str(fault).splitlines()[0]}"
    tolerance = TOLERANCE.get(dtype, 5e-2)
    if error <= tolerance:  # what is not a number is not
        return output, None
    return reference, f"folded, the output of the model moves by {error:.2g} (relative), more than {tolerance:.0e}"
