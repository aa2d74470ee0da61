"""Everything that one training run holds and can do; tapernorm.training.loop says in which order."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tapernorm.config.options import Config
from tapernorm.config.schema import ConfigError, to_dict, write_text, write_yaml
from tapernorm.data.batches import Batches, validation_windows
from tapernorm.data.prepare import Prepared
from tapernorm.method.anchor import ScaleAnchor
from tapernorm.method.calibration import DOUBTFUL_MISMATCH, Calibration, describe
from tapernorm.method.gate import GateSchedule, Phase
from tapernorm.model.decoder import Decoder, build_model
from tapernorm.model.evaluate import evaluate
from tapernorm.runtime import dist
from tapernorm.runtime.device import autocast, pick_dtype
from tapernorm.runtime.progress import Progress
from tapernorm.runtime.record import finite, read_metrics
from tapernorm.training import checkpoint as checkpoints
from tapernorm.training import pretrained
from tapernorm.training.dynamics import UpdateRatio, first_nonfinite, probe, radial_tokens, worst_mismatch
from tapernorm.training.optim import add_taper_gains, build_optimizer, drop_state_of_frozen, learning_rate, rescale
from tapernorm.training.tracking import NoTracker, Tracker

# Plain attributes of a run that its checkpoints hold.
COUNTERS = (
    "step",
    "tokens",
    "seconds",
    "best_loss",
    "best_step",
    "best_saved_loss",
    "best_saved_step",
    "val_loss",
    "last_loss",
    "level",
    "closed_mismatch",
)
PROBE_TOKENS = 512  # of which probe_tokens.json has the radial gradient
# What training.pt holds.
STATE = ("optimizer", "calibration", "anchor", "interval", "counters", "rng", "cuda_rng", "probe", "tracker")


class Divergence(RuntimeError):
    """A loss or gradient that is not finite. The weights are those before the step; `summary` is the run's so far."""

    def __init__(self, step: int, gate: float, layer: str, summary: dict[str, Any]) -> None:
        super().__init__(
            f"the loss or its gradient is not finite at step {step}, gate {gate:.4g}; first in {layer}; "
            "a lower optim.lr or a longer gate.k_warmup may help"
        )
        self.step, self.gate, self.layer, self.summary = step, gate, layer, summary


class TrainingRun:
    """Everything that one training run holds: model, optimizer, schedules, averages, counters."""

    def __init__(
        self, config: Config, directory: Path, data: Prepared, device: torch.device, say: Callable[[str], None]
    ) -> None:
        trainer, model_config = config.trainer, config.model
        assert model_config.norm_eps is not None
        self.config, self.directory, self.data, self.device = config, directory, data, device
        self._say = say
        self.dtype = pick_dtype(trainer.dtype, device)
        # For whatever draws from torch's own generator; initialization, batches and dropout masks do not depend on it.
        torch.manual_seed(config.seed)
        self.model = build_model(config, device).train()
        self.schedule = GateSchedule.from_config(config)
        self.phase, self.gate = Phase.NORMALIZED, 1.0
        first_tapered = self.schedule.first_tapered_step
        self.calibration = Calibration(
            config.calibration,
            self.schedule.k_warmup,
            self.model.gated_norms(),
            k_last=None if first_tapered is None else first_tapered - 1,
        )
        self.anchor = ScaleAnchor(
            config.anchor,
            k_warmup=self.schedule.k_warmup,
            family=model_config.norm_family,
            eps=model_config.norm_eps,
        )
        n_ctx, valid = model_config.n_ctx, data.valid.windows(model_config.n_ctx)
        self.batches = Batches(data.train.tokens, n_ctx, trainer.batch_size, config.seed, data.train.windows(n_ctx))
        self.val_batch = validation_windows(data.valid.tokens, n_ctx, trainer.val_tokens, valid)
        inputs, targets = validation_windows(data.valid.tokens, n_ctx, trainer.probe_size * n_ctx, valid)
        self.probe_batch = inputs.to(device), targets.to(device)
        # Steps that deserve every measurement: the first, the end of each phase, the last.
        self.landmarks = {1, self.schedule.k_warmup, first_tapered, trainer.max_steps} - {None, 0}
        self.tokens_per_step = trainer.batch_size * model_config.n_ctx
        self.step = self.tokens = 0
        self.seconds = 0.0
        self.best_loss: float | None = None
        self.best_step: int | None = None
        self.saved_step: int | None = None
        self.best_saved_loss: float | None = None
        self.best_saved_step: int | None = None
        self.val_loss: float | None = None
        self.best_temperature: float | None = None
        self.val_loss_best_temperature: float | None = None
        self.log_scale = torch.zeros((), device=device, requires_grad=True)
        self.interval = self.fresh_interval()
        self.first_bad = torch.zeros((), dtype=torch.int64, device=device)
        self.last_loss: float | None = None
        self.last_probe: dict[str, float | None] = {}
        self.level: float | None = None  # of the residual stream on the probe batch at k_warmup
        self.closed_mismatch: float | None = None  # the worst one at the first step with gate 0
        self.warned = False
        self.tokens_per_s = 0.0
        self.interval_start: tuple[float, int] | None = None
        self.wandb_state: dict[str, Any] | None = None
        self.progress: Progress | None = None

    def initialize(self) -> None:
        """Start from the weights that model.init names, or from the random ones that are there."""
        if self.config.model.init != "random":
            pretrained.initialize(self.model, self.config, self.data.tokenizer)
        if self.schedule.k_warmup == 0:  # nothing to calibrate on: c = 1 and gamma_t starts as gamma
            for norm in self.model.taper_norms().values():
                norm.calibrate(1.0)
        self.set_up()
        self.clear_after(0)

    def set_up(self) -> None:
        """Now that the weights are there: share them between the processes if wanted, compile, build the optimizer."""
        trainer = self.config.trainer
        self.sharded = dist.size() > 1 and trainer.parallel == "fsdp"
        if self.sharded:
            dist.shard(self.model, self.model.blocks, methods=("loss", "trunk", "readout"))
        self.loss = torch.compile(self.model.loss, dynamic=False) if trainer.compile else self.model.loss
        self.optimizer = build_optimizer(self.model, self.config.optim)

    @torch.no_grad()
    def whole_model(self) -> Decoder:
        """The model with all of its weights in this process, to look at: itself, or a copy if it is sharded."""
        if not self.sharded:
            return self.model
        with self.device:
            copy = Decoder(self.model.config, self.config.norm)
        there = zip(
            [*copy.parameters(), *copy.buffers()], [*self.model.parameters(), *self.model.buffers()], strict=True
        )
        for own, shared in there:
            own.copy_(dist.whole(shared))
        copy.set_gate(self.gate, self.phase)
        return copy.train(self.model.training)

    # ---------------------------------------------------------------------------------------------- one training step

    def enter(self, step: int) -> None:
        """Set gate and phase for this step: training, not observation, hence in plain sight and once per step."""
        if self.interval_start is None:
            self.interval_start = time.perf_counter(), self.tokens
        gate, phase = self.schedule.value(step), self.schedule.phase(step)
        if (gate, phase) != (self.gate, self.phase):
            removed = self.calibration.freeze(gate)
            self.model.set_gate(gate, phase)
            if removed:
                self.say(f"step {step}, gate {gate:.4g}: {', '.join(removed)} by a frozen scale from here on")
        if phase is not self.phase:
            self.enter_phase(phase)
        self.gate = gate

    def enter_phase(self, phase: Phase) -> None:
        """gamma_t joins the optimizer when the taper starts; gamma's moments go when it ends."""
        if self.phase is Phase.NORMALIZED:
            add_taper_gains(self.optimizer, self.model, self.config.optim)
        if phase is Phase.TAPERED:
            drop_state_of_frozen(self.optimizer)
        self.phase = phase

    def seed_dropout(self, step: int, part: int) -> None:
        """Before a microbatch's forward: make its masks a function of the seed, the step and its place in the batch.

        So they need no state that could be lost, are the baseline's in every mode, and can be drawn again.
        """
        if self.config.model.dropout:
            part += dist.rank() * self.config.trainer.accumulation
            (seed,) = np.random.SeedSequence((self.config.seed, step, part)).generate_state(1, np.uint64)
            torch.manual_seed(int(seed))

    def batch_level(self, step: int, micro: list[tuple[Tensor, Tensor]]) -> Tensor | None:
        """The anchor's `level` of the whole batch, from forwards without gradients; None where it needs none."""
        if not self.anchor.needs_batch_mean or len(micro) * dist.size() == 1:
            return None
        return self.batch_mean(step, micro, lambda x, y: self.anchor.level(self.anchor.scale(self.model.trunk(x))))

    @torch.no_grad()
    def batch_mean(
        self, step: int, micro: list[tuple[Tensor, Tensor]], measure: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Mean of a scalar of training forwards over the whole batch of a step, with the weights of now."""
        values = []
        for part, (x, y) in enumerate(micro):
            self.seed_dropout(step, part)
            with autocast(self.device, self.dtype):
                values.append(measure(x, y))
        mean = torch.stack(values).mean()
        dist.average([mean])
        return mean

    def average_over_processes(self) -> None:
        """Make gradients and sums, which are of this process's rows, those of the whole batch, once a step.

        The sums of earlier steps are equal in all processes already, so averaging them again leaves them as they are.
        """
        if dist.size() > 1:
            sums = [self.log_scale.grad, *(self.interval[name] for name in ("loss", "anchor", "force"))]
            gradients = [parameter.grad for parameter in self.model.parameters()]
            dist.average([tensor for tensor in [*sums, *gradients] if tensor is not None])

    def guard(self, step: int, grad_norm: Tensor) -> None:
        """Make the optimizer skip, on the device and without waiting for it, a step that is not finite."""
        bad = ~torch.isfinite(self.interval["loss"] + grad_norm) | (self.first_bad > 0)
        self.optimizer.found_inf = bad.float()  # type: ignore[attr-defined]  # what torch's GradScaler sets
        self.first_bad = torch.where(bad & (self.first_bad == 0), step, self.first_bad)

    def stop_if_not_finite(self, observed: bool) -> None:
        """Raise Divergence naming the step, the gate and the first bad layer.

        Looks where that needs no synchronisation (on the CPU) and before anything is logged, saved or validated.
        """
        if not (observed or self.device.type == "cpu") or self.first_bad.item() == 0:
            return
        step = int(self.first_bad.item())
        gate = self.schedule.value(step)
        model = self.whole_model()
        model.set_gate(gate, self.schedule.phase(step))
        layer = None
        for part, (x, y) in enumerate(self.microbatches(step)):
            self.seed_dropout(step, part)
            with autocast(self.device, self.dtype):
                layer = layer or first_nonfinite(model, x, y)
        layer = next(filter(None, dist.gather(layer)), None)
        other = "the gradient of the scale loss" if self.anchor.active else "the norm of the gradient"
        self.close_progress()
        raise Divergence(step, gate, layer or other, self.summary() | {"steps": step - 1})

    def microbatches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets (B, T) in `trainer.accumulation` equal parts: a pure function of the seed and the step.

        Several processes have their parts of the same batch, in the order of the processes.
        """
        parts = self.config.trainer.accumulation
        inputs, targets = self.batches.batch(step, dist.rows(self.config.trainer.batch_size))
        if self.device.type == "cuda":  # only a copy from pinned memory does not wait
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        inputs, targets = inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)
        return list(zip(inputs.chunk(parts), targets.chunk(parts), strict=True))

    def finish_step(self, step: int) -> None:
        self.step = step
        self.tokens += self.tokens_per_step
        self.interval["steps"] += 1

    def calibrate(self) -> dict[str, float]:
        """After step k_warmup: the level of the stream, c and gamma_t of every tapered layer, s_tgt and lambda."""
        if (wanted := self.config.calibration.level) is not None:
            if self.model.is_homogeneous:
                self.rescale(self.mean_scale() / wanted)
            else:
                self.say(
                    f"calibration.level={wanted:g}: not for norm={self.config.norm.name}; the stream stays as it is"
                )
        with self.calibration.measuring():
            self.anchor.set_target(self.mean_scale())
        chosen = self.calibration.finish(self.say)
        kind = self.calibration.kind
        self.say(f"calibrated after step {self.step} ({kind})" if chosen else f"end of the warmup, step {self.step}")
        for line in [*describe(chosen), self.anchor.describe()]:
            self.say(line)
        assert self.anchor.target is not None
        return {"scale/target": self.anchor.target, "anchor/lambda": self.anchor.strength}

    def mean_scale(self) -> float:
        """Mean of s(h_L) over the tokens of this step's batch; the whole model runs, so that every norm can record."""
        micro = self.microbatches(self.step)
        return self.batch_mean(self.step, micro, lambda x, y: self.anchor.scale(self.model.loss(x, y)[1]).mean()).item()

    def rescale(self, kappa: float) -> None:
        """Divide the residual stream by kappa, the function unchanged."""
        rescale(self.model, self.optimizer, kappa)
        self.calibration.rescaled(kappa)
        self.anchor.eps /= kappa**2
        self.say(f"step {self.step}: the residual stream is divided by {kappa:.4g}; the function stays the same")

    # --------------------------------------------------------------------------------------------------- observations

    def fresh_interval(self) -> dict[str, Any]:
        """Sums since the last logged line: tensors, so that they need no synchronisation."""
        zero = torch.zeros((), device=self.device)
        return {"loss": zero, "anchor": zero.clone(), "force": zero.clone(), "steps": 0}

    def training_metrics(self, step: int, grad_norm: Tensor, ratio: UpdateRatio | None) -> dict[str, float | None]:
        """Averages since the last line and the state of this step; starts a new interval."""
        steps = self.interval["steps"]
        self.last_loss = self.interval["loss"].item() / steps
        radial = None if self.log_scale.grad is None else self.log_scale.grad.item() / steps
        start, tokens = self.interval_start or (time.perf_counter(), self.tokens)
        elapsed = time.perf_counter() - start
        self.seconds += elapsed
        self.tokens_per_s = (self.tokens - tokens) / max(elapsed, 1e-9)
        metrics = {
            "train/loss": self.last_loss,
            "gate/g": self.gate,
            "optim/lr": learning_rate(step, self.config.optim),
            "grad/norm": grad_norm.item(),
            "radial/train_mean": radial,
            "throughput/tokens_per_s": self.tokens_per_s,
            "update/ratio": None if ratio is None else ratio.value(),
        }
        if self.anchor.target is not None:
            metrics["scale/target"] = self.anchor.target
        if self.anchor.acts(step):
            weighted = self.interval["anchor"].item() / steps
            metrics["anchor/weighted"] = weighted
            metrics["anchor/loss"] = weighted / self.anchor.strength if self.anchor.strength else 0.0
            metrics["anchor/force"] = self.interval["force"].item() / steps
        self.interval = self.fresh_interval()
        self.log_scale.grad = None
        self.interval_start = time.perf_counter(), self.tokens
        return metrics

    def probe(self) -> dict[str, float | None]:
        """The dynamics on the probe batch, the drift since k_warmup, and a warning where c does not fit any more."""
        calibrated = 0 < self.schedule.k_warmup <= self.step
        metrics = probe(self.whole_model(), *self.probe_batch, calibrated=calibrated)
        level = metrics["scale/final_rms_mean"]
        assert level is not None
        if self.step == self.schedule.k_warmup:
            self.level = level
        if self.level and level > 0:
            metrics["scale/drift"] = math.log(level / self.level)
        self.last_probe = metrics
        worst = worst_mismatch(metrics)
        if self.step == self.schedule.first_tapered_step:
            self.closed_mismatch = worst
        if worst is not None and worst > DOUBTFUL_MISMATCH and 0 < self.gate < 1 and not self.warned:
            self.warned = True
            site = next(name for name, value in metrics.items() if "mismatch" in name and abs(value or 0.0) == worst)
            remedy = "a lower optim.lr or a later gate.k_taper" if self.calibration.tracks else "calibration=tracked"
            if self.calibration.tracks and site.endswith(".final"):  # the loss pulls there, and c does not follow
                remedy = "an anchor, as in anchor=mean_log,"
            self.say(
                f"warning: step {self.step}, gate {self.gate:.3g}: c is off by a factor of {math.exp(worst):.2f} "
                f"({site}); {remedy} may help"
            )
        return metrics

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Keep what happens inside out of the throughput."""
        if self.device.type == "cuda":  # what is queued belongs to training
            torch.cuda.synchronize(self.device)
        before = time.perf_counter()
        yield
        if self.interval_start is not None:
            start, tokens = self.interval_start
            self.interval_start = start + time.perf_counter() - before, tokens

    def validate(self) -> dict[str, float | None]:
        """Loss over the fixed validation tokens, the last time also at the best temperature; remembers the best."""
        batch_size, last = self.config.trainer.val_batch_size, self.step == self.config.trainer.max_steps
        result = evaluate(self.whole_model(), *self.val_batch, batch_size, autocast(self.device, self.dtype), last)
        self.note_validation(result.loss)
        self.say(
            f"step {self.step}: validation loss {result.loss:.4f} over {result.tokens:,} tokens, gate {self.gate:.4g}"
        )
        metrics: dict[str, float | None] = {"val/loss": result.loss, "val/perplexity": result.perplexity}
        if not last:
            return metrics
        self.best_temperature, self.val_loss_best_temperature = result.best_temperature, result.loss_best_temperature
        return metrics | {
            "val/best_temperature": result.best_temperature,
            "val/loss_best_temperature": result.loss_best_temperature,
        }

    def validates_at(self, step: int) -> bool:
        return step % (self.config.trainer.val_interval or 1) == 0 or step in self.landmarks

    def saves_at(self, step: int) -> bool:
        return step % (self.config.trainer.save_interval or 1) == 0 or step == self.config.trainer.max_steps

    def note_validation(self, loss: float) -> None:
        self.val_loss = loss
        if loss < (math.inf if self.best_loss is None else self.best_loss):
            self.best_loss, self.best_step = loss, self.step
        saved = self.saved_step == self.step
        if saved and loss < (math.inf if self.best_saved_loss is None else self.best_saved_loss):
            self.best_saved_loss, self.best_saved_step = loss, self.step
            self.retain()

    # -------------------------------------------------------------------------------------------------- save, restore

    def save(self, wandb_state: dict[str, Any]) -> None:
        if not self.directory.is_dir():  # or the checkpoint would make a new one, without its metrics
            raise FileNotFoundError(errno.ENOENT, "the run's directory has vanished", str(self.directory))
        training = {
            "optimizer": dist.collected(self.optimizer.state_dict()),
            "calibration": self.calibration.state_dict(),
            "anchor": self.anchor.state_dict(),
            "interval": self.interval | {"radial": self.log_scale.grad},
            "counters": {name: getattr(self, name) for name in COUNTERS},
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "probe": self.last_probe,
            "tracker": wandb_state,
        }
        weights = dist.collected(self.model.state_dict())
        if dist.leads():
            checkpoints.write(
                checkpoints.path_at(self.directory, self.step),
                self.step,
                model=weights,
                training=training,
                config=dataclasses.replace(self.config, model=self.model.config),  # eps may have been rescaled
                tokenizer=self.data.tokenizer,
                meta={
                    "gate": self.gate,
                    "phase": self.phase.value,
                    "tokens": self.tokens,
                    "val_loss": self.val_loss,
                    "train_loss": self.last_loss,
                    "data": self.data.key,
                },
            )
        self.saved_step = self.step
        self.retain()

    def retain(self) -> None:
        if dist.leads():
            checkpoints.retain(self.directory, self.config.trainer.keep_last, self.best_saved_step)

    def clear_after(self, step: int) -> None:
        if dist.leads():
            checkpoints.clear_after(self.directory, step)

    def restore(self, path: Path) -> None:
        """Everything as it was when `path` was saved; checkpoints of later steps belong to a past that is undone."""
        meta = checkpoints.read_meta(path)
        if meta["data"] != self.data.key:
            raise ConfigError(
                f"checkpoint {path}: the data set or its tokenizer has changed since (it was {meta['data']}, "
                f"now {self.data.key}); restore the files, or start a new run"
            )
        state = checkpoints.read_training(path)
        if missing := [name for name in STATE if name not in state]:
            raise ConfigError(f"checkpoint {path}: training.pt has no '{missing[0]}'")
        checkpoints.load_weights(self.model, path)
        self.set_up()
        for name in COUNTERS:
            setattr(self, name, state["counters"].get(name))  # an older version had fewer
        phase = self.schedule.phase(self.step) if self.step else Phase.NORMALIZED
        self.gate = self.schedule.value(self.step)
        self.model.set_gate(self.gate, phase)
        if phase is not Phase.NORMALIZED:
            self.enter_phase(phase)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for index, moments in state["optimizer"]["state"].items():
            moments |= {name: dist.share_of(moment, parameters[index]) for name, moment in moments.items()}
        self.optimizer.load_state_dict(state["optimizer"])
        self.calibration.load_state_dict(state["calibration"], self.device)
        self.anchor.load_state_dict(state["anchor"])
        self.anchor.eps /= self.calibration.kappa**2
        self.model.divide_eps(self.calibration.kappa)
        radial = state["interval"].pop("radial")
        self.log_scale.grad = None if radial is None else radial.to(self.device)
        saved = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in state["interval"].items()}
        self.interval = self.fresh_interval() | saved
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)
        self.last_probe = state["probe"]
        self.wandb_state = state["tracker"]
        self.saved_step = self.step
        self.clear_after(self.step)

    def catch_up(self, tracker: Tracker) -> None:
        """A checkpoint is older than its step's validation: take that from the metrics, or do it now."""
        if self.step == 0 or not self.validates_at(self.step):
            return
        rows = dist.decide(lambda: read_metrics(self.directory))
        logged = next((row for row in rows if row["step"] == self.step), {})
        if logged.get("val/loss") is None:
            tracker.log(self.step, self.validate())
        else:
            self.note_validation(logged["val/loss"])
            self.best_temperature = logged.get("val/best_temperature")
            self.val_loss_best_temperature = logged.get("val/loss_best_temperature")

    def write_down(self) -> None:
        """config.yaml, resolved, and data.json: what was read, dropped and repaired."""
        if dist.leads():
            data, directory = self.data, self.directory
            write_yaml(directory / "config.yaml", to_dict(self.config))
            report = {"key": data.key, "entry": str(data.entry), **data.report}
            text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
            write_text(directory / "data.json", text)

    def write_tokens(self) -> None:
        """probe_tokens.json: the radial gradient of single tokens of the probe batch, in theory and as it is."""
        model = self.whole_model()
        if dist.leads():
            tokens = radial_tokens(model, *self.probe_batch, PROBE_TOKENS)
            write_text(self.directory / "probe_tokens.json", json.dumps({"step": self.step} | finite(tokens)))

    def open_tracker(self) -> Tracker:
        return dist.in_turn(self._open_tracker, NoTracker)

    def _open_tracker(self) -> Tracker:
        return Tracker(
            self.directory,
            to_dict(self.config),
            self.config.tracking,
            name=self.directory.name,
            tokens_per_step=self.tokens_per_step,
            resume_step=self.step,
            state=self.wandb_state,
            say=self.say,
        )

    # -------------------------------------------------------------------------------------------- what a person reads

    def say(self, line: str) -> None:
        if self.progress is None:
            self._say(line)
        else:
            self.progress.say(line, self._say)

    def show_progress(self) -> None:
        if self.progress is not None:
            loss, steps = self.last_loss, self.interval["steps"]
            if self.device.type == "cpu" and steps:  # elsewhere reading it would wait for the device
                loss = self.interval["loss"].item() / steps
            self.progress.update(
                self.step,
                loss=loss,
                gate=self.gate,
                tokens_per_s=self.tokens_per_s,
                phase=self.phase.value,
            )

    def close_progress(self) -> None:
        if self.progress is not None:
            self.progress.close()

    def summary(self) -> dict[str, Any]:
        """What summary.json holds beyond the status."""
        keys = ("scale/final_rms_mean", "logits/norm_mean", "logits/abs_max", "radial/mean")
        return {
            "val_loss": self.val_loss,
            "best_temperature": self.best_temperature,
            "val_loss_best_temperature": self.val_loss_best_temperature,
            "best": None if self.best_loss is None else {"val_loss": self.best_loss, "step": self.best_step},
            "train_loss": self.last_loss,
            "steps": self.step,
            "tokens": self.tokens,
            "gate": self.gate,
            "norm": self.config.norm.name,
            "anchor": self.config.anchor.kind,
            "seed": self.config.seed,
            "model": self.config.model.name,
            "parameters": self.model.n_parameters(),
            "train_seconds": round(self.seconds, 3),  # without validation, probing and saving; over all resumes
            "scale_target": self.anchor.target,
            "drift": self.last_probe.get("scale/drift"),
            "mismatch": {"gate_0": self.closed_mismatch, "end": worst_mismatch(self.last_probe)},
            "c": {site: norm.c.item() for site, norm in self.model.gated_norms().items()},
            "dynamics": {key: self.last_probe[key] for key in keys if key in self.last_probe},
        }
