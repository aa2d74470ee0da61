"""Tapering for any model: `convert` puts tapered layers in place of a model's norms and returns a handle on them.

    handle = tapernorm.convert(model)                # every norm but the final one; nothing changes yet, bit for bit
    optimizer.add_param_group({"params": handle.taper_parameters(), "weight_decay": 0.0})
    schedule = GateSchedule("cosine", k_warmup=1000, k_taper=5000)    # from tapernorm.method.gate
    for step, batch in enumerate(loader, 1):
        if step == schedule.k_warmup + 1:
            handle.calibrate(recent_batches)
        handle.set_gate(schedule.value(step))
        loss = model(**batch).loss
        if handle.target is not None:
            loss = loss + handle.scale_loss("mean_log")
        ...
    report = handle.fold()                           # the norms are gone, their gains are in the projections

See docs/convert.md.
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from tapernorm.config.options import AnchorConfig
from tapernorm.conversion.recognise import NormSpec, Projection, as_projection, is_per_head, recognise
from tapernorm.conversion.trace import Trace, tensors
from tapernorm.method.anchor import ScaleAnchor, token_scale
from tapernorm.method.calibration import PLAUSIBLE_C, Ema
from tapernorm.method.gate import Phase
from tapernorm.method.norms import TaperLN, TaperNorm
from tapernorm.model.fold import absorb

# How far folding may move a model's output, relative, before it counts as a disagreement: rounding, not algebra.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
LOW_PRECISION_TOLERANCE = 5e-2

Forward = Callable[[Any], Any]
ScaleLoss = Literal["fixed_target", "log_target", "mean_log"]
SCALE_LOSSES = get_args(ScaleLoss)
Fit = Literal["log", "inverse_mean", "least_squares"]
FITS = get_args(Fit)


# --------------------------------------------------------------------------------------------------------------- layers


class HeldNorm(TaperNorm):
    """A TaperNorm in the place of a norm of the user's, which computes by itself while the gate is 1.

    Shapes: h (..., D) -> (..., D), in the dtype that the original's output has. The original is kept outside the
    module tree and shares this layer's parameters and hooks, so that the model's parameters keep their names and
    identities; new are `taper_weight` (D,) and the buffers `c` and `gate`.
    """

    original: nn.Module

    def __init__(self, original: nn.Module, spec: NormSpec) -> None:
        super().__init__(spec.dim, spec.eps)
        parameters = original._parameters
        weight: Any = parameters["weight"]
        # One dictionary for both: whatever replaces a parameter of this layer later replaces the original's.
        self.__dict__["_parameters"] = parameters
        self.__dict__["original"] = original
        if "bias" in parameters:
            self.__dict__.pop("bias", None)
        else:
            self.__dict__["bias"] = None
        self.shift = spec.shift
        self.taper_weight = nn.Parameter(weight.detach() + spec.shift, requires_grad=False)
        self.c, self.gate, self.recorded = (b.to(weight.device) for b in (self.c, self.gate, self.recorded))
        self.trainable = weight.requires_grad
        self.padding = Padding()

    def forward(self, h: Tensor) -> Tensor:
        out = super().forward(h)
        if self.phase is Phase.NORMALIZED:
            return out
        return out.to(torch.promote_types(h.dtype, self.weight.dtype))

    def standard(self, h: Tensor) -> Tensor:
        return self.original.forward(h)

    def gain(self) -> Tensor:
        return self.weight + self.shift if self.shift else self.weight

    def set_gate(self, gate: float, phase: Phase) -> None:
        super().set_gate(gate, phase)
        if not self.trainable:  # a gain that the user has frozen stays frozen
            self.weight.requires_grad_(False)
            self.taper_weight.requires_grad_(False)

    def release(self) -> nn.Module:
        """The original, alone again."""
        del self._parameters["taper_weight"]
        return self.original

    def record(self, x: Tensor, inverse: Tensor) -> None:
        # At gate 1 calibrate looks; below it c follows what trains, and no evaluation.
        if self.phase is Phase.NORMALIZED or (self.training and torch.is_grad_enabled()):
            super().record(x, inverse)

    def per_token(self, x: Tensor, inverse: Tensor) -> list[Tensor]:
        pair, mask = super().per_token(x, inverse), self.padding.mask
        if mask is None:
            return pair
        real = over_tokens(mask, inverse)
        if real is None and self.phase is Phase.NORMALIZED:
            raise ValueError(misaligned(mask, inverse))
        # Not by index, so that it compiles and waits for no device. What is recomputed in backward may be of an earlier
        # batch than the mask: left out where it shows.
        return [values.new_zeros(()) if real is None else torch.where(real, values, 0.0) for values in pair]


class HeldLN(HeldNorm, TaperLN):
    """HeldNorm for a LayerNorm: centres, and has a beta if the original has one."""


class Padding:
    """A forward pre-hook that keeps the `attention_mask` (B, T) that the model is given: 0 where a token is padding."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        mask = padding_mask(kwargs)
        if mask is not None or module.training:  # calibrate may know a batch's mask that its model does not take
            self.mask = mask


def over_tokens(mask: Tensor, values: Tensor) -> Tensor | None:
    """The mask (B, T), bool, so that it broadcasts to values (B, T, ...) or (B * T); None where it fits neither."""
    if values.shape[:2] == mask.shape:
        return mask.bool().view(*mask.shape, *(1,) * (values.dim() - 2))
    return mask.bool().flatten() if values.shape == (mask.numel(),) else None


def misaligned(mask: Tensor, values: Tensor) -> str:
    return f"a mask {tuple(mask.shape)} does not line up with tokens {tuple(values.shape)}: use unpadded batches"


def real_tokens(values: Tensor, mask: Tensor | None) -> Tensor:
    """The values (B, T, ...) or (B * T) of the tokens at which mask (B, T) is not 0, in one dimension.

    Raises ValueError where the shapes do not line up.
    """
    if mask is None:
        return values.flatten()
    real = over_tokens(mask, values)
    if real is None:
        raise ValueError(misaligned(mask, values))
    return values[real.expand_as(values)]


def replace(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever `old` is below `root`, with its mode and its hooks (the same dictionaries, so that the handles
    of hooks go on working)."""
    new.training = old.training
    vars(new).update({name: value for name, value in vars(old).items() if "_hook" in name})
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


# -------------------------------------------------------------------------------------------------------------- running


def call(model: nn.Module, batch: Any) -> Any:
    """model(**batch) for a mapping, model(*batch) for a tuple or list, model(batch) otherwise."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def several(batches: Iterable[Any]) -> Iterable[Any]:
    if isinstance(batches, Mapping | Tensor):
        raise TypeError("batches is one batch: pass several, [batch] for example")
    return batches


def padding_mask(batch: Any) -> Tensor | None:
    """The batch's `attention_mask` if it is (B, T): 0 where a token is padding."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def over_processes(sums: Tensor) -> Tensor:
    """The sums over all processes of torch.distributed, in place."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(sums)
    return sums


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


class Capture:
    """A forward pre-hook that keeps the last input, with its graph. Copies of the model start without one."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.value = args[0]

    def __getstate__(self) -> dict[str, Any]:
        return {"value": None}


# -------------------------------------------------------------------------------------------------------------- folding


@dataclass
class FoldReport:
    """What folding did: the projections that took each norm in, the reasons of the others, the heads that were untied.

    `error` is ||z' - z|| / ||z|| over the outputs z on the example, in the model's precision.
    """

    folded: dict[str, list[str]] = field(default_factory=dict)
    not_folded: dict[str, str] = field(default_factory=dict)
    untied: list[str] = field(default_factory=list)
    error: float = 0.0


def absorb_upstream(norm: TaperNorm, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """diag(s) M W (out, in) and diag(s) M b + beta (out,): the norm folds into the rows of what it reads.

    s = c * gamma_t and beta (K,) repeat over the out / K heads; M centres within a head, for LayerNorm. float64, CPU.
    """

    def exact(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", torch.float64)

    rows = torch.cat([exact(weight), exact(bias)[:, None] if bias is not None else torch.zeros(len(weight), 1)], 1)
    heads = rows.unflatten(0, (-1, norm.dim))
    if isinstance(norm, TaperLN):
        heads = heads - heads.mean(1, keepdim=True)
    heads = heads * (exact(norm.c) * exact(norm.taper_weight))[:, None]
    if norm.bias is not None:
        heads[..., -1] += exact(norm.bias)
    rows = heads.flatten(0, 1)
    return rows[:, :-1], rows[:, -1]


def take_in(norm: TaperNorm, projection: Projection, upstream: bool) -> Callable[[], None]:
    """Fold the norm's linear part into a projection; returns what undoes it.

    The projection gets new parameters, so that a matrix that it shares with others (a tied head) stays theirs.
    """
    module = projection.module
    before = {"weight": module.weight, "bias": getattr(module, "bias", None)}
    weight, bias = (absorb_upstream if upstream else absorb)(norm, projection.weight, before["bias"])
    weight = weight.T if projection.transposed else weight
    module.weight = _like(weight, before["weight"])
    if before["bias"] is not None or norm.bias is not None:
        module.bias = _like(bias, before["weight"])

    def undo() -> None:
        for name, parameter in before.items():
            setattr(module, name, parameter)

    return undo


def _like(value: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(value.to(parameter).contiguous(), requires_grad=parameter.requires_grad)


def distance(output: Any, reference: Any) -> float:
    """||z' - z|| / ||z|| over all floating-point tensors of a model's output, in float64."""
    pairs = zip(tensors(output), tensors(reference), strict=True)
    pairs_of_floats = [(a.double(), b.double()) for a, b in pairs if b.is_floating_point()]
    if not pairs_of_floats:
        raise ValueError("the model's output holds no tensor to compare by: pass forward= that returns its logits")
    moved = sum((a - b).square().sum().item() for a, b in pairs_of_floats)
    size = sum(b.square().sum().item() for _, b in pairs_of_floats)
    return (moved / max(size, torch.finfo(torch.float64).tiny)) ** 0.5


def agrees(forward: Callable[[], Any], reference: Any, dtype: torch.dtype) -> tuple[Any, str | None]:
    """A model's output and None; or, if it fails or its output is not the reference, the reference and the reason."""
    try:
        output = forward()
        error = distance(output, reference)
    except Exception as fault:  # the model may look at the norm that is no more: whatever it raises, it needs it
        return reference, f"without it the model fails: {type(fault).__name__}: {str(fault).splitlines()[0]}"
    tolerance = TOLERANCE.get(dtype, LOW_PRECISION_TOLERANCE)
    if error <= tolerance:  # what is not a number is not
        return output, None
    return reference, f"folded, the output of the model moves by {error:.2g} (relative), more than {tolerance:.0e}"


# --------------------------------------------------------------------------------------------------------------- handle


class Tapering:
    """The tapered norms of a converted model: calibrate, close the gate, hold the scale, fold.

    norms: name -> tapered layer.  left_alone: name -> why that norm was not tapered.  final: the name of the norm in
    front of the head.  target: the scale s_tgt of the residual stream there, None before calibration.
    """

    def __init__(
        self, model: nn.Module, norms: dict[str, HeldNorm], left_alone: dict[str, str], final: str, spec: NormSpec
    ) -> None:
        self.model, self.norms, self.left_alone = model, norms, left_alone
        self.final, self.final_spec = final, spec
        self.gate = 1.0
        self.target: float | None = None
        self._average: Ema | None = None  # of ln c (L,), one per norm, if c is tracked
        self._captured, self._padding = Capture(), Padding()
        self._example: tuple[Any, Forward | None] | None = None
        model.get_submodule(final).register_forward_pre_hook(self._captured)
        model.register_forward_pre_hook(self._padding, with_kwargs=True)
        for norm in norms.values():
            norm.padding = self._padding

    def taper_parameters(self) -> list[nn.Parameter]:
        """gamma_t of every tapered norm: new parameters, for an optimizer that was made before; no weight decay."""
        return [norm.taper_weight for norm in self.norms.values()]

    def set_gate(self, gate: float) -> None:
        """Set the one gate g: 1 is the original norm, 0 the linear map, and what lies between the mixture.

        Call it once before every optimizer step, in every process: what the training forwards since the last call have
        read at an open gate enters the average that a tracked c follows.

        Raises ValueError for a gate outside 0 to 1, RuntimeError below 1 before calibration.
        """
        if not 0.0 <= gate <= 1.0:
            raise ValueError(f"gate {gate}: it must lie within 0 and 1")
        if gate < 1.0 and self.target is None:
            raise RuntimeError(f"gate {gate}: call calibrate before the gate leaves 1")
        if self._average is not None and 0.0 < self.gate < 1.0:
            self._follow(self._average)
        self.gate = gate
        phase = Phase.NORMALIZED if gate == 1.0 else Phase.TAPERED if gate == 0.0 else Phase.TAPERING
        for norm in self.norms.values():
            norm.set_gate(gate, phase)
            norm.recording = self._average is not None and phase is Phase.TAPERING

    def calibrate(
        self,
        batches: Iterable[Any],
        forward: Forward | None = None,
        *,
        fit: Fit = "log",
        tracked: bool = True,
        decay: float = 0.8,
    ) -> dict[str, float]:
        """Choose c per norm, gamma_t := gamma, and s_tgt, the level of the stream now; returns c by name.

        fit            c                                        s_tgt
        log            exp(-E[ln r])                            exp(E[ln s])    the mean of ln(c r) is 0
        inverse_mean   1 / E[r]                                 E[s]
        least_squares  E[||h*gamma||^2 / r] / E[||h*gamma||^2]  E[s]            the least ||h/r*gamma - c*h*gamma||^2

        over all tokens of the batches (for LayerNorm: of the centred h and sigma), s = s(h_L), float32, in eval mode
        without gradients. least_squares, the published fit, weighs a token by its power: one in 1,024 at 30 times the
        scale of the others, as GPT-2's first position is, halves c for these.

        With `tracked` (ours), c goes on to follow its statistic in training forwards for as long as 0 < gate < 1: the
        average of ln c over steps with this decay, of which the calibration is the first. It freezes when the gate
        closes. A step whose statistic is not finite, or of zeros, leaves it where it is. The final norm's c stays: the
        loss pulls at the scale there, and a c that gives way would have both run away.

        A batch goes to `forward` or, as a mapping to model(**batch), as a tuple to model(*batch), else to model(batch).
        An `attention_mask` (B, T) in it leaves its padding out, as one that the model is called with does in training.
        Under torch.distributed call it in every process; the expectations are over the tokens of all.

        Raises RuntimeError while the gate is not 1, ValueError for norms that no batch reaches or that read zeros or
        what is not finite, and for a final norm that is not the last one that runs. No c has changed then.
        """
        if self.gate != 1.0:
            raise RuntimeError(f"gate {self.gate:.4g}: calibrate while the gate is 1")
        if fit not in FITS:
            raise ValueError(f"calibrate: unknown fit {fit!r}, one of {', '.join(FITS)}")
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"calibrate: decay {decay}: it must lie within 0 and 1, and below 1")
        order: list[str] = []
        levels: list[Tensor] = []
        example = None
        with self._looking(), self._recording(fit):
            for batch in several(batches):
                example = example or (batch, forward)
                start = len(order)
                self._run(batch, forward, lambda name, h: order.append(name))
                self._check_final(order[start:])
                s = real_tokens(self.scale(self._input()), self._padding.mask)
                levels.append(torch.stack([(s.log() if fit == "log" else s).sum(), torch.ones_like(s).sum()]))
            if not levels:
                raise ValueError("calibrate: there is no batch")
            if unreached := self.norms.keys() - order:
                raise ValueError(
                    f"no batch reaches the norm {min(unreached)}: leave it out of norms, or calibrate on other batches"
                )
            c = self._take()
            total, count = over_processes(torch.stack(levels).sum(0))
        target = ((total / count).exp() if fit == "log" else total / count).item()
        chosen = dict(zip(self.norms, c.tolist(), strict=True))
        usable = dict(zip(self.norms, self._usable(c).tolist(), strict=True))
        usable.setdefault(self.final, math.isfinite(target) and target > 1.01 * self.final_spec.eps**0.5)
        for name in dict.fromkeys(order):  # in the order in which they run: the first one is where it begins
            if not usable[name]:
                raise ValueError(f"calibrate: what the norm {name} reads is zero or not finite: the gate stays 1")
        for name, norm in self.norms.items():
            norm.calibrate(chosen[name])
        self.target, self._example, self._average = target, example, None
        if tracked:
            self._average = Ema(decay)
            self._average.update(c.log())
        odd = [f"{name} {c:.3g}" for name, c in chosen.items() if not PLAUSIBLE_C[0] <= c <= PLAUSIBLE_C[1]]
        if odd:
            warnings.warn(f"c outside {PLAUSIBLE_C[0]} to {PLAUSIBLE_C[1]}: {', '.join(odd)}", stacklevel=2)
        return chosen

    def mismatches(self, batches: Iterable[Any], forward: Forward | None = None) -> dict[str, float]:
        """mean_tokens ln(c r) by norm, in eval mode at the gate of now: 0 is calibrated, 1 an output e times too large.

        Batches and padding as in `calibrate`; of this process alone.
        """
        found: dict[str, list[Tensor]] = {}

        def note(name: str, h: Tensor) -> None:
            if norm := self.norms.get(name):
                r = 1.0 / norm.inverse_scale(norm.center(h.float())).squeeze(-1)
                found.setdefault(name, []).append(real_tokens((norm.c * r).log(), self._padding.mask))

        with self._looking():
            for batch in several(batches):
                self._run(batch, forward, note)
        return {name: torch.cat(values).mean().item() for name, values in found.items()}

    def scale(self, h: Tensor) -> Tensor:
        """s(h) per token, (..., D) -> (...), float32: what the anchor holds; see anchor.token_scale."""
        return token_scale(h, self.final_spec.family, self.final_spec.eps)

    def scale_loss(self, kind: ScaleLoss = "fixed_target", weight: float = 1.0, mask: Tensor | None = None) -> Tensor:
        """The anchor's loss of the forward just run, a scalar with gradient, to be added to the model's own.

        fixed_target  weight * mean_tokens (s / s_tgt - 1)^2      log_target  weight * mean_tokens (ln s - ln s_tgt)^2
        mean_log      weight * (mean_tokens ln s - ln s_tgt)^2

        s = s(h_L) of what entered the final norm. `mask` (B, T) leaves padding out. It needs the graph of that input:
        no final norm inside a segment with gradient checkpointing (transformers checkpoints blocks, which will do).

        Raises RuntimeError before calibration, before a forward and after one without gradients, ValueError for an
        unknown kind.
        """
        if self.target is None:
            raise RuntimeError("scale_loss: call calibrate first, which freezes the scale target")
        if kind not in SCALE_LOSSES:
            raise ValueError(f"scale_loss: unknown kind {kind!r}, one of {', '.join(SCALE_LOSSES)}")
        h = self._input()
        if torch.is_grad_enabled() and not h.requires_grad:
            raise RuntimeError("scale_loss: the last forward ran without gradients")
        anchor = ScaleAnchor(
            AnchorConfig(kind=kind, weight=weight), family=self.final_spec.family, eps=self.final_spec.eps
        )
        anchor.set_target(self.target)
        return anchor.loss(real_tokens(anchor.scale(h), mask))

    def fold(self, example: Any = None, forward: Forward | None = None) -> FoldReport:
        """Fold every tapered norm into the projections that read it, exactly, and replace it by nn.Identity.

        RMSNorm: W' = W diag(c * gamma_t).  LayerNorm: W' = W diag(c * gamma_t) M, b' = b + W beta, M = I - 11^T/D. A
        norm whose output goes elsewhere but whose input is one projection's output alone, as those of queries and
        keys, goes into the rows of that projection.

        The readers are found by running the model on `example` (default: the first batch of the calibration, then
        through its `forward`), and every norm is checked by another such run: where the output moves by more than
        rounding the norm stays as it was. So the example costs a forward per norm: a small one will do.

        Raises RuntimeError while a gate is open and where there is no example.
        """
        self._refuse_open_gate()
        if example is None:
            if self._example is None:
                raise RuntimeError("fold: pass an example batch; this handle has calibrated on none")
            example, forward = self._example[0], forward or self._example[1]
        run = forward or (lambda batch: call(self.model, batch))
        modules = {name: as_projection(module) for name, module in self.model.named_modules()}
        projections = {name: projection for name, projection in modules.items() if projection is not None}
        report = FoldReport()
        self._average = None
        with self._looking():
            trace = Trace(self.norms, projections)
            latest = reference = trace.run(lambda: run(example))
            for name, norm in list(self.norms.items()):
                plan = trace.plan(name, norm.dim)
                if isinstance(plan, str):
                    report.not_folded[name] = plan
                    continue
                chosen = {projection: projections[projection] for projection in plan.projections}
                shared = [projection for projection, item in chosen.items() if self._is_shared(item.module)]
                undo = self._take_out(norm, chosen.values(), plan.upstream)
                # Against the output before this fold, so that the roundings of many do not add up.
                latest, reason = agrees(lambda: run(example), latest, norm.weight.dtype)
                if reason is None:
                    del self.norms[name]
                    report.folded[name] = plan.projections
                    report.untied += shared
                else:
                    undo()
                    report.not_folded[name] = reason
            report.error = distance(latest, reference)
        config: Any = getattr(self.model, "config", None)
        if report.untied and getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False  # transformers would tie it again
        return report

    def restore(self) -> None:
        """Put the original norms back, with the parameters of now. Raises RuntimeError unless the gate is 1."""
        if self.gate != 1.0:
            raise RuntimeError(f"gate {self.gate:.4g}: the original norms can come back only while the gate is 1")
        for norm in self.norms.values():
            replace(self.model, norm, norm.release())
        self.norms = {}

    def state_dict(self) -> dict[str, Any]:
        """What the model's state_dict does not hold: the gate, s_tgt and the memory of a tracked c. Plain types."""
        tracked = None
        if self._average is not None:
            norms = self.norms.items()
            tracked = {
                **self._average.state_dict(),
                "decay": self._average.decay,
                "fit": {name: norm.fit for name, norm in norms},
                "recorded": {name: norm.recorded.clone() for name, norm in norms},
            }
        return {"gate": self.gate, "target": self.target, "tracked": tracked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`, beside the model's own."""
        self.gate, self.target, self._average = 1.0, state["target"], None
        if tracked := state.get("tracked"):
            self._average = Ema(tracked["decay"])
            self._average.load_state_dict(tracked, next(iter(self.norms.values())).c.device)
            for name, norm in self.norms.items():
                norm.fit = tracked["fit"][name]
                norm.recorded.copy_(tracked["recorded"][name])
        self.set_gate(state["gate"])

    # What the above are made of.

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Eval mode without gradients, of which no trace is left for training."""
        try:
            with evaluating(self.model):
                yield
        finally:
            self._captured.value = self._padding.mask = None

    @contextmanager
    def _recording(self, fit: Fit) -> Iterator[None]:
        for norm in self.norms.values():
            norm.fit, norm.recording = fit, True
        try:
            yield
        finally:
            for norm in self.norms.values():
                norm.recording = False
                norm.recorded.zero_()

    def _take(self) -> Tensor:
        """(L,) c of every norm, of what was recorded since the last call, in all processes."""
        norms = list(self.norms.values())
        sums = torch.stack([norm.take_statistics().to(norms[0].c.device) for norm in norms], 1)
        return norms[0].fitted(over_processes(sums))

    def _usable(self, c: Tensor) -> Tensor:
        """(L,) whether c is one: finite, positive, and not 1/sqrt(eps), which zeros give."""
        eps = c.new_tensor([norm.eps for norm in self.norms.values()])
        return c.isfinite() & (c > 0) & (c * eps.sqrt() < 0.99)

    def _follow(self, average: Ema) -> None:
        """Take what training forwards recorded into the average of ln c, and let every c follow it."""
        c = self._take().to(average.mean.device)
        average.update(torch.where(self._usable(c), c.log(), average.mean))
        for (name, norm), value in zip(self.norms.items(), average.mean.exp(), strict=True):
            if name != self.final:
                norm.c.copy_(value)

    def _input(self) -> Tensor:
        if self._captured.value is None:
            raise RuntimeError(f"no forward has reached the final norm {self.final} yet")
        return self._captured.value

    def _run(self, batch: Any, forward: Forward | None, note: Callable[[str, Tensor], None]) -> None:
        """Run the model; note(name, h) is told what enters each norm, the final one too, in the order of running."""
        self._padding.mask = padding_mask(batch)
        with ExitStack() as stack:
            for name in dict.fromkeys([*self.norms, self.final]):
                hook = partial(lambda name, module, args: note(name, args[0]), name)
                stack.callback(self.model.get_submodule(name).register_forward_pre_hook(hook).remove)
            forward(batch) if forward is not None else call(self.model, batch)

    def _check_final(self, order: Sequence[str]) -> None:
        if not order or order[-1] != self.final:
            last = order[-1] if order else "none"
            raise ValueError(f"the last norm that runs is {last}, not {self.final}: convert with final_norm={last!r}")

    def _refuse_open_gate(self) -> None:
        for name, norm in self.norms.items():
            if norm.phase is not Phase.TAPERED:
                raise RuntimeError(f"norm {name} has an open gate ({norm.gate.item():.4g}): set it to 0 before folding")

    def _take_out(self, norm: HeldNorm, projections: Iterable[Projection], upstream: bool) -> Callable[[], None]:
        """Fold a norm into its projections and put nn.Identity in its place; returns what undoes it."""
        identity = nn.Identity()
        steps = [take_in(norm, projection, upstream) for projection in projections]
        replace(self.model, norm, identity)

        def undo() -> None:
            replace(self.model, identity, norm)
            for step in steps:
                step()

        return undo

    def _is_shared(self, module: Any) -> bool:
        """Whether another module holds the same matrix."""
        others = (other for other in self.model.modules() if other is not module)
        return any(parameter is module.weight for other in others for parameter in other._parameters.values())


# -------------------------------------------------------------------------------------------------------------- convert


def convert(
    module: nn.Module,
    norms: str | Sequence[str] | Callable[[str, nn.Module], bool] = "all",
    *,
    final: bool = False,
    final_norm: str | None = None,
) -> Tapering:
    """Put a tapered layer in the place of a model's norms and return the handle on them; at gate 1 nothing changes.

    norms       "all" (but the per-head norms of queries and keys), one fnmatch pattern over the full names or a list of
                them ("*" also matches dots: "model.layers.[0-3].*", "*.q_norm"), or a predicate (name, module) -> bool.
    final       whether the norm in front of the head is tapered too. Kept, it is the implicit anchor.
    final_norm  its name; default: of the norms that lie in the fewest numbered blocks (per-head norms apart), the last
                one in the module tree. `calibrate` checks it: it must be the last one that runs.

    nn.LayerNorm, nn.RMSNorm and every module that computes one of them are norms, see `recognise`. The parameters
    stay the same objects under the same names; convert before torch.compile, DDP and FSDP, and after `.to(dtype)`.

    Raises ValueError, one line: no norm to taper, a pattern, a predicate or a final_norm that none answers to.
    """
    found = {name: _recognise(part) for name, part in module.named_modules() if name}
    specs = {name: spec for name, spec in found.items() if isinstance(spec, NormSpec)}
    left_alone = {name: reason for name, reason in found.items() if isinstance(reason, str)}
    if not specs:
        reasons = "".join(f"; {name}: {reason}" for name, reason in list(left_alone.items())[:1])
        raise ValueError(f"no norm to taper in {type(module).__name__}{reasons}")
    last = _final_norm(specs, final_norm)
    chosen = _select(module, specs, norms) - {last} | ({last} if final else set())
    if not chosen:
        raise ValueError(f"no norm to taper in {type(module).__name__}: {last} is the final one; pass final=True")
    not_chosen = "it norms single heads; name it in norms" if norms == "all" else "norms does not select it"
    left_alone |= {name: not_chosen for name in specs if name not in chosen}
    if not final:
        left_alone[last] = "it is the final norm, kept as the anchor (final=False)"
    held = {}
    for name in (name for name in specs if name in chosen):
        original = module.get_submodule(name)
        held[name] = (HeldLN if specs[name].family == "layer" else HeldNorm)(original, specs[name])
        replace(module, original, held[name])
    return Tapering(module, held, left_alone, last, specs[last])


def _recognise(module: nn.Module) -> NormSpec | str | None:
    return "it is a tapered norm already" if isinstance(module, TaperNorm) else recognise(module)


def _final_norm(specs: Mapping[str, NormSpec], named: str | None) -> str:
    if named is None:
        candidates = [name for name in specs if not is_per_head(name)] or list(specs)
        # Blocks are numbered, and what follows them is not: 'model.norm' after 'model.layers.3.input_layernorm'.
        return min(reversed(candidates), key=lambda name: sum(part.isdigit() for part in name.split(".")))
    if named not in specs:
        raise ValueError(f"final_norm {named!r} is no norm of the model{_nearest(named, specs)}")
    return named


def _select(module: nn.Module, specs: Mapping[str, NormSpec], norms: Any) -> set[str]:
    if norms == "all":
        return {name for name in specs if not is_per_head(name)}
    if callable(norms):
        chosen = {name for name in specs if norms(name, module.get_submodule(name))}
        if not chosen:
            raise ValueError(
                f"norms: the predicate selects none of the {len(specs)} norms, such as {next(iter(specs))}"
            )
        return chosen
    patterns = [norms] if isinstance(norms, str) else list(norms)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in specs):
            raise ValueError(f"norms: {pattern!r} matches no norm{_nearest(pattern, specs)}")
    return {name for name in specs if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _nearest(name: str, names: Iterable[str]) -> str:
    return "; nearest: " + ", ".join(difflib.get_close_matches(name, list(names), n=3, cutoff=0.0))
