"""The handle on a converted model's tapered norms: calibrate, close the gate, hold the scale, fold: docs/convert.md."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from tapernorm.config.options import AnchorConfig
from tapernorm.conversion.fold import FoldReport, fold_norms
from tapernorm.conversion.layers import HeldLN, HeldNorm, Seen, padding_mask, real_tokens, replace
from tapernorm.conversion.recognise import NormSpec
from tapernorm.method.anchor import ScaleAnchor, token_scale
from tapernorm.method.calibration import Ema, implausible
from tapernorm.method.gate import Phase
from tapernorm.method.norms import widened

Forward = Callable[[Any], Any] | None  # None: the model is called with the batch, see Tapering._run
ScaleLoss = Literal["fixed_target", "log_target", "mean_log"]
SCALE_LOSSES = get_args(ScaleLoss)
Fit = Literal["log", "inverse_mean", "least_squares"]
FITS = get_args(Fit)


class Tapering:
    """The tapered norms of a converted model: calibrate, close the gate, hold the scale, fold.

    norms: name -> tapered layer.  left_alone: name -> why that norm was not tapered.  final: the name of the norm in
    front of the head.  target: the scale s_tgt of the residual stream there, None before calibration.
    """

    def __init__(
        self, model: nn.Module, specs: Mapping[str, NormSpec], left_alone: dict[str, str], final: str, spec: NormSpec
    ) -> None:
        """Replaces the norms of `specs`; `spec` is the final norm's, tapered or not."""
        self.model, self.left_alone = model, left_alone
        self.final, self.final_spec = final, spec
        self.gate = 1.0
        self.target: float | None = None
        self._average: Ema | None = None  # of ln c (L,), one per norm, if c is tracked
        self._example: tuple[Any, Forward] | None = None
        self._seen = Seen()
        self.norms: dict[str, HeldNorm] = {}
        for name, found in specs.items():
            original = model.get_submodule(name)
            self.norms[name] = (HeldLN if found.family == "layer" else HeldNorm)(original, found, self._seen)
            replace(model, original, self.norms[name])
        model.get_submodule(final).register_forward_pre_hook(self._seen.note_stream)
        model.register_forward_pre_hook(self._seen.note_mask, with_kwargs=True)

    def taper_parameters(self) -> list[nn.Parameter]:
        """gamma_t of every tapered norm: new parameters, for an optimizer that was made before; no weight decay."""
        return [norm.taper_weight for norm in self.norms.values()]

    def set_gate(self, gate: float) -> None:
        """Set the one gate g: 1 is the original norm, 0 the linear map, and what lies between the mixture.

        Call it once before every optimizer step, in every process: a tracked c then takes in what the training
        forwards since the last call have read.

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
        forward: Forward = None,
        *,
        fit: Fit = "log",
        tracked: bool = True,
        decay: float = 0.8,
    ) -> dict[str, float]:
        """Choose c per norm, gamma_t := gamma, and s_tgt, the level of the stream now; returns c by name.

        fit            c                                        s_tgt
        log            exp(-E[ln r])                            exp(E[ln s])
        inverse_mean   1 / E[r]                                 E[s]
        least_squares  E[||h*gamma||^2 / r] / E[||h*gamma||^2]  E[s]            as published

        over all tokens of the batches, s = s(h_L); float32, in eval mode without gradients.

        With `tracked` (ours), c goes on to follow its statistic in training forwards for as long as 0 < gate < 1: the
        average of ln c over steps with this decay, of which the calibration is the first. A step whose statistic is
        not finite, or of zeros, leaves it where it is. The final norm's c stays, as in Calibration.

        An `attention_mask` (B, T) in a batch leaves its padding out, as one that the model is called with does in
        training. Under torch.distributed call it in every process; the expectations are over the tokens of all.

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
        sums = {name: norm.c.new_zeros(2) for name, norm in self.norms.items()}
        example = None

        def note(name: str, h: Tensor) -> None:
            order.append(name)
            if norm := self.norms.get(name):
                sums[name] += norm.statistics(h)

        for norm in self.norms.values():
            norm.fit = fit
        with self._looking(note):
            for batch in several(batches):
                example = example or (batch, forward)
                start = len(order)
                self._run(batch, forward)
                if (last := ["none", *order[start:]][-1]) != self.final:
                    mend = f"convert with final_norm={last!r}"
                    raise ValueError(f"the last norm that runs is {last}, not {self.final}: {mend}")
                s = real_tokens(self.scale(self._stream()), self._seen.mask)
                levels.append(torch.stack([(s.log() if fit == "log" else s).sum(), torch.ones_like(s).sum()]))
            if not levels:
                raise ValueError("calibrate: there is no batch")
            if unreached := self.norms.keys() - order:
                mend = "leave it out of norms, or calibrate on other batches"
                raise ValueError(f"no batch reaches the norm {min(unreached)}: {mend}")
            c = self._fitted(sums.values())
            total, count = over_processes(torch.stack(levels).sum(0))
        target = ((total / count).exp() if fit == "log" else total / count).item()
        chosen = dict(zip(self.norms, c.tolist(), strict=True))
        final_reads = math.isfinite(target) and target > 1.01 * self.final_spec.eps**0.5
        usable = {self.final: final_reads} | {name: not math.isnan(value) for name, value in chosen.items()}
        for name in order:  # the first one that runs is where it begins
            if not usable[name]:
                raise ValueError(f"calibrate: what the norm {name} reads is zero or not finite: the gate stays 1")
        for name, norm in self.norms.items():
            norm.calibrate(chosen[name])
        self.target, self._example, self._average = target, example, None
        if tracked:
            self._average = Ema(decay)
            self._average.update(c.log())
        if odd := implausible(chosen):
            warnings.warn(odd, stacklevel=2)
        return chosen

    def mismatches(self, batches: Iterable[Any], forward: Forward = None) -> dict[str, float]:
        """mean_tokens ln(c r) by norm, in eval mode at the gate of now: 0 is calibrated, 1 an output e times too large.

        Batches and padding as in `calibrate`; of this process alone.
        """
        found: dict[str, list[Tensor]] = {}

        def note(name: str, h: Tensor) -> None:
            if norm := self.norms.get(name):
                inverse = norm.inverse_scale(norm.center(widened(h))).squeeze(-1)
                found.setdefault(name, []).append(real_tokens((norm.c / inverse).log(), self._seen.mask))

        with self._looking(note):
            for batch in several(batches):
                self._run(batch, forward)
        return {name: torch.cat(values).mean().item() for name, values in found.items()}

    def scale(self, h: Tensor) -> Tensor:
        """s(h) per token, (..., D) -> (...), float32: what the anchor holds; see anchor.token_scale."""
        return token_scale(h, self.final_spec.family, self.final_spec.eps)

    def scale_loss(self, kind: ScaleLoss = "fixed_target", weight: float = 1.0, mask: Tensor | None = None) -> Tensor:
        """The anchor's loss of the forward just run, a scalar with gradient, to be added to the model's own.

        fixed_target  weight * mean_tokens (s / s_tgt - 1)^2      log_target  weight * mean_tokens (ln s - ln s_tgt)^2
        mean_log      weight * (mean_tokens ln s - ln s_tgt)^2

        s = s(h_L) of what entered the final norm, which must not lie inside a segment with gradient checkpointing.
        `mask` (B, T) leaves padding out.

        Raises RuntimeError before calibration, before a forward and after one without gradients, ValueError for an
        unknown kind.
        """
        if self.target is None:
            raise RuntimeError("scale_loss: call calibrate first, which freezes the scale target")
        if kind not in SCALE_LOSSES:
            raise ValueError(f"scale_loss: unknown kind {kind!r}, one of {', '.join(SCALE_LOSSES)}")
        h = self._stream()
        if torch.is_grad_enabled() and not h.requires_grad:
            raise RuntimeError("scale_loss: the last forward ran without gradients")
        config = AnchorConfig(kind=kind, weight=weight)
        anchor = ScaleAnchor(config, family=self.final_spec.family, eps=self.final_spec.eps)
        anchor.set_target(self.target)
        return anchor.loss(real_tokens(anchor.scale(h), mask))

    def fold(self, example: Any = None, forward: Forward = None) -> FoldReport:
        """Fold every tapered norm into the projections that read it, exactly, and replace it by nn.Identity.

        W' = W diag(c * gamma_t), and for LayerNorm W' = W diag(c * gamma_t) M, b' = b + W beta, M = I - 11^T/D. A norm
        that is read by others, but reads one projection alone, as those of queries and keys, goes into its rows.

        The model runs on `example` (default: the first batch of the calibration, through its `forward`) to find the
        readers and once more per norm, which stays as it was where the output moves by more than rounding.

        Raises RuntimeError while a gate is open and where there is no example.
        """
        for name, norm in self.norms.items():
            if norm.phase is not Phase.TAPERED:
                raise RuntimeError(f"norm {name} has an open gate ({norm.gate.item():.4g}): set it to 0 before folding")
        if example is None:
            if self._example is None:
                raise RuntimeError("fold: pass an example batch; this handle has calibrated on none")
            example, forward = self._example[0], forward or self._example[1]
        self._average = None
        with self._looking():
            report = fold_norms(self.model, self.norms, lambda: self._run(example, forward))
        config: Any = getattr(self.model, "config", None)
        if report.untied and getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False  # transformers would tie it again
        for module in self.model.modules() if report.folded else ():
            if hasattr(module, "save_pretrained"):
                vars(module)["save_pretrained"] = not_as_pretrained
        return report

    def restore(self) -> None:
        """Put the original norms back, with the parameters of now. Raises RuntimeError unless the gate is 1."""
        if self.gate != 1.0:
            raise RuntimeError(f"gate {self.gate:.4g}: the original norms can come back only while the gate is 1")
        for norm in self.norms.values():
            replace(self.model, norm, norm.release())
        self.norms, self._average = {}, None

    def state_dict(self) -> dict[str, Any]:
        """What the model's state_dict does not hold: the gate, s_tgt and the memory of a tracked c. Plain types."""
        tracked = None
        if self._average is not None:
            tracked = {
                **self._average.state_dict(),
                "decay": self._average.decay,
                "fit": {name: norm.fit for name, norm in self.norms.items()},
                "recorded": {name: norm.recorded.clone() for name, norm in self.norms.items()},
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
    def _looking(self, note: Callable[[str, Tensor], None] = lambda name, h: None) -> Iterator[None]:
        """Eval mode without gradients, of which no trace is left for training.

        note(name, h) is told what enters each norm, the final one too, in the order of running.
        """
        training = [module for module in self.model.modules() if module.training]
        with ExitStack() as stack, torch.no_grad():
            for name in dict.fromkeys([*self.norms, self.final]):
                hook = partial(lambda name, module, args: note(name, args[0]), name)
                stack.callback(self.model.get_submodule(name).register_forward_pre_hook(hook).remove)
            self.model.eval()
            try:
                yield
            finally:
                for module in training:
                    module.training = True
                self._seen.stream = self._seen.mask = None

    def _run(self, batch: Any, forward: Forward) -> Any:
        """forward(batch), else model(**batch) for a mapping, model(*batch) for a tuple or list, model(batch)."""
        self._seen.mask = padding_mask(batch)
        if forward is not None:
            return forward(batch)
        if isinstance(batch, Mapping):
            return self.model(**batch)
        return self.model(*batch) if isinstance(batch, tuple | list) else self.model(batch)

    def _fitted(self, statistics: Iterable[Tensor]) -> Tensor:
        """(L,) c of every norm by its statistics (2,), summed over all processes.

        NaN where it is none: not finite, not positive, or 1/sqrt(eps), which zeros give.
        """
        norms = list(self.norms.values())
        sums = torch.stack([pair.to(norms[0].c.device) for pair in statistics], 1)
        c = norms[0].fitted(over_processes(sums))
        eps = c.new_tensor([norm.eps for norm in norms])
        return torch.where(c.isfinite() & (c > 0) & (c * eps.sqrt() < 0.99), c, math.nan)

    def _follow(self, average: Ema) -> None:
        """Take what training forwards recorded into the average of ln c, and let every c follow it."""
        c = self._fitted([norm.take_statistics() for norm in self.norms.values()]).to(average.mean.device)
        average.update(torch.where(c.isnan(), average.mean, c.log()))
        for (name, norm), value in zip(self.norms.items(), average.mean.exp(), strict=True):
            if name != self.final:
                norm.c.copy_(value)

    def _stream(self) -> Tensor:
        if self._seen.stream is None:
            raise RuntimeError(f"no forward has reached the final norm {self.final} yet")
        return self._seen.stream


def not_as_pretrained(*given: Any, **keys: Any) -> None:
    """In the place of a folded model's save_pretrained, after which from_pretrained would build new norms."""
    raise RuntimeError(
        "save_pretrained: from_pretrained would put new norms into a folded model; use torch.save(model)"
    )


def several(batches: Iterable[Any]) -> Iterable[Any]:
    if isinstance(batches, Mapping | Tensor):
        raise TypeError("batches is one batch: pass several, [batch] for example")
    return batches


def over_processes(sums: Tensor) -> Tensor:
    """The sums over all processes of torch.distributed, in place."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(sums)
    return sums
