"""What a sweep will cost, told before it starts: tokens, hours here and on a named GPU, the gap that it can find."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from tapernorm.analysis.intervals import detectable
from tapernorm.config.options import Config
from tapernorm.config.resolve import resolve
from tapernorm.model.decoder import Decoder, build_model

PEAK = {
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "RTX4090": 165e12,
}  # bf16 FLOP/s, as the maker states
SPREAD = 0.5  # percent: the paired standard deviation of gaps at 1m, between 0.02 and 0.96 in docs/results.md
OTHER_IDS = 4096  # vocabulary where the tokenizer is not there yet to ask


def describe(configs: Sequence[Config]) -> Iterator[str]:
    """Lines on the cost of these runs, none of which has started. Measures for some seconds.

    Training takes 6 N + 6 L D T floating-point operations a token: N weights in matrix products, used once forward and
    twice backward, and attention over T/2 tokens on average (Kaplan et al. 2020, arXiv 2001.08361).
    """
    runs = [resolve(config, config.model.vocab_size or config.tokenizer.vocab_size or OTHER_IDS) for config in configs]
    tokens = [
        run.trainer.max_steps * run.trainer.batch_size * run.trainer.accumulation * run.model.n_ctx for run in runs
    ]
    flops = [count * per_token(run) for count, run in zip(tokens, runs, strict=True)]
    smallest = min(runs, key=per_token)
    rate = measured_rate(smallest)
    yield f"{len(runs)} jobs, {sum(tokens):,} tokens, {sum(flops):.3g} floating-point operations"
    threads = f"{rate / 1e9:.3g} GFLOP/s with {torch.get_num_threads()} threads, as model={smallest.model.name} has now"
    yield f"about {hours(sum(flops) / rate)} here, one after the other, at {threads}; validation comes on top"
    sweep, peak = runs[0].sweep, PEAK[runs[0].sweep.gpu]
    reached = (
        f"it reaches sweep.mfu={sweep.mfu:g} of its {peak / 1e12:.0f} TFLOP/s, as models above 100 M parameters may"
    )
    yield f"about {hours(sum(flops) / (sweep.mfu * peak))} on one {sweep.gpu}, if {reached}"
    seeds = len({run.seed for run in runs})
    if gap := detectable(SPREAD, seeds):
        yield f"{seeds} seeds find a paired gap of {gap:.2f} % with 80 % power, if it spreads by {SPREAD} % over seeds"
    else:
        yield "one seed has no spread: it shows no gap to be real"


def per_token(run: Config) -> float:
    """Floating-point operations of training on one token."""
    with torch.device("meta"):
        model = Decoder(run.model, run.norm)
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    head = run.model.vocab_size * run.model.d_model if model.head is None and run.model.vocab_size else 0
    return 6 * (weights + head) + 6 * run.model.n_layer * run.model.d_model * run.model.n_ctx


def measured_rate(run: Config) -> float:
    """Floating-point operations a second, forward and back: two of the model's blocks and its head, on 1,024 tokens."""
    run = replace(run, model=replace(run.model, n_layer=min(2, run.model.n_layer)))
    model = build_model(run)
    ids = torch.randint(model.embed.num_embeddings, (math.ceil(1024 / run.model.n_ctx), run.model.n_ctx))
    for _ in range(2):  # the first one also pays for fresh memory
        start = time.perf_counter()
        model.loss(ids, ids)[0].backward()
        seconds = time.perf_counter() - start
    return ids.numel() * per_token(run) / seconds


def hours(seconds: float) -> str:
    return f"{seconds / 3600:.2g} hours" if seconds >= 3600 else f"{max(seconds / 60, 1):.0f} minutes"
