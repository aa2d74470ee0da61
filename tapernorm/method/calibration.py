"""The per-layer scalars c: what they are fitted to, and when they are set."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tapernorm.config.options import CalibrationConfig
from tapernorm.method.norms import FakeNorm, GatedNorm, TaperNorm, widened
from tapernorm.runtime import dist

log = logging.getLogger(__name__)

PLAUSIBLE_C = (0.02, 50.0)
SHORT_WINDOW = 30
DOUBTFUL_MISMATCH = 0.3  # e-folds


class Ema:
    """Bias-corrected exponential moving average: mean = sum_t w_t x_t / sum_t w_t,  w_t = (1-decay) decay^(T-t).

    At least float32, on the device of what it is fed, so that updating it never waits for the device.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.value: Tensor | None = None
        self.weight = 0.0

    def update(self, x: Tensor) -> None:
        x = widened(x.detach())
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
    """Chooses c per gated layer, of statistics of training forwards (see GatedNorm.fit).

    tracked    TaperNorm: at step k_warmup of its batch, read by the weights that this step leaves (`measuring`); then c
               follows an average over steps with a short memory for as long as the gate is open, and is frozen with it;
               but in the final norm, where the loss pulls at the scale: a c that follows gives way, and both run away
    ema        averages over the steps of a window that ends at k_warmup, where c is frozen
    one_batch  the same of step k_warmup alone
    none       c = 1

    c of a FakeNorm is frozen at each of its turns, of an average over a window before k_warmup and on to the last turn.
    Only training forwards are recorded, and none in the rest of the warmup, which costs what the baseline's costs.
    """

    def __init__(
        self, config: CalibrationConfig, k_warmup: int, norms: Mapping[str, GatedNorm], k_last: int | None = None
    ) -> None:
        """`config`: resolved. `k_last`: the last step with an open gate; None: k_warmup."""
        if config.window is None or config.fit is None or config.decay is None:
            raise ValueError("calibration is resolved by tapernorm.config.resolve")
        self.kind = config.kind
        self.k_warmup = k_warmup
        self.norms = dict(norms) if config.kind != "none" else {}
        self.tapers = {site: norm for site, norm in norms.items() if isinstance(norm, TaperNorm)}
        self.fakes = {site: norm for site, norm in norms.items() if isinstance(norm, FakeNorm)}
        for norm in self.tapers.values():
            norm.fit = config.fit
        self.tracks = config.kind == "tracked" and bool(self.tapers)
        self.window = 0 if self.tracks else 1 if config.kind == "one_batch" else config.window
        self.k_last = k_warmup if k_last is None or not (self.fakes or self.tracks) else k_last
        decay = 0.0 if config.kind == "one_batch" else config.decay
        self.averages = {site: Ema(decay) for site in self.norms}
        self.kappa = 1.0

    def records(self, step: int) -> bool:
        """Whether this step's forwards are to be recorded."""
        return bool(self.norms or self.fakes) and self.k_warmup - self.window < step <= self.k_last

    def runs_eager(self, step: int) -> bool:
        """Whether this step must not be compiled, so that there is one graph per phase.

        The graph of the taper records in every step; a FakeNorm's removals change it, also with calibration=none.
        """
        return self.records(step) and not self.tracks

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Around the training forwards of a step, whose statistics then enter the averages and, tracked, c.

        Every process records its own rows, as many as any other; the averages are over all of them. Validation and
        probe forwards are outside, where nothing is recorded.
        """
        with self._recorded(self.records(step)):
            yield
        if self.tracks and self.records(step):
            for site, norm in self.tapers.items():
                c = norm.fitted(self.averages[site].mean)
                if site != "final":
                    norm.c.copy_(torch.where(torch.isfinite(c), c, norm.c))

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Around forwards over the batch of step k_warmup, after it: what a tracked c starts from."""
        with self._recorded(self.tracks):
            yield

    @contextmanager
    def _recorded(self, on: bool) -> Iterator[None]:
        for norm in self.norms.values():
            norm.recording = on
        try:
            yield
        finally:
            for norm in self.norms.values():
                norm.recording = False
        if on:
            closed = {site for site, norm in self.fakes.items() if norm.removed == len(norm.turns)}
            found = {site: norm.take_statistics() for site, norm in self.norms.items() if site not in closed}
            dist.average(found.values())
            for site, statistics in found.items():
                # Sums over the whole batch again: the same whatever it is split into, also across a resume.
                self.averages[site].update(statistics * dist.size())

    def freeze(self, gate: float) -> list[str]:
        """Before the gate falls to a value: c of every FakeNorm whose turn this is, on the device; names what goes."""
        going = []
        for site, norm in self.fakes.items():
            parts = [f"{site} (Q, K)", f"{site} (V)"] if len(norm.turns) == 2 else [site]
            parts = parts[norm.removed : norm.turns_taken(gate)]
            if parts and site in self.averages:
                norm.calibrate(norm.fitted(self.averages[site].mean))
            going += parts
        return going

    def finish(self) -> dict[str, float]:
        """Set c and gamma_t := gamma in every TaperNorm; returns c by site and says what is doubtful."""
        chosen = {}
        for site, norm in self.tapers.items():
            c = norm.fitted(self.averages[site].mean).item() if site in self.averages else 1.0
            # Tracked statistics are of the rescaled stream.
            chosen[site] = c if self.tracks or site not in self.averages else c * self.kappa
            norm.calibrate(chosen[site])
        if odd := implausible(chosen):
            log.warning(f"{odd}; a longer gate.k_warmup may help")
        if self.kind == "ema" and chosen and self.window < SHORT_WINDOW:
            few = f"a window of {self.window} steps, fewer than {SHORT_WINDOW}"
            log.warning(f"c rests on {few}; raise gate.k_warmup or calibration.window")
        return chosen

    def rescaled(self, kappa: float) -> None:
        """The stream has been divided by kappa (see optim.rescale): so are the r that are on record."""
        self.kappa = kappa
        for site in self.fakes.keys() & self.averages.keys():
            if (value := self.averages[site].value) is not None:
                self.fakes[site].divide(value, kappa)

    @torch.no_grad()
    def follow(self, kappa: float) -> None:
        """The stream has been divided by kappa after k_warmup: each c is multiplied by it, and what it follows."""
        for site, norm in {**self.tapers, **self.fakes}.items():
            norm.c.mul_(kappa)
            if site in self.averages and (value := self.averages[site].value) is not None:
                norm.divide(value, kappa)

    def state_dict(self) -> dict[str, Any]:
        return {site: average.state_dict() for site, average in self.averages.items()} | {"kappa": self.kappa}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.kappa = state.get("kappa", 1.0)
        for site, average in self.averages.items():
            average.load_state_dict(state[site], device)


def implausible(chosen: Mapping[str, float]) -> str | None:
    """What to warn of where some c lies outside PLAUSIBLE_C."""
    odd = ", ".join(f"{site} {c:.3g}" for site, c in chosen.items() if not PLAUSIBLE_C[0] <= c <= PLAUSIBLE_C[1])
    return f"c outside {PLAUSIBLE_C[0]} to {PLAUSIBLE_C[1]}: {odd}" if odd else None


def describe(chosen: Mapping[str, float]) -> list[str]:
    """Lines for people: every c, block by block."""
    by_block: dict[str, list[str]] = {}
    for site, c in chosen.items():
        block, _, kind = site.rpartition(".")
        by_block.setdefault(f"block {block}" if block else "final norm", []).append(f"{kind} {c:.4g}")
    return [f"  c, {block}: {', '.join(values)}" for block, values in by_block.items()]
