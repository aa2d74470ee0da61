"""The statistics window at the end of the warmup: the per-layer scalars c and the scale target s_tgt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tapernorm import dist
from tapernorm.config import CalibrationConfig
from tapernorm.norms import FakeNorm, GatedNorm, TaperNorm

PLAUSIBLE_C = (0.02, 50.0)
SHORT_WINDOW = 30


class Ema:
    """Bias-corrected exponential moving average: mean = sum_t w_t x_t / sum_t w_t,  w_t = (1-decay) decay^(T-t).

    float32, on the device of what it is fed, so that updating it never waits for the device.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.value: Tensor | None = None
        self.weight = 0.0

    def update(self, x: Tensor) -> None:
        x = x.detach().float()
        self.value = (1 - self.decay) * x if self.value is None else self.decay * self.value + (1 - self.decay) * x
        self.weight = self.decay * self.weight + (1 - self.decay)

    @property
    def mean(self) -> Tensor:
        if self.value is None:
            raise RuntimeError("the average has seen no step")
        return self.value / self.weight

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "weight": self.weight}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.value = None if state["value"] is None else state["value"].to(device)
        self.weight = state["weight"]


class Calibration:
    """Chooses c per gated layer: at step k_warmup for TaperNorm, at each of its turns for FakeNorm.

    c minimises E||h/r * gamma - c * h * gamma||^2 in a tapered layer, so c = E[||h*gamma||^2 / r] / E[||h*gamma||^2];
    it is 1 / E[r] in a FakeNorm. Both expectations are averages over the steps of a window that ends at k_warmup and,
    for FakeNorm, goes on to its last turn ('ema'), or of the last step alone ('one_batch'). 'none' keeps c = 1. Only
    training forwards of these steps are recorded, so the rest of the warmup costs what the baseline costs.
    """

    def __init__(
        self, config: CalibrationConfig, k_warmup: int, norms: Mapping[str, GatedNorm], k_last: int | None = None
    ) -> None:
        """`k_last`: the last step that a FakeNorm may need; None: k_warmup."""
        if config.window is None:
            raise ValueError("calibration.window is resolved by tapernorm.config.resolve")
        self.kind = config.kind
        self.k_warmup = k_warmup
        self.window = 1 if config.kind == "one_batch" else config.window
        self.norms = dict(norms) if config.kind != "none" else {}
        self.tapers = {site: norm for site, norm in norms.items() if isinstance(norm, TaperNorm)}
        self.fakes = {site: norm for site, norm in norms.items() if isinstance(norm, FakeNorm)}
        self.k_last = k_warmup if k_last is None or not self.fakes else k_last
        decay = 0.0 if config.kind == "one_batch" else config.decay
        self.averages = {site: Ema(decay) for site in self.norms}

    def records(self, step: int) -> bool:
        """Whether this step's forwards are to be recorded, and for that not compiled.

        A FakeNorm's removals change the graph, so their steps count also where nothing is recorded (calibration=none).
        """
        return bool(self.norms or self.fakes) and self.k_warmup - self.window < step <= self.k_last

    @contextmanager
    def recording(self, step: int) -> Iterator[bool]:
        """Around the training forwards of a step; yields whether they are recorded and folds them into the averages.

        Every process records its own rows, as many as any other; the averages are over all of them.

        Nothing outside this context is ever recorded, so validation and probe forwards cannot enter.
        """
        on = self.records(step)
        for norm in self.norms.values():
            norm.recording = on
        try:
            yield on
        finally:
            for norm in self.norms.values():
                norm.recording = False
        if on:
            open_norms = {
                site: norm.take_statistics()
                for site, norm in self.norms.items()
                if not (isinstance(norm, FakeNorm) and norm.removed == len(norm.turns))
            }
            dist.average(open_norms.values())
            for site, statistics in open_norms.items():
                self.averages[site].update(statistics)

    def freeze(self, gate: float) -> list[str]:
        """Before the gate falls to a value: c of every FakeNorm whose turn this is, on the device; names what goes."""
        going = []
        for site, norm in self.fakes.items():
            parts = [f"{site} ({part})" for part in ("Q, K", "V")] if len(norm.turns) == 2 else [site]
            parts = parts[norm.removed : norm.turns_taken(gate)]
            if parts and site in self.averages:
                numerator, denominator = self.averages[site].mean
                norm.calibrate(numerator / denominator)
            going += parts
        return going

    def finish(self, say: Callable[[str], None]) -> dict[str, float]:
        """Set c and gamma_t := gamma in every TaperNorm; returns c by site and says what is doubtful."""
        chosen = {}
        for site, norm in self.tapers.items():
            c = 1.0
            if site in self.averages:
                numerator, denominator = self.averages[site].mean.tolist()
                c = numerator / denominator
            norm.calibrate(c)
            chosen[site] = c
        odd = {site: c for site, c in chosen.items() if not PLAUSIBLE_C[0] <= c <= PLAUSIBLE_C[1]}
        if odd:
            listed = ", ".join(f"{site} {c:.3g}" for site, c in odd.items())
            say(f"warning: c outside {PLAUSIBLE_C[0]} to {PLAUSIBLE_C[1]} ({listed}); a longer gate.k_warmup may help")
        if self.kind == "ema" and chosen and self.window < SHORT_WINDOW:
            say(
                f"warning: c rests on a window of {self.window} steps, fewer than {SHORT_WINDOW}; "
                "raise gate.k_warmup or calibration.window"
            )
        return chosen

    def state_dict(self) -> dict[str, Any]:
        return {site: average.state_dict() for site, average in self.averages.items()}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        for site, average in self.averages.items():
            average.load_state_dict(state[site], device)


def describe(chosen: Mapping[str, float]) -> list[str]:
    """Lines for people: every c, block by block."""
    by_block: dict[str, list[str]] = {}
    for site, c in chosen.items():
        block, _, kind = site.rpartition(".")
        by_block.setdefault(block, []).append(f"{kind} {c:.4g}")
    return [f"  c, {f'block {block}' if block else 'final norm'}: " + ", ".join(by_block[block]) for block in by_block]
