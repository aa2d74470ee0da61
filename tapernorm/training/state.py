"""What one training run holds and does in a step; tapernorm.training.loop says in which order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tapernorm.config.options import Config
from tapernorm.data.batches import Batches, validation_windows
from tapernorm.method.anchor import ScaleAnchor
from tapernorm.method.calibration import Calibration, describe
from tapernorm.method.gate import GateSchedule, Phase
from tapernorm.model.decoder import Decoder, build_model
from tapernorm.runtime import dist
from tapernorm.runtime.device import autocast, pick_dtype
from tapernorm.runtime.progress import Progress
from tapernorm.training.dynamics import first_nonfinite, worst_mismatch
from tapernorm.training.optim import add_taper_gains, build_optimizer, drop_state_of_frozen, rescale

if TYPE_CHECKING:
    from tapernorm.data.prepare import Prepared

log = logging.getLogger(__name__)

HOLD_INTERVAL = 5  # steps
Microbatches = list[tuple[Tensor, Tensor]]  # inputs and targets, (B, T) each


class Divergence(RuntimeError):
    """A loss or gradient that is not finite. The weights are those before the step; `summary` is the run's so far."""

    def __init__(self, step: int, gate: float, layer: str, summary: dict[str, Any]) -> None:
        super().__init__(
            f"the loss or its gradient is not finite at step {step}, gate {gate:.4g}; first in {layer}; "
            "a lower optim.lr or a longer gate.k_warmup may help"
        )
        self.step, self.gate, self.layer, self.summary = step, gate, layer, summary


@dataclass(eq=False)
class Counters:
    """What a run has counted and found so far; its checkpoints hold all of this."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of training, up to the last logged line
    best_loss: float | None = None
    best_step: int | None = None
    best_saved_loss: float | None = None
    best_saved_step: int | None = None
    val_loss: float | None = None
    last_loss: float | None = None
    level: float | None = None  # of the residual stream on the probe batch at k_warmup
    closed_mismatch: float | None = None  # the worst one at the first step with gate 0


class TrainingRun(Counters):
    """Model, optimizer, schedules, averages and counters of one run."""

    def __init__(self, config: Config, directory: Path, data: Prepared, device: torch.device) -> None:
        super().__init__()
        trainer, shape = config.trainer, config.model
        assert shape.norm_eps is not None
        self.config, self.directory, self.data, self.device = config, directory, data, device
        self.progress = Progress(trainer.max_steps, mode="none")
        self.dtype = pick_dtype(trainer.dtype, device)
        # For whatever draws from torch's own generator; initialization, batches and dropout masks do not depend on it.
        torch.manual_seed(config.seed)
        self.model = build_model(config, device).train()
        self.schedule = GateSchedule.from_config(config)
        self.phase, self.gate = Phase.NORMALIZED, 1.0
        k_warmup, tapered = self.schedule.k_warmup, self.schedule.first_tapered_step
        k_last = None if tapered is None else tapered - 1
        self.calibration = Calibration(config.calibration, k_warmup, self.model.gated_norms(), k_last)
        self.anchor = ScaleAnchor(config.anchor, k_warmup=k_warmup, family=shape.norm_family, eps=shape.norm_eps)
        n_ctx, valid = shape.n_ctx, data.valid.windows(shape.n_ctx)
        self.batches = Batches(data.train.tokens, n_ctx, trainer.batch_size, config.seed, data.train.windows(n_ctx))
        self.val_batch = validation_windows(data.valid.tokens, n_ctx, trainer.val_tokens, valid)
        inputs, targets = validation_windows(data.valid.tokens, n_ctx, trainer.probe_size * n_ctx, valid)
        self.probe_batch = inputs.to(device), targets.to(device)
        self.tokens_per_step = trainer.batch_size * n_ctx
        # Steps that deserve every measurement: the first, the end of each phase, the last.
        self.landmarks = {1, k_warmup, tapered, trainer.max_steps} - {None, 0}
        self.log_scale = torch.zeros((), device=device, requires_grad=True)
        self.first_bad = torch.zeros((), dtype=torch.int64, device=device)
        self.interval = self.fresh_interval()
        self.interval_start: tuple[float, int] | None = None  # time and tokens
        self.tokens_per_s = 0.0
        self.saved_step: int | None = None
        self.last_probe: dict[str, float | None] = {}
        self.last_validation: dict[str, float | None] = {}
        self.warned = False
        self.tracker_state: dict[str, Any] | None = None

    def initialize(self) -> None:
        """Start from the weights that model.init names, or from the random ones that are there."""
        if self.config.model.init != "random":
            from tapernorm.training import pretrained  # here, because few runs need Hugging Face's forms

            pretrained.initialize(self.model, self.config, self.data.tokenizer)
        if self.schedule.k_warmup == 0:  # nothing to calibrate on: c = 1 and gamma_t starts as gamma
            for norm in self.model.taper_norms().values():
                norm.calibrate(1.0)
        self.set_up()

    def set_up(self) -> None:
        """Now that the weights are there: share them between the processes if wanted, compile, build the optimizer."""
        trainer = self.config.trainer
        self.sharded = dist.size() > 1 and trainer.parallel == "fsdp"
        if self.sharded:
            dist.shard(self.model, self.model.blocks, methods=("loss", "trunk", "readout"))
        self.loss = torch.compile(self.model.loss, dynamic=False) if trainer.compile else self.model.loss
        self.optimizer = build_optimizer(self.model, self.config.optim)

    def whole_model(self) -> Decoder:
        """The model with all of its weights in this process, to look at: itself, or a copy if it is sharded."""
        if not self.sharded:
            return self.model
        with self.device:
            copy = Decoder(self.model.config, self.config.norm)
        copy.load_state_dict({name: dist.whole(tensor) for name, tensor in self.model.state_dict().items()})
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
                log.info(f"step {step}, gate {gate:.4g}: {', '.join(removed)} by a frozen scale from here on")
        self.enter_phase(phase)
        self.gate = gate

    def enter_phase(self, phase: Phase) -> None:
        """gamma_t joins the optimizer when the taper starts; gamma's moments go when it ends."""
        if phase is not self.phase and self.phase is Phase.NORMALIZED:
            add_taper_gains(self.optimizer, self.model, self.config.optim)
        if phase is not self.phase and phase is Phase.TAPERED:
            drop_state_of_frozen(self.optimizer)
        self.phase = phase

    def microbatches(self, step: int) -> Microbatches:
        """This process's rows of a step's batch in `trainer.accumulation` equal parts: a function of seed and step."""
        parts = self.config.trainer.accumulation
        inputs, targets = self.batches.batch(step, dist.rows(self.config.trainer.batch_size))
        if self.device.type == "cuda":  # only a copy from pinned memory does not wait
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        inputs, targets = inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)
        return list(zip(inputs.chunk(parts), targets.chunk(parts), strict=True))

    def seed_dropout(self, step: int, part: int) -> None:
        """Before a microbatch's forward: make its masks a function of the seed, the step and its place in the batch.

        So they need no state that could be lost, are the baseline's in every mode, and can be drawn again.
        """
        if self.config.model.dropout:
            part += dist.rank() * self.config.trainer.accumulation
            (seed,) = np.random.SeedSequence((self.config.seed, step, part)).generate_state(1, np.uint64)
            torch.manual_seed(int(seed))

    def batch_level(self, step: int, micro: Microbatches) -> Tensor | None:
        """The anchor's `level` of the whole batch, from forwards without gradients; None where it needs none."""
        if not self.anchor.needs_batch_mean or len(micro) * dist.size() == 1:
            return None
        return self.batch_mean(step, micro, lambda x, y: self.anchor.level(self.anchor.scale(self.model.trunk(x))))

    @torch.no_grad()
    def batch_mean(self, step: int, micro: Microbatches, measure: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
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
        sums = [self.log_scale.grad, *(self.interval[name] for name in ("loss", "anchor", "force"))]
        gradients = [parameter.grad for parameter in self.model.parameters()]
        dist.average([tensor for tensor in [*sums, *gradients] if tensor is not None])

    def guard(self, step: int, grad_norm: Tensor) -> None:
        """Make the optimizer skip, on the device and without waiting for it, a step that is not finite."""
        bad = ~torch.isfinite(self.interval["loss"] + grad_norm) | (self.first_bad > 0)
        self.optimizer.found_inf = bad.float()  # type: ignore[attr-defined]  # what torch's GradScaler sets
        self.first_bad = torch.where(bad & (self.first_bad == 0), step, self.first_bad)

    def hold_level(self, step: int) -> None:
        """`calibration.level` while the gate is open: the stream is brought back to it, the function unchanged.

        s_tgt and the level at k_warmup go with it: anchors and drift are about the stream that the loss sees.
        """
        wanted = self.config.calibration.level if self.config.calibration.hold else None
        due = self.schedule.k_warmup < step <= self.schedule.k_taper and step % HOLD_INTERVAL == 0
        if wanted is None or not due or not self.model.is_homogeneous:
            return
        kappa = self.mean_scale() / wanted
        rescale(self.model, self.optimizer, kappa, eps=False)
        self.calibration.follow(kappa)
        self.anchor.follow(kappa)
        if self.level is not None:
            self.level /= kappa

    def finish_step(self, step: int) -> None:
        self.step = step
        self.tokens += self.tokens_per_step
        self.interval["steps"] += 1

    def stop_if_not_finite(self, observed: bool) -> None:
        """Raise Divergence naming the step, the gate and the first bad layer.

        Looks where that needs no synchronisation (on the CPU) and before anything is logged, saved or validated.
        """
        if not (observed or self.device.type == "cpu") or self.first_bad.item() == 0:
            return
        step = int(self.first_bad.item())
        gate, model = self.schedule.value(step), self.whole_model()
        model.set_gate(gate, self.schedule.phase(step))
        layer = None
        for part, (x, y) in enumerate(self.microbatches(step)):
            self.seed_dropout(step, part)
            with autocast(self.device, self.dtype):
                layer = layer or first_nonfinite(model, x, y)
        layer = next(filter(None, dist.gather(layer)), None)
        other = "the gradient of the scale loss" if self.anchor.active else "the norm of the gradient"
        raise Divergence(step, gate, layer or other, self.summary() | {"steps": step - 1})

    # -------------------------------------------------------------------------------------------- at the end of warmup

    def calibrate(self) -> dict[str, float]:
        """After step k_warmup: the level of the stream, c and gamma_t of every tapered layer, s_tgt and lambda."""
        wanted, norm = self.config.calibration.level, self.config.norm.name
        if wanted is not None and self.model.is_homogeneous:
            kappa = self.mean_scale() / wanted
            rescale(self.model, self.optimizer, kappa)
            self.calibration.rescaled(kappa)
            self.anchor.eps /= kappa**2
            log.info(f"step {self.step}: the residual stream is divided by {kappa:.4g}; the function stays the same")
        elif wanted is not None:
            log.info(f"calibration.level={wanted:g}: not for norm={norm}; the stream stays as it is")
        with self.calibration.measuring():
            target = self.mean_scale()
        self.anchor.set_target(target)
        chosen = self.calibration.finish()
        kind = self.calibration.kind
        log.info(f"calibrated after step {self.step} ({kind})" if chosen else f"end of the warmup, step {self.step}")
        for line in [*describe(chosen), self.anchor.describe()]:
            log.info(line)
        return {"scale/target": target, "anchor/lambda": self.anchor.strength}

    def mean_scale(self) -> float:
        """Mean of s(h_L) over the tokens of this step's batch; the whole model runs, so that every norm can record."""
        micro = self.microbatches(self.step)
        return self.batch_mean(self.step, micro, lambda x, y: self.anchor.scale(self.model.loss(x, y)[1]).mean()).item()

    # --------------------------------------------------------------------------------------------- what is on record

    def fresh_interval(self) -> dict[str, Any]:
        """Sums since the last logged line: tensors, so that they need no synchronisation."""
        return {name: torch.zeros((), device=self.device) for name in ("loss", "anchor", "force")} | {"steps": 0}

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

    def validates_at(self, step: int) -> bool:
        return step % (self.config.trainer.val_interval or 1) == 0 or step in self.landmarks

    def show_progress(self) -> None:
        loss, steps = self.last_loss, self.interval["steps"]
        if self.device.type == "cpu" and steps:  # elsewhere reading it would wait for the device
            loss = self.interval["loss"].item() / steps
        self.progress.update(
            self.step, loss=loss, gate=self.gate, tokens_per_s=self.tokens_per_s, phase=self.phase.value
        )

    def summary(self) -> dict[str, Any]:
        """What summary.json holds beyond the status."""
        keys = ("scale/final_rms_mean", "logits/norm_mean", "logits/abs_max", "radial/mean")
        return {
            "val_loss": self.val_loss,
            "best_temperature": self.last_validation.get("val/best_temperature"),
            "val_loss_best_temperature": self.last_validation.get("val/loss_best_temperature"),
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
