"""Timings that can be believed: arms interleaved in random order, ratios of medians, bootstrap intervals."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """median(a) / median(b) with a 95 % interval."""

    value: float
    low: float
    high: float


def ratio(a: Sequence[float], b: Sequence[float], groups: int = 1) -> Ratio:
    """Ratio of the medians of paired samples (n,), with a percentile bootstrap interval.

    The i-th of both were measured in the same round, so a resample takes both: what slows a whole round down cancels.
    With `groups`, samples that follow each other in as many equal parts had something in common, such as their place
    in memory; a resample then draws whole groups first and samples within them, and the interval covers both. Few
    groups show too little of their spread, so on the logarithmic scale it is wider by Student's quantile over the
    normal one and by sqrt(G/(G-1)), as the t interval of a mean of G is beside its bootstrap.
    """
    numerator, denominator = np.asarray(a), np.asarray(b)
    size = len(numerator) // groups
    rng = np.random.default_rng(0)
    within = rng.integers(size, size=(RESAMPLES, groups, size))
    group = rng.integers(groups, size=(RESAMPLES, groups, 1)) if groups > 1 else 0
    draws = (group * size + within).reshape(RESAMPLES, -1)
    ratios = np.median(numerator[draws], axis=1) / np.median(denominator[draws], axis=1)
    value = np.median(numerator) / np.median(denominator)
    wider = 1.0
    if groups > 1:
        from scipy import stats  # takes most of a second, so only where it is needed

        wider = stats.t.ppf(0.975, groups - 1) / stats.norm.ppf(0.975) * np.sqrt(groups / (groups - 1))
    low, high = value * (np.quantile(ratios, [0.025, 0.975]) / value) ** wider
    return Ratio(float(value), float(low), float(high))


def interleave(
    arms: Mapping[str, Callable[[], float]],
    rounds: int,
    order: random.Random,
    done: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Run every arm once a round, in a new random order each time; an arm returns what it measured, then `done` is
    called."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name in order.sample(list(arms), len(arms)):
            samples[name].append(arms[name]())
            done()
    return samples


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall time of `work`, on a GPU until it has really been done."""
    wait = (lambda: None) if device.type == "cpu" else partial(torch.accelerator.synchronize, device)
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def copy_bandwidth(device: torch.device, n_bytes: int = 2**28) -> float:
    """Bytes per second that a copy of a large buffer reads and writes, the best of ten."""
    source = torch.empty(n_bytes // 4, dtype=torch.float32, device=device).zero_()
    target = torch.empty_like(source)
    target.copy_(source)
    best = min(seconds(lambda: target.copy_(source), device) for _ in range(10))
    return 2 * source.numel() * source.element_size() / best
