"""What a norm costs in each phase: forward and backward of the layer alone, against the framework's RMSNorm.

All arms run interleaved in random order in one process, eager, on the CPU; a second RMSNorm is the control. Prints
the ratio of medians with a 95 % bootstrap interval.

    python scripts/benchmark_norms.py [width ...]
"""

import random
import sys
import time

import numpy as np
import torch
from torch import nn

from tapernorm.device import keep_freed_memory
from tapernorm.gate import Phase
from tapernorm.norms import TaperNorm

EPS, BATCH, TIME = 1e-6, 8, 512
WARMUP, REPEATS, RESAMPLES = 30, 270, 1000


def taper(dim: int, gate: float, phase: Phase, recording: bool = False) -> TaperNorm:
    norm = TaperNorm(dim, EPS)
    norm.set_gate(gate, phase)
    norm.recording = recording
    return norm


def measure(dim: int) -> dict[str, np.ndarray]:
    """Seconds of every repeat of every arm, (REPEATS,) each, on a stream of shape (BATCH, TIME, dim)."""
    h, gradient = torch.randn(BATCH, TIME, dim, requires_grad=True), torch.randn(BATCH, TIME, dim)
    arms: dict[str, nn.Module] = {
        "RMSNorm": nn.RMSNorm(dim, eps=EPS),
        "RMSNorm again": nn.RMSNorm(dim, eps=EPS),
        "normalized": taper(dim, 1.0, Phase.NORMALIZED),
        "normalized, recording": taper(dim, 1.0, Phase.NORMALIZED, recording=True),
        "tapering": taper(dim, 0.5, Phase.TAPERING),
        "tapered": taper(dim, 0.0, Phase.TAPERED),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    order = random.Random(0)
    for _ in range(WARMUP + REPEATS):
        for name in order.sample(list(arms), len(arms)):
            start = time.perf_counter()
            arms[name](h).backward(gradient)
            seconds[name].append(time.perf_counter() - start)
            h.grad = None
    return {name: np.array(values[WARMUP:]) for name, values in seconds.items()}


def main() -> None:
    keep_freed_memory()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, {BATCH} x {TIME} tokens")
    for dim in [int(argument) for argument in sys.argv[1:]] or [64, 512]:
        seconds = measure(dim)
        base, draws = seconds["RMSNorm"], np.random.default_rng(0).integers(REPEATS, size=(RESAMPLES, REPEATS))
        for name, values in seconds.items():
            ratios = np.median(values[draws], axis=1) / np.median(base[draws], axis=1)
            low, high = np.quantile(ratios, [0.025, 0.975])
            median = np.median(values)
            print(
                f"width {dim:4}  {name:<22} {1e6 * median:8.0f} us  {median / np.median(base):.2f} x RMSNorm  "
                f"({low:.2f} to {high:.2f})"
            )


if __name__ == "__main__":
    main()
