"""What a run keeps in its directory beside the metrics, and how it goes on from that."""

from __future__ import annotations

import errno
import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tapernorm.config.schema import ConfigError, to_dict, write_text, write_yaml
from tapernorm.method.gate import Phase
from tapernorm.runtime import dist
from tapernorm.training import checkpoint
from tapernorm.training.state import Counters, TrainingRun
from tapernorm.training.tracking import NoTracker, Tracker

# What training.pt holds.
STATE = ("optimizer", "calibration", "anchor", "interval", "counters", "rng", "cuda_rng", "probe", "tracker")


def write_down(run: TrainingRun) -> None:
    """config.yaml, resolved, and data.json: what was read, dropped and repaired. Checkpoints of later steps go."""
    if dist.leads():
        checkpoint.clear_after(run.directory, run.step)
        write_yaml(run.directory / "config.yaml", to_dict(run.config))
        report = {"key": run.data.key, "entry": str(run.data.entry), **run.data.report}
        write_text(run.directory / "data.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def open_tracker(run: TrainingRun) -> Tracker:
    def lead() -> Tracker:
        return Tracker(
            run.directory,
            to_dict(run.config),
            run.config.tracking,
            name=run.directory.name,
            tokens_per_step=run.tokens_per_step,
            resume_step=run.step,
            state=run.tracker_state,
        )

    return dist.in_turn(lead, NoTracker)


def save(run: TrainingRun, tracker: Tracker) -> None:
    """Write the checkpoint of the step that was taken last."""
    if not run.directory.is_dir():  # or the checkpoint would make a new one, without its metrics
        raise FileNotFoundError(errno.ENOENT, "the run's directory has vanished", str(run.directory))
    training = {
        "optimizer": dist.collected(run.optimizer.state_dict()),
        "calibration": run.calibration.state_dict(),
        "anchor": run.anchor.state_dict(),
        "interval": run.interval | {"radial": run.log_scale.grad},
        "counters": {field.name: getattr(run, field.name) for field in fields(Counters)},
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state(run.device) if run.device.type == "cuda" else None,
        "probe": run.last_probe,
        "tracker": tracker.state(),
    }
    weights = dist.collected(run.model.state_dict())
    if dist.leads():
        checkpoint.write(
            checkpoint.path_at(run.directory, run.step),
            run.step,
            model=weights,
            training=training,
            config=replace(run.config, model=run.model.config),  # eps may have been rescaled
            tokenizer=run.data.tokenizer,
            meta={
                "gate": run.gate,
                "phase": run.phase.value,
                "tokens": run.tokens,
                "val_loss": run.val_loss,
                "train_loss": run.last_loss,
                "data": run.data.key,
            },
        )
    run.saved_step = run.step
    retain(run)


def retain(run: TrainingRun) -> None:
    if dist.leads():
        checkpoint.retain(run.directory, run.config.trainer.keep_last, run.best_saved_step)


def note_validation(run: TrainingRun, loss: float) -> None:
    """Remember the newest and the best validation loss, and the best of a saved step, whose checkpoint stays."""
    run.val_loss = loss
    if loss < (math.inf if run.best_loss is None else run.best_loss):
        run.best_loss, run.best_step = loss, run.step
    if run.saved_step == run.step and loss < (math.inf if run.best_saved_loss is None else run.best_saved_loss):
        run.best_saved_loss, run.best_saved_step = loss, run.step
        retain(run)


def restore(run: TrainingRun, path: Path) -> None:
    """Everything as it was when the checkpoint `path` was saved."""
    meta = checkpoint.read_meta(path)
    if meta["data"] != run.data.key:
        raise ConfigError(
            f"checkpoint {path}: the data set or its tokenizer has changed since (it was {meta['data']}, "
            f"now {run.data.key}); restore the files, or start a new run"
        )
    state = checkpoint.read_training(path)
    if missing := [name for name in STATE if name not in state]:
        raise ConfigError(f"checkpoint {path}: training.pt has no '{missing[0]}'")
    checkpoint.load_weights(run.model, path)
    run.set_up()
    for field in fields(Counters):
        setattr(run, field.name, state["counters"].get(field.name))  # an older version had fewer
    run.gate = run.schedule.value(run.step)
    phase = run.schedule.phase(run.step) if run.step else Phase.NORMALIZED
    run.model.set_gate(run.gate, phase)
    run.enter_phase(phase)
    _load_optimizer(run, state["optimizer"])
    run.calibration.load_state_dict(state["calibration"], run.device)
    run.anchor.load_state_dict(state["anchor"])
    run.anchor.eps /= run.calibration.kappa**2
    run.model.divide_eps(run.calibration.kappa)
    interval = {k: v.to(run.device) if isinstance(v, Tensor) else v for k, v in state["interval"].items()}
    run.log_scale.grad = interval.pop("radial")
    run.interval |= interval
    torch.set_rng_state(state["rng"])
    if state["cuda_rng"] is not None and run.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda_rng"], run.device)
    run.last_probe, run.tracker_state, run.saved_step = state["probe"], state["tracker"], run.step


def _load_optimizer(run: TrainingRun, state: dict[str, Any]) -> None:
    parameters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    for index, moments in state["state"].items():
        moments |= {name: dist.share_of(moment, parameters[index]) for name, moment in moments.items()}
    run.optimizer.load_state_dict(state)
