"""How far a program is, on a terminal and elsewhere."""

from __future__ import annotations

import math
import sys
import time
from contextlib import suppress
from typing import Any, Literal, TextIO

from tqdm import tqdm


class Progress:
    """A progress bar on a terminal, plain lines elsewhere; times and rates are of this process alone.

    A line: `step 120/600  20 %  loss 3.412  gate 0.87 tapering  15.2k tokens/s  ETA 1:23`. Lines come for the first
    and the last step and at most every `LINE_SECONDS` between them. `done` is the step that a resumed run starts
    after, `unit` what is counted; what is over within `delay` seconds shows nothing. loss None repeats the newest known
    loss, so the caller need not fetch it from the device at each step.
    """

    LINE_SECONDS = 5.0

    def __init__(
        self,
        total: int,
        done: int = 0,
        mode: Literal["auto", "bar", "lines", "none"] = "auto",
        stream: TextIO | None = None,
        unit: str = "step",
        delay: float = 0.0,
    ) -> None:
        self.total, self.done, self.unit, self.delay = total, done, unit, delay
        self.stream = stream or sys.stderr  # looked up now: it may have been redirected since the import
        if mode == "auto":
            mode = "bar" if self.stream.isatty() else "lines"
        self.mode = mode
        self._loss: float | None = None
        self._start = time.monotonic()
        self._printed = -math.inf
        self._pending: str | None = None  # the newest line, not yet printed
        self._bar: Any = None
        if mode == "bar":
            self._bar = tqdm(total=total, initial=done, file=self.stream, unit=unit, delay=delay, dynamic_ncols=True)

    def update(
        self, step: int, *, loss: float | None, tokens_per_s: float, gate: float | None = None, phase: str = ""
    ) -> None:
        """Show that `step` is done. loss in nats per token; gate None where there is none to show."""
        self._loss = self._loss if loss is None else loss
        if self.mode == "none":
            return
        parts = [] if self._loss is None else [f"loss {self._loss:.3f}"]
        if gate is not None:
            parts.append(f"gate {gate:.2f} {phase}")
        if tokens_per_s:
            parts.append(f"{tqdm.format_sizeof(tokens_per_s)} tokens/s")
        if self._bar is not None:
            with suppress(OSError):  # the terminal was closed; the run goes on
                self._bar.set_postfix_str("  ".join(parts), refresh=False)
                self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if now - self._start < self.delay:
            return
        left = (self.total - step) * (now - self._start) / max(step - self.done, 1)
        parts = [f"{self.unit} {step}/{self.total}", f"{100 * step / self.total:.0f} %", *parts]
        self._pending = "  ".join([*parts, f"ETA {clock(left)}"])
        if step >= self.total or now - self._printed >= self.LINE_SECONDS:
            self._printed = now
            self._flush_line()

    def close(self) -> None:
        """Print the last line, or leave the bar as it is."""
        self._flush_line()
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()

    def _flush_line(self) -> None:
        if self._pending is not None:
            with suppress(OSError):  # the stream was closed, e.g. by head
                print(self._pending, file=self.stream, flush=True)
        self._pending = None


def clock(seconds: float) -> str:
    """1:23 or 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
