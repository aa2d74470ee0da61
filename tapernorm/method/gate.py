"""The one global gate g(k) as a pure function of the optimizer step k, and the phase that follows from it."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from tapernorm.config.options import GATED, Config
from tapernorm.config.resolve import removal_waits
from tapernorm.config.sites import removal_order


class Phase(StrEnum):
    """What a tapered layer computes: the standard norm, a mixture, or a fixed linear map."""

    NORMALIZED = "normalized"
    TAPERING = "tapering"
    TAPERED = "tapered"


@dataclass(frozen=True)
class GateSchedule:
    """g(k) for the 1-based number k of the optimizer step being taken.

    g = 1 for k <= k_warmup; with t = (k - k_warmup) / (k_taper - k_warmup) it is then 0.5 (1 + cos(pi t)) for
    'cosine', 1 - t for 'linear', 1 - sqrt(t) for 'sqrt', 0 at once for 'step'; exactly 0 for k >= k_taper.
    'constant' is 1 for ever. 'sequential' is the share of `removals` (steps, k_warmup + 1 to k_taper) still to come,
    for layers that go one at a time. Horizons are steps, not shares: extending a run does not bend the schedule.
    """

    shape: str
    k_warmup: int
    k_taper: int
    removals: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, config: Config) -> GateSchedule:
        """The schedule of a resolved configuration; constant where no layer tapers."""
        gate = config.gate
        if gate.k_warmup is None or gate.k_taper is None:
            raise ValueError("the gate's horizons are resolved by tapernorm.config.resolve")
        if config.norm.kind not in GATED:
            return cls("constant", gate.k_warmup, gate.k_taper)
        removals = _removals(config, gate.k_warmup, gate.k_taper) if gate.shape == "sequential" else ()
        return cls(gate.shape, gate.k_warmup, gate.k_taper, removals)

    def value(self, step: int) -> float:
        """g(step), in [0, 1]."""
        if self.shape == "constant" or step <= self.k_warmup:
            return 1.0
        if self.shape == "step" or step >= self.k_taper:
            return 0.0
        t = (step - self.k_warmup) / (self.k_taper - self.k_warmup)
        if self.shape == "sequential":
            return 1.0 - bisect_right(self.removals, step) / len(self.removals)
        return {"cosine": 0.5 * (1.0 + math.cos(math.pi * t)), "linear": 1.0 - t, "sqrt": 1.0 - math.sqrt(t)}[
            self.shape
        ]

    def phase(self, step: int) -> Phase:
        """The phase in which step is taken; it decides which graph runs and which parameters train."""
        if self.value(step) == 0.0:
            return Phase.TAPERED
        # Step k_warmup itself is normalized; the cosine is below 1 from the next step on.
        return Phase.NORMALIZED if self.shape == "constant" or step <= self.k_warmup else Phase.TAPERING

    @property
    def first_tapered_step(self) -> int | None:
        """The first step with gate 0, None if there is none."""
        return {"constant": None, "step": self.k_warmup + 1}.get(self.shape, self.k_taper)


def _removals(config: Config, k_warmup: int, k_taper: int) -> tuple[int, ...]:
    """The step that each removal takes effect in: by `gate.gaps`, else evenly from k_warmup + 1 to k_taper."""
    if waits := removal_waits(config):
        return tuple(accumulate(waits, initial=k_warmup + 1))
    count = len(removal_order(config.norm.sites, config.model.n_layer))
    span = k_taper - k_warmup - 1
    return tuple(k_taper - round(span * later / max(1, count - 1)) for later in reversed(range(count)))
