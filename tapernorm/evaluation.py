"""Deterministic losses over a fixed set of tokens."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tapernorm.model import Decoder


@dataclass(frozen=True)
class Evaluation:
    """Mean cross-entropy in nats per token over `tokens` predicted tokens."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def evaluate(
    model: Decoder,
    inputs: Tensor,
    targets: Tensor,
    batch_size: int = 8,
    autocast: AbstractContextManager | None = None,
) -> Evaluation:
    """Mean loss over windows (N, T). Every token counts once, so the batch size does not matter (beyond rounding).

    The sum runs in float64 on the CPU. Runs the uncompiled model; the model's mode is restored.
    """
    device = model.embed.weight.device
    was_training = model.training
    model.eval()
    total = 0.0
    with autocast or nullcontext():
        for start in range(0, inputs.shape[0], batch_size):
            logits = model(inputs[start : start + batch_size].to(device))
            wanted = targets[start : start + batch_size].to(device)
            losses = F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="none")
            total += losses.double().sum().item()
    model.train(was_training)
    return Evaluation(loss=total / targets.numel(), tokens=targets.numel())
