"""Signals that end a program while there is no step to finish and save."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Sent by schedulers, by a terminal that is closed, at a limit of CPU time, by Ctrl-\\; Windows has SIGTERM alone.
_NAMES = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU", "SIGQUIT")
STOPPING = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """A signal asked to stop; if the run had begun to train, its state is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


def stop_at_once(number: int, frame: object) -> None:
    raise Stopped(number)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let every signal of STOPPING end the program as Ctrl-C does; the training loop has handlers of its own."""
    taken = []
    for number in STOPPING:
        if signal.getsignal(number) is signal.SIG_DFL:  # not where nohup ignores SIGHUP
            with suppress(ValueError):  # not the main thread
                signal.signal(number, stop_at_once)
                taken.append(number)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
