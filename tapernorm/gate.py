"""The one global gate g(k) as a pure function of the optimizer step k, and the phase that follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from tapernorm.config import Config


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
    'constant' is 1 for ever. Horizons are steps, not shares: extending a run does not bend the schedule.
    """

    shape: str
    k_warmup: int
    k_taper: int

    @classmethod
    def from_config(cls, config: Config) -> GateSchedule:
        """The schedule of a resolved configuration; constant where no layer tapers."""
        gate = config.gate
        if gate.k_warmup is None or gate.k_taper is None:
            raise ValueError("the gate's horizons are resolved by tapernorm.config.resolve")
        return cls(gate.shape if config.norm.kind == "taper" else "constant", gate.k_warmup, gate.k_taper)

    def value(self, step: int) -> float:
        """g(step), in [0, 1]."""
        if self.shape == "constant" or step <= self.k_warmup:
            return 1.0
        if self.shape == "step" or step >= self.k_taper:
            return 0.0
        t = (step - self.k_warmup) / (self.k_taper - self.k_warmup)
        match self.shape:
            case "cosine":
                return 0.5 * (1.0 + math.cos(math.pi * t))
            case "linear":
                return 1.0 - t
            case "sqrt":
                return 1.0 - math.sqrt(t)
        raise ValueError(f"unknown gate shape {self.shape!r}")

    def phase(self, step: int) -> Phase:
        """The phase in which step is taken; it decides which graph runs and which parameters train."""
        gate = self.value(step)
        if gate == 0.0:
            return Phase.TAPERED
        # Step k_warmup itself is normalized; the cosine is below 1 from the next step on.
        return Phase.NORMALIZED if self.shape == "constant" or step <= self.k_warmup else Phase.TAPERING

    @property
    def first_tapered_step(self) -> int | None:
        """The first step with gate 0, None if there is none."""
        match self.shape:
            case "constant":
                return None
            case "step":
                return self.k_warmup + 1
        return self.k_taper
