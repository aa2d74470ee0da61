"""Signals that end a program while there is no step to finish and save."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Stopped(KeyboardInterrupt):
    """A signal asked to stop; if the run had begun to train, its state is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


def stop_at_once(number: int, frame: object) -> None:
    raise Stopped(number)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let SIGTERM, SIGUSR1 and SIGUSR2 end the program as Ctrl-C does; the training loop has handlers of its own."""
    taken = []
    for name in ("SIGTERM", "SIGUSR1", "SIGUSR2"):
        number = getattr(signal, name, None)  # Windows has no SIGUSR1 and 2
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            with suppress(ValueError):  # not the main thread
                signal.signal(number, stop_at_once)
                taken.append(number)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
