"""What a run tells a person before it starts and after it has ended."""

from __future__ import annotations

import logging
import math
import shutil
import time

import torch

from tapernorm.config.schema import write_text
from tapernorm.runtime import dist
from tapernorm.runtime.device import autocast
from tapernorm.runtime.progress import Progress, clock
from tapernorm.runtime.record import REPORT_FILE
from tapernorm.training import checkpoint as checkpoints
from tapernorm.training.dynamics import worst_mismatch
from tapernorm.training.state import TrainingRun

log = logging.getLogger(__name__)


def introduce(run: TrainingRun) -> None:
    """State what is about to happen, with an estimate of its duration from one trial step."""
    config, trainer, schedule = run.config, run.config.trainer, run.schedule
    gated = len(run.model.gated_norms())
    together = f"{dist.size()} processes, each with " if dist.size() > 1 else ""
    kind = str(run.dtype).removeprefix("torch.") + (", compiled" if trainer.compile else "")
    log.info(f"{together}device {run.device}, {kind}, {torch.get_num_threads()} threads")
    log.info(
        f"model {config.model.name}: {run.model.n_parameters():,} parameters, "
        f"vocabulary {config.model.vocab_size:,}, norm {config.norm.name} "
        f"({gated} of {2 * config.model.n_layer + 1} norms tapered), anchor {config.anchor.kind}, seed {config.seed}"
    )
    tokens = trainer.max_steps * run.tokens_per_step
    epochs = tokens / run.batches.tokens_per_epoch
    log.info(f"tokens: {trainer.max_steps:,} steps of {run.tokens_per_step:,} = {tokens:,}, {epochs:.2f} epochs")
    if schedule.first_tapered_step is not None:
        taper = f"gate {schedule.shape} to 0 at step k_taper = {schedule.first_tapered_step}"
        log.info(f"schedule: normalized to step k_warmup = {schedule.k_warmup}, {taper}")
    else:
        taper = "constant gate" if gated else "no tapered layers"
        log.info(f"schedule: {taper}; the scale target is frozen at step k_warmup = {schedule.k_warmup}")
    if run.step:
        log.info(f"resumed after step {run.step}")
    left = trainer.max_steps - run.step
    if trainer.compile:
        log.info("ETA: shown once the first graph is compiled")
    elif run.sharded:
        log.info("ETA: shown once the first step is taken")
    elif left:
        log.info(f"ETA: {clock(trial_step(run) * left)} for {left:,} steps")
    log.info(f"run directory {run.directory}")
    warn_of_space(run)
    run.progress = Progress(trainer.max_steps, done=run.step, mode=trainer.progress)


def warn_of_space(run: TrainingRun) -> None:
    """Say so if the checkpoints that the run will keep do not fit on the disk of its directory."""
    trainer, size = run.config.trainer, checkpoints.expected_size(run.model)
    saves = math.ceil(trainer.max_steps / (trainer.save_interval or 1))
    most = min(trainer.keep_last + 2, saves)  # beside the last ones: the best, and the one that is being written
    free = shutil.disk_usage(run.directory).free
    if free < size * (most - len(checkpoints.list_checkpoints(run.directory))):
        log.warning(
            f"{in_units(free)} free in {run.directory}, but up to {most} checkpoints of {in_units(size)} come "
            f"to {in_units(most * size)}; make room, or lower trainer.keep_last={trainer.keep_last}"
        )


def in_units(n_bytes: float) -> str:
    """1.25 GB; three digits."""
    power = min(int(math.log10(max(n_bytes, 1)) // 3), 4)
    return f"{n_bytes / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def trial_step(run: TrainingRun) -> float:
    """Seconds of one forward and backward pass whose gradients are thrown away; steers nothing."""
    x, y = run.microbatches(run.step + 1)[0]
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    for _ in range(2):  # the first one also pays for fresh memory
        start = time.perf_counter()
        with autocast(run.device, run.dtype):
            loss, _ = run.model.loss(x, y)
        torch.autograd.grad(loss, parameters, allow_unused=True)
        loss.item()
    return (time.perf_counter() - start) * run.config.trainer.accumulation


def conclude(run: TrainingRun) -> None:
    """Samples, a readable summary, and the command that evaluates the run."""
    from tapernorm.runtime.typed import line  # here, because no step needs it

    if run.config.trainer.samples:
        write_samples(run)
    best = f", best {run.best_loss:.4f} at step {run.best_step}" if run.best_loss is not None else ""
    loss = math.nan if run.val_loss is None else run.val_loss
    log.info(f"finished: validation loss {loss:.4f} nats/token (perplexity {math.exp(min(loss, 700)):.2f}){best}")
    drift = run.last_probe.get("scale/drift")
    if drift is not None:
        log.info(
            f"  residual scale {run.last_probe['scale/final_rms_mean']:.3g}, {run.level:.3g} at k_warmup "
            f"(drift {drift:+.2f}, the log of their ratio); logit norm {run.last_probe['logits/norm_mean']:.4g}; "
            f"gate {run.gate:.4g}; {run.tokens:,} tokens in {clock(run.seconds)}"
        )
    closed, end = run.closed_mismatch, worst_mismatch(run.last_probe)
    if closed is not None and end is not None:
        log.info(f"  calib/mismatch, the worst ln(c r) of a tapered norm: {closed:.2f} at gate 0, {end:.2f} at the end")
    if run.config.report and (run.directory / REPORT_FILE).exists():
        log.info(f"charts: {run.directory / REPORT_FILE}")
    log.info("to evaluate it:")
    log.info(line("evaluate", checkpoint=run.directory))


def write_samples(run: TrainingRun) -> None:
    """Generate texts, say them and write them to samples.txt."""
    from tapernorm.model.generate import generate  # here, because a training step needs none
    from tapernorm.runtime.log import printable

    trainer, tokenizer, file = run.config.trainer, run.data.tokenizer, run.directory / "samples.txt"
    prompts, length = [[tokenizer.eot]] * trainer.samples, min(trainer.sample_tokens, run.config.model.n_ctx - 1)
    texts: list[str] = []
    try:
        rows = generate(run.whole_model(), prompts, length, eot=tokenizer.eot, seed=run.config.seed)
        texts = [printable(tokenizer.decode(row)) for row in rows]
    except Exception as error:  # such as logits that are not finite: the results stand all the same
        log.warning(f"no samples ({type(error).__name__}: {error})")
    if dist.leads():
        try:
            write_text(file, "\n<|endoftext|>\n".join(texts) + "\n")
        except OSError as error:
            log.warning(f"{file} cannot be written: {error.strerror}")
    for number, text in enumerate(texts, 1):
        log.info(f"sample {number}: {' '.join(text.split())}")
