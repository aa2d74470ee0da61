"""The training loop: warmup, calibration, taper, in the order of the method."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tapernorm.config.options import Config
from tapernorm.config.resolve import resolve
from tapernorm.data.prepare import prepare
from tapernorm.runtime import dist
from tapernorm.runtime.device import autocast, keep_freed_memory, pick_device
from tapernorm.training import pretrained
from tapernorm.training.console import conclude, introduce
from tapernorm.training.dynamics import UpdateRatio
from tapernorm.training.optim import clip_gradients, gradient_norm, set_learning_rates
from tapernorm.training.state import Divergence, TrainingRun
from tapernorm.training.tracking import Tracker

__all__ = ["Divergence", "Interrupted", "train"]


class Interrupted(Exception):
    """A signal asked the run to stop; its state is saved."""

    def __init__(self, step: int, summary: dict[str, Any], signal: int) -> None:
        super().__init__(f"stopped by a signal after step {step}, which is saved; resume=auto goes on")
        self.step, self.summary, self.signal = step, summary, signal


def train(
    config: Config,
    directory: Path,
    checkpoint: Path | None = None,
    say: Callable[[str], None] = print,
    at_end: Callable[[dict[str, Any]], dict[str, Any]] = lambda outcome: {},
) -> dict[str, Any]:
    """Train to config.trainer.max_steps inside `directory` and return the run's summary.

    Goes on from `checkpoint` if given, exactly as if it had never stopped. `at_end` gets the outcome of a run that
    finished or diverged while the tracker is still open, so that it can take what is written then; what it returns
    joins the summary. Raises ConfigError for data or devices that do not fit, Divergence for a non-finite loss,
    Interrupted after SIGINT or SIGTERM.
    """
    device = dist.place(pick_device(config.trainer.device))
    keep_freed_memory()
    if checkpoint is None and config.model.init != "random":
        pretrained.check(config)
    data = dist.in_turn(lambda: prepare(config, say))
    config = resolve(config, data.tokenizer.n_vocab)
    run = TrainingRun(config, directory, data, device, say)
    if checkpoint is None:
        run.initialize()
    else:
        run.restore(checkpoint)
    # Only now: a resume that is refused leaves the run's directory as it was.
    run.write_down()
    with run.open_tracker() as tracker, signals_as_requests() as stop:
        introduce(run)
        run.catch_up(tracker)
        try:
            _loop(run, tracker, stop)
            if run.val_loss is not None and not math.isfinite(run.val_loss):
                raise Divergence(run.step, run.gate, "the validation loss", run.summary())
        except Divergence as fault:
            tracker.log(fault.step, {"train/loss": math.nan, "gate/g": fault.gate})
            at_end({**(fault.summary or {}), "status": "diverged", "error": str(fault)})
            tracker.finish("diverged", fault.summary)
            raise
        summary = run.summary()
        run.write_tokens()
        summary |= at_end({**summary, "status": "finished", "error": None})
        tracker.finish("finished", summary)
    conclude(run)
    return summary


def _loop(run: TrainingRun, tracker: Tracker, stop: StopRequest) -> None:
    """Every optimizer step from run.step + 1 to the end of the run."""
    trainer, optim = run.config.trainer, run.config.optim
    for step in range(run.step + 1, trainer.max_steps + 1):
        run.enter(step)
        set_learning_rates(run.optimizer, step, optim)

        micro = run.microbatches(step)
        level = run.batch_level(step, micro)
        compute = run.model.loss if run.calibration.runs_eager(step) else run.loss
        with run.calibration.recording(step):
            for part, (x, y) in enumerate(micro):
                run.seed_dropout(step, part)
                with autocast(run.device, run.dtype):
                    loss, hidden = compute(x, y, run.log_scale)
                    total = loss
                    if run.anchor.active:
                        aux = run.anchor.loss(run.anchor.subject(hidden, run.model.readout), level)
                        total = loss + aux
                        run.interval["anchor"] += aux.detach() / len(micro)
                        run.interval["force"] += run.anchor.force(aux, hidden) / len(micro)
                (total / len(micro)).backward()
                run.interval["loss"] += loss.detach() / len(micro)
        run.average_over_processes()

        norm = gradient_norm(run.model.parameters())
        if optim.clip is not None:
            clip_gradients(run.model.parameters(), optim.clip, norm)
        run.guard(step, norm)
        due = step % trainer.log_interval == 0 or step in run.landmarks
        probing = step % trainer.dynamics_interval == 0 or step in run.landmarks
        stopping = stop.agreed()
        saving, validating = run.saves_at(step) or stopping, run.validates_at(step)
        ratio = UpdateRatio(run.model.parameters()) if due else None
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
        run.finish_step(step)
        run.stop_if_not_finite(due or probing or saving or validating)

        if due:
            tracker.log(step, run.training_metrics(step, norm, ratio))
        if step == run.schedule.k_warmup:
            tracker.log(step, run.calibrate())
        if probing:
            with run.untimed():
                tracker.log(step, run.probe())
        run.show_progress()
        # Saved before validating: nothing that takes long stands between a step and its checkpoint.
        if saving:
            with run.untimed():
                tracker.flush()
                run.save(tracker.state())
        if validating:
            with run.untimed():
                tracker.log(step, run.validate())
        if stopping and step < trainer.max_steps:
            tracker.finish("interrupted", run.summary())
            run.close_progress()
            raise Interrupted(step, run.summary(), stop.signal)
    tracker.flush()
    run.close_progress()


class StopRequest:
    """Set by the first signal; the loop finishes its step, saves and leaves."""

    received = 0  # by this process
    signal = 0  # that all processes know of

    def agreed(self) -> bool:
        """Whether to leave after this step, asked once in each: several processes leave together."""
        self.signal = dist.largest_asked(self.received)
        return self.signal != 0


@contextmanager
def signals_as_requests() -> Iterator[StopRequest]:
    """Turn SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 into a request; a second SIGINT stops at once.

    The others stay requests: a scheduler may repeat them while the checkpoint is being written. Of several processes
    each takes all of them for requests, to its end: torchrun sends a Ctrl-C, which the terminal gives to all, once
    more, and SIGTERM to those that are left once one has gone; 30 s later it ends them by force.
    """
    stop = StopRequest()
    previous: dict[int, Any] = {}

    def request(number: int, frame: object) -> None:
        stop.received = number
        if number == signal.SIGINT and dist.size() == 1:
            signal.signal(number, previous[number])

    try:
        for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
            if number := getattr(signal, name, 0):  # Windows has no SIGUSR1 and 2
                previous[number] = signal.signal(number, request)
    except ValueError:  # not the main thread: the caller keeps its handlers
        pass
    try:
        yield stop
    finally:
        if dist.size() == 1:
            for number, handler in previous.items():
                signal.signal(number, handler)
