"""What is measured of a run while it trains: metrics of its steps, probes, validations. They read and never steer."""

from __future__ import annotations

import json
import logging
import math
import time

from torch import Tensor

from tapernorm.config.schema import write_text
from tapernorm.method.calibration import DOUBTFUL_MISMATCH
from tapernorm.model.evaluate import evaluate
from tapernorm.runtime import dist
from tapernorm.runtime.device import autocast
from tapernorm.runtime.record import finite, read_metrics
from tapernorm.training import dynamics
from tapernorm.training.dynamics import UpdateRatio
from tapernorm.training.optim import learning_rate
from tapernorm.training.saving import note_validation
from tapernorm.training.state import TrainingRun
from tapernorm.training.tracking import Tracker

log = logging.getLogger(__name__)

Metrics = dict[str, float | None]
PROBE_TOKENS = 512  # of which probe_tokens.json has the radial gradient


def of_steps(run: TrainingRun, grad_norm: Tensor, ratio: UpdateRatio | None) -> Metrics:
    """Averages since the last line and the state of this step; starts a new interval."""
    steps = run.interval["steps"]
    run.last_loss = run.interval["loss"].item() / steps
    start, tokens = run.interval_start or (time.perf_counter(), run.tokens)
    elapsed = time.perf_counter() - start
    run.seconds += elapsed
    run.tokens_per_s = (run.tokens - tokens) / max(elapsed, 1e-9)
    metrics: Metrics = {
        "train/loss": run.last_loss,
        "gate/g": run.gate,
        "optim/lr": learning_rate(run.step, run.config.optim),
        "grad/norm": grad_norm.item(),
        "radial/train_mean": None if run.log_scale.grad is None else run.log_scale.grad.item() / steps,
        "throughput/tokens_per_s": run.tokens_per_s,
        "update/ratio": None if ratio is None else ratio.value(),
    }
    if run.anchor.target is not None:
        metrics["scale/target"] = run.anchor.target
    if run.anchor.acts(run.step):
        weighted, strength = run.interval["anchor"].item() / steps, run.anchor.strength
        metrics["anchor/weighted"] = weighted
        metrics["anchor/loss"] = weighted / strength if strength else 0.0
        metrics["anchor/force"] = run.interval["force"].item() / steps
    run.interval = run.fresh_interval()
    run.log_scale.grad = None
    run.interval_start = time.perf_counter(), run.tokens
    return metrics


def probe(run: TrainingRun) -> Metrics:
    """The dynamics on the probe batch, the drift since k_warmup, and a warning where c does not fit any more."""
    calibrated = 0 < run.schedule.k_warmup <= run.step
    run.last_probe = metrics = dynamics.probe(run.whole_model(), *run.probe_batch, calibrated=calibrated)
    level = metrics["scale/final_rms_mean"]
    assert level is not None
    if run.step == run.schedule.k_warmup:
        run.level = level
    if run.level and level > 0:
        metrics["scale/drift"] = math.log(level / run.level)
    worst = dynamics.worst_mismatch(metrics)
    if run.step == run.schedule.first_tapered_step:
        run.closed_mismatch = worst
    if worst is not None and worst > DOUBTFUL_MISMATCH and 0 < run.gate < 1 and not run.warned:
        run.warned = True
        site = next(name for name, value in metrics.items() if "mismatch" in name and abs(value or 0.0) == worst)
        remedy = "calibration=tracked"
        if run.calibration.tracks:
            # The loss pulls at the final norm's scale, and c does not follow there.
            anchored, slower = "an anchor, as in anchor=mean_log,", "a lower optim.lr or a later gate.k_taper"
            remedy = anchored if site.endswith(".final") else slower
        log.warning(
            f"step {run.step}, gate {run.gate:.3g}: c is off by a factor of {math.exp(worst):.2f} "
            f"({site}); {remedy} may help"
        )
    return metrics


def validate(run: TrainingRun) -> Metrics:
    """Loss over the fixed validation tokens, the last time also at the best temperature; remembers the best."""
    batch_size, last = run.config.trainer.val_batch_size, run.step == run.config.trainer.max_steps
    result = evaluate(run.whole_model(), *run.val_batch, batch_size, autocast(run.device, run.dtype), last)
    note_validation(run, result.loss)
    log.info(f"step {run.step}: validation loss {result.loss:.4f} over {result.tokens:,} tokens, gate {run.gate:.4g}")
    metrics: Metrics = {"val/loss": result.loss, "val/perplexity": result.perplexity}
    if last:
        metrics["val/best_temperature"] = result.best_temperature
        metrics["val/loss_best_temperature"] = result.loss_best_temperature
    run.last_validation = metrics
    return metrics


def catch_up(run: TrainingRun, tracker: Tracker) -> None:
    """A checkpoint is older than its step's validation: take that from the metrics, or do it now."""
    if run.step == 0 or not run.validates_at(run.step):
        return
    rows = dist.decide(lambda: read_metrics(run.directory))
    logged = next((row for row in rows if row["step"] == run.step), {})
    if logged.get("val/loss") is None:
        tracker.log(run.step, validate(run))
    else:
        note_validation(run, logged["val/loss"])
        run.last_validation = logged


def write_tokens(run: TrainingRun) -> None:
    """probe_tokens.json: the radial gradient of single tokens of the probe batch, in theory and as it is."""
    model = run.whole_model()
    if dist.leads():
        tokens = dynamics.radial_tokens(model, *run.probe_batch, PROBE_TOKENS)
        write_text(run.directory / "probe_tokens.json", json.dumps({"step": run.step} | finite(tokens)))
