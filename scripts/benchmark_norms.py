"""What a norm costs in each phase: forward and backward of the layer alone, against the framework's RMSNorm.

All arms run interleaved in random order in one process, eager, on the CPU; a second RMSNorm is the control. Prints
the ratio of medians with a 95 % bootstrap interval.

    python scripts/benchmark_norms.py [width ...]
"""

import argparse
import random
from functools import partial
from statistics import median

import torch
from torch import nn

from tapernorm.bench.timing import interleave, ratio, seconds
from tapernorm.method.gate import Phase
from tapernorm.method.norms import TaperNorm
from tapernorm.runtime.device import keep_freed_memory

EPS, BATCH, TIME = 1e-6, 8, 512
WARMUP, REPEATS = 30, 270


def taper(dim: int, gate: float, phase: Phase, recording: bool = False) -> TaperNorm:
    norm = TaperNorm(dim, EPS)
    norm.set_gate(gate, phase)
    norm.recording = recording
    return norm


def measure(dim: int) -> dict[str, list[float]]:
    """Seconds of every repeat of every arm, REPEATS each, on a stream of shape (BATCH, TIME, dim)."""
    h, gradient = torch.randn(BATCH, TIME, dim, requires_grad=True), torch.randn(BATCH, TIME, dim)
    arms: dict[str, nn.Module] = {
        "RMSNorm": nn.RMSNorm(dim, eps=EPS),
        "RMSNorm again": nn.RMSNorm(dim, eps=EPS),
        "normalized": taper(dim, 1.0, Phase.NORMALIZED),
        "normalized, recording": taper(dim, 1.0, Phase.NORMALIZED, recording=True),
        "tapering": taper(dim, 0.5, Phase.TAPERING),
        "tapered": taper(dim, 0.0, Phase.TAPERED),
    }

    def run(norm: nn.Module) -> float:
        elapsed = seconds(lambda: norm(h).backward(gradient), h.device)
        h.grad = None
        return elapsed

    runs = {name: partial(run, norm) for name, norm in arms.items()}
    order = random.Random(0)
    interleave(runs, WARMUP, order)
    return interleave(runs, REPEATS, order)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("width", type=int, nargs="*", default=[64, 512], help="of the stream; default: 64 512")
    widths = parser.parse_args().width
    keep_freed_memory()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, {BATCH} x {TIME} tokens")
    for dim in widths:
        samples = measure(dim)
        for name, values in samples.items():
            found = ratio(values, samples["RMSNorm"])
            print(
                f"width {dim:4}  {name:<22} {1e6 * median(values):8.0f} us  {found.value:.2f} x RMSNorm  "
                f"({found.low:.2f} to {found.high:.2f})"
            )


if __name__ == "__main__":
    main()
