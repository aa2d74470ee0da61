"""The loss of a model over fixed windows, and at the best temperature."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tapernorm.model.decoder import Decoder
from tapernorm.runtime import dist
from tapernorm.runtime.record import perplexity

CACHED = 2**18  # logits that scaled_losses takes at a time on a CPU: 1 MB stays in its cache, 2.5 times as fast
HELD = 2**26  # the same on a GPU
SEARCHED = 4096  # tokens that the search for T* starts on at least
EVERY = 16  # and of the windows, every so many-th
PASSES = 12  # of that search at most
REST = 1e-6  # nats that the loss at T* may lack


@dataclass(frozen=True)
class Evaluation:
    """Mean cross-entropy in nats per token over `tokens` predicted tokens, and at T* (see `at_best_temperature`)."""

    loss: float
    tokens: int
    best_temperature: float | None = None
    loss_best_temperature: float | None = None

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)


def scaled_losses(logits: Tensor, targets: Tensor, b: float) -> Tensor:
    """(3, n): l(b) = ln sum_i exp(b z_i) - b z_y, l'(b) = E_p[z] - z_y and l''(b) = Var_p(z), p = softmax(b z).

    logits z (n, V), targets y (n,). l is convex in b.
    """
    rows = max(1, (CACHED if logits.device.type == "cpu" else HELD) // logits.shape[1])
    parts = []
    for part, y in zip(logits.split(rows), targets.split(rows), strict=True):
        z = part - part.amax(-1, keepdim=True)
        own = z.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        weights = (b * z).exp_()
        total = weights.sum(-1)
        mean = weights.mul_(z).sum(-1) / total
        variance = weights.mul_(z).sum(-1) / total - mean.square()
        parts.append(torch.stack([total.log() - b * own, mean - own, variance]))
    return torch.cat(parts, 1)


@torch.no_grad()
def token_losses(
    model: Decoder,
    inputs: Tensor,
    targets: Tensor,
    batch_size: int = 8,
    autocast: AbstractContextManager | None = None,
    on_batch: Callable[[Tensor], None] | None = None,
    b: float | None = None,
) -> Tensor:
    """Cross-entropy (1, N, T) of every token of windows (N, T), in nats: float32 on the CPU, finite or not.

    With `b` (4, N, T): after it the three `scaled_losses`. Runs the uncompiled model; the model's mode is restored.
    `on_batch` sees each batch's losses.
    """
    device = model.embed.weight.device
    was_training = model.training
    model.eval()
    parts = []
    with autocast or nullcontext():
        for x, y in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
            logits, own = model(x.to(device)).flatten(0, 1).float(), y.flatten().to(device)
            found = F.cross_entropy(logits, own, reduction="none").unsqueeze(0)
            if b is not None:
                found = torch.cat([found, scaled_losses(logits, own, b)])
            parts.append(found.cpu().view(-1, *y.shape))
            if on_batch:
                on_batch(parts[-1][0])
    model.train(was_training)
    return torch.cat(parts, 1)


Measure = Callable[[int, float | None], Tensor]


def newton(measure: Measure, every: int, b: float) -> tuple[Tensor, float, float]:
    """Newton's method for argmin_b L(b), mean over every so many-th window: what was last measured, b, the next step.

    A step changes b by a factor e at most and stays between the b known to be too small and too large. The last one,
    d = -L'/L'', is left to be read off the parabola: what that lacks, of order d^3, is estimated as L'' |d|^3 / 2b.
    Not found (b NaN): a loss is not finite, or smaller the smaller b is.
    """
    low, high = 0.0, math.inf
    for _ in range(PASSES):
        values = measure(every, b)
        slope, curvature = values[2:].double().flatten(1).mean(1).tolist()
        step = -slope / max(curvature, 1e-30)
        if not math.isfinite(slope + curvature):
            break
        if abs(step) < b and abs(slope * step * step) / (2 * b) < REST:
            return values, b, step
        low, high = (b, high) if step > 0 else (low, b)
        b = min(max(b + step, b / math.e), b * math.e)
        if not low < b < high:
            b = (low + high) / 2
    return values, math.nan, 0.0


def at_best_temperature(measure: Measure, n_tokens: int) -> tuple[Tensor, float | None, Tensor | None]:
    """The losses, T* = argmin_T mean CE(z / T), and the losses at T*; None where there is no such T.

    measure(every, b): `token_losses` of every so many-th window, or their mean over N and T with the dimensions kept.
    A search on a sixteenth of the windows leaves one whole pass, at times two, for what all of them say.
    """
    _, b, step = newton(measure, min(EVERY, max(1, n_tokens // SEARCHED)), 1.0)
    if math.isnan(b):
        return measure(1, None)[0], None, None
    (losses, scaled, first, second), b, step = newton(measure, 1, b + step)
    if math.isnan(b):
        return losses, None, None
    return losses, 1 / (b + step), scaled + step * first + step**2 / 2 * second


def evaluate(
    model: Decoder,
    inputs: Tensor,
    targets: Tensor,
    batch_size: int = 8,
    autocast: AbstractContextManager | None = None,
    best_temperature: bool = False,
) -> Evaluation:
    """Mean loss over windows (N, T) and, if wanted, T* and the loss there (see `at_best_temperature`).

    Every token counts once, so the batch size does not matter (beyond rounding). The sums run in float64 on the CPU.
    Several processes share the batches; the sums are the same, and the same in each.
    """

    def means(every: int, b: float | None) -> Tensor:
        def sums(batch: tuple[Tensor, Tensor]) -> list[float]:
            return [part.sum().item() for part in token_losses(model, *batch, batch_size, autocast, b=b).double()]

        x, y = inputs[::every], targets[::every]
        batches = list(zip(x.split(batch_size), y.split(batch_size), strict=True))
        totals = zip(*dist.divided(sums, batches), strict=True)
        return torch.tensor([[[sum(total) / y.numel()]] for total in totals], dtype=torch.float64)

    n_tokens = targets.numel()
    if not best_temperature:
        return Evaluation(means(1, None).item(), n_tokens)
    loss, temperature, best = at_best_temperature(means, n_tokens)
    return Evaluation(loss.item(), n_tokens, temperature, None if best is None else best.item())
