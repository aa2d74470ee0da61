"""The training loop: warmup, calibration, taper, in the order of the method."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tapernorm.config.options import Config
from tapernorm.config.resolve import resolve
from tapernorm.runtime import dist
from tapernorm.runtime.device import autocast, keep_freed_memory, pick_device
from tapernorm.runtime.signals import STOPPING
from tapernorm.training import observe, saving
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
    at_end: Callable[[dict[str, Any]], dict[str, Any]] = lambda outcome: {},
) -> dict[str, Any]:
    """Train to config.trainer.max_steps inside `directory` and return the run's summary.

    Goes on from `checkpoint` if given, exactly as if it had never stopped. `at_end` gets the outcome of a run that
    finished or diverged while the tracker is still open, so that it can take what is written then; what it returns
    joins the summary. Raises ConfigError for data or devices that do not fit, Divergence for a non-finite loss,
    Interrupted after SIGINT or SIGTERM.
    """
    run = start(config, directory, checkpoint)
    trainer, optim = run.config.trainer, run.config.optim
    with saving.open_tracker(run) as tracker, stop_requests() as asked_to_stop, divergence_told(run, tracker, at_end):
        introduce(run)
        observe.catch_up(run, tracker)
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
            validating, stopping = run.validates_at(step), asked_to_stop()
            saves = bool(stopping) or step % (trainer.save_interval or 1) == 0 or step == trainer.max_steps
            ratio = UpdateRatio(run.model.parameters()) if due else None
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=True)
            run.finish_step(step)
            run.hold_level(step)
            run.stop_if_not_finite(due or probing or saves or validating)

            if due:
                tracker.log(step, observe.of_steps(run, norm, ratio))
            if step == run.schedule.k_warmup:
                tracker.log(step, run.calibrate())
            if probing:
                with run.untimed():
                    tracker.log(step, observe.probe(run))
            run.show_progress()
            # Saved before validating: nothing that takes long stands between a step and its checkpoint.
            if saves:
                with run.untimed():
                    tracker.flush()
                    saving.save(run, tracker)
            if validating:
                with run.untimed():
                    tracker.log(step, observe.validate(run))
            if stopping and step < trainer.max_steps:
                tracker.finish("interrupted", run.summary())
                run.progress.close()
                raise Interrupted(step, run.summary(), stopping)
        tracker.flush()
        run.progress.close()
        if run.val_loss is not None and not math.isfinite(run.val_loss):
            raise Divergence(run.step, run.gate, "the validation loss", run.summary())
        summary = run.summary()
        observe.write_tokens(run)
        summary |= at_end({**summary, "status": "finished", "error": None})
        tracker.finish("finished", summary)
    conclude(run)
    return summary


def start(config: Config, directory: Path, checkpoint: Path | None) -> TrainingRun:
    """The run before its first step, or as it was at `checkpoint`; only one that can start changes its directory."""
    from tapernorm.data.prepare import prepare  # here, because no step needs it, nor any format but our own

    device = dist.place(pick_device(config.trainer.device))
    keep_freed_memory()
    if checkpoint is None and config.model.init != "random":
        from tapernorm.training import pretrained

        pretrained.check(config)
    data = dist.in_turn(lambda: prepare(config))
    run = TrainingRun(resolve(config, data.tokenizer.n_vocab), directory, data, device)
    if checkpoint is None:
        run.initialize()
    else:
        saving.restore(run, checkpoint)
    saving.write_down(run)
    return run


@contextmanager
def divergence_told(
    run: TrainingRun, tracker: Tracker, at_end: Callable[[dict[str, Any]], dict[str, Any]]
) -> Iterator[None]:
    """Give tracker and `at_end` the outcome of a run that diverges, which ends it."""
    try:
        yield
    except Divergence as fault:
        run.progress.close()
        tracker.log(fault.step, {"train/loss": math.nan, "gate/g": fault.gate})
        at_end({**fault.summary, "status": "diverged", "error": str(fault)})
        tracker.finish("diverged", fault.summary)
        raise


@contextmanager
def stop_requests() -> Iterator[Callable[[], int]]:
    """Turn SIGINT and the signals of STOPPING into a request to leave; a second SIGINT stops at once.

    Yields what gives the signal to leave for after a step, 0 for none, asked once in each: several processes leave
    together. The others stay requests: a scheduler may repeat them while the checkpoint is being written. Of several
    processes each takes all of them for requests, to its end: torchrun sends a Ctrl-C, which the terminal gives to
    all, once more, and SIGTERM to those that are left once one has gone; 30 s later it ends them by force.
    """
    received = 0
    previous: dict[int, Any] = {}

    def request(number: int, frame: object) -> None:
        nonlocal received
        received = number
        if number == signal.SIGINT and dist.size() == 1:
            signal.signal(number, previous[number])

    with suppress(ValueError):  # not the main thread: the caller keeps its handlers
        for number in (signal.SIGINT, *STOPPING):
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                previous[number] = signal.signal(number, request)
    try:
        yield lambda: dist.largest_asked(received)
    finally:
        if dist.size() == 1:
            for number, handler in previous.items():
                signal.signal(number, handler)
