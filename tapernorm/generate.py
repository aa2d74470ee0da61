"""Sampling text from a model."""

from __future__ import annotations

import torch
from torch import Tensor

from tapernorm.model import Decoder


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: Tensor,
    max_tokens: int,
    *,
    eot: int | None = None,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[list[int]]:
    """Continue every row of prompt ids (B, T) by at most `max_tokens`; returns the new ids of each row.

    temperature 0 is greedy. A row ends at `eot`, which is not returned. At the context limit the oldest tokens leave
    the window. The draws come from a generator of their own, so sampling never disturbs training.
    """
    device = model.embed.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    was_training = model.training
    model.eval()
    ids = prompt.to(device)
    rows: list[list[int]] = [[] for _ in range(ids.shape[0])]
    running = [True] * len(rows)
    for _ in range(max_tokens):
        logits = model(ids[:, -model.config.n_ctx :])[:, -1].float()
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            new = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
        for row, token in enumerate(new.flatten().tolist()):
            if running[row] and token == eot:
                running[row] = False
            if running[row]:
                rows[row].append(token)
        if not any(running):
            break
        ids = torch.cat([ids, new], dim=1)
    model.train(was_training)
    return rows
