"""New ids from a model: prefill, then one token at a time, each row as if it were alone.

At the context limit the window is cropped, never overrun: a row of n tokens is read from token `window_start(n)` on,
which is 0 up to n_ctx tokens, and beyond it advances by half a context at a time. So between half a context and a whole
one is always read, at the positions that training knew; one prompt forward pays for half a context of cheap steps; and
because the start depends on n alone, a continued continuation is the longer one, with the cache and without it.

Shape legend: B rows, T time, V vocabulary, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tapernorm.config.schema import ConfigError
from tapernorm.model.cache import KVCache
from tapernorm.model.decoder import Decoder
from tapernorm.model.lean import lean


class NotFinite(RuntimeError):
    """Logits that are no numbers: there is no next token to choose."""


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]] | Tensor,
    max_tokens: int,
    *,
    eot: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    cache: bool = True,
    ignore_eot: bool = False,
    on_token: Callable[[int, int | None], None] | None = None,
) -> list[list[int]]:
    """Continue every prompt, of any length from 1, by at most `max_tokens` ids; returns the new ids of each row.

    temperature 0 is greedy; otherwise ids are drawn from softmax(logits / temperature), limited as in `candidates`. A
    row ends at `eot`, which is not returned; with `ignore_eot` it is an id like any other. A row's draws depend on
    (seed, row) alone, and its ids, up to rounding, on no other row; training's generators are left alone. `cache=False`
    computes every token from the whole window. `on_token(row, id)` hears of each new id as it is chosen, and of the
    row's end as `on_token(row, None)`.

    The context limit: see the module. Raises ConfigError, one line, for unusable arguments, and NotFinite.
    """
    texts: list[list[int]] = [ids.tolist() if isinstance(ids, Tensor) else list(ids) for ids in prompts]
    _check(texts, model.embed.num_embeddings, max_tokens, temperature, top_k, top_p)
    n_ctx = model.config.n_ctx
    cache = cache and n_ctx > 1  # a window of one token has nothing before it to keep
    lengths = [len(text) for text in texts]
    # NumPy's generator on the host: the same draws on every device, and a longer run starts with a shorter one's.
    draws = torch.empty(len(texts), max_tokens, dtype=torch.float64)
    for row in range(len(texts) if temperature > 0 else 0):
        draws[row] = torch.from_numpy(np.random.default_rng((seed, row)).random(max_tokens))
    hear = on_token or (lambda row, token: None)
    running = list(range(len(texts)))  # rows that have not ended, in the order of the batch
    kept: KVCache | None = None
    ids = torch.empty(0, dtype=torch.int64)  # the newest of each running row
    was_training = model.training
    reader = lean(model.eval())
    try:
        for step in range(max_tokens):
            if not running:
                break
            if kept is None:
                windows = [texts[row][window_start(len(texts[row]), n_ctx) :] for row in running]
                kept = reader.new_cache(len(running), min(n_ctx, max(lengths) + max_tokens)) if cache else None
                logits = reader.readout(_read(reader, windows, kept))
            else:
                _crop(reader, [texts[row] for row in running], kept)
                logits = reader.readout(reader.trunk(ids[:, None], cache=kept)[:, -1])
            ids = choose(logits, draws[running, step], temperature, top_k, top_p)
            going = []
            for place, (row, token) in enumerate(zip(running, ids.tolist(), strict=True)):
                if token == eot and not ignore_eot:
                    hear(row, None)
                    continue
                going.append(place)
                texts[row].append(token)
                hear(row, token)
            if len(going) < len(running):
                running, ids = [running[place] for place in going], ids[going]
                if kept is not None:
                    kept.keep(going)
        for row in running:
            hear(row, None)
    finally:
        model.train(was_training)
    return [text[length:] for text, length in zip(texts, lengths, strict=True)]


def window_start(n: int, n_ctx: int) -> int:
    """First token that is read of a row of n: the smallest multiple of n_ctx // 2 that leaves at most n_ctx tokens."""
    hop = max(1, n_ctx // 2)
    return hop * -(-max(0, n - n_ctx) // hop)


def candidates(
    logits: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """Probabilities (B, C) of the ids that may be drawn and the ids (B, C), None for all V in their order.

    p = softmax(logits / temperature) of logits (B, V), of which top_k keeps the k largest, and then top_p, of the mass
    that top_k left, the fewest largest ones that hold at least that share. Not normalized; excluded ones may be there
    with probability 0.
    """
    work = torch.float32 if logits.device.type == "mps" else torch.float64  # MPS has no float64
    temperature = max(temperature, torch.finfo(torch.float32).tiny)
    logits = logits.float()
    p = torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, -1).to(work)
    if top_k is None and (top_p is None or top_p == 1):
        return p, None
    p, ids = p.topk(min(top_k or p.shape[-1], p.shape[-1]), dim=-1)  # largest first
    if top_p is not None and top_p < 1:
        before = p.cumsum(-1) - p  # mass of all that are larger
        p = p * (before < top_p * p.sum(-1, keepdim=True))
    return p, ids


def choose(
    logits: Tensor, draws: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """The next id (B,) of each row of logits (B, V): the largest at temperature 0, else the candidate at which the
    summed probability passes the row's draw, uniform in [0, 1). Raises NotFinite."""
    best, ids = logits.max(-1)
    if temperature > 0:
        p, named = candidates(logits, temperature, top_k, top_p)
        total = p.cumsum(-1)
        point = draws.to(total.device, total.dtype) * total[:, -1]
        places = torch.searchsorted(total, point[:, None], right=True).clamp(max=total.shape[-1] - 1)
        ids = (places if named is None else named.gather(-1, places)).squeeze(-1)
    if not all(map(math.isfinite, best.tolist())):  # the step waits for the device here
        raise NotFinite("the model's logits are not finite, there is no next token to choose")
    return ids


def _read(model: Decoder, windows: list[list[int]], cache: KVCache | None) -> Tensor:
    """h_L (B, D) of the last token of each window; an empty cache, if given, then holds the windows."""
    lengths = [len(window) for window in windows]
    # Padded with a row's own last id, so that no other row's NaN gets in: weight 0 times NaN is NaN.
    tokens = torch.tensor([window + window[-1:] * (max(lengths) - len(window)) for window in windows])
    h = model.trunk(tokens.to(model.embed.weight.device), cache=cache)
    if cache is not None and len(set(lengths)) > 1:
        cache.truncate(lengths)  # forgets the padding
    return h[torch.arange(len(windows)), torch.tensor(lengths) - 1]


def _crop(model: Decoder, texts: list[list[int]], cache: KVCache) -> None:
    """Read anew the rows whose window moves at their last token, up to the token before it, which is yet to come."""
    n_ctx = model.config.n_ctx
    if max(map(len, texts)) <= n_ctx:
        return
    starts = [window_start(len(text), n_ctx) for text in texts]
    moved = [row for row, text in enumerate(texts) if starts[row] != window_start(len(text) - 1, n_ctx)]
    if moved:
        fresh = model.new_cache(len(moved), cache.n_slot)
        _read(model, [texts[row][starts[row] : -1] for row in moved], fresh)
        cache.replace(moved, fresh)


def _check(
    texts: list[list[int]], n_vocab: int, max_tokens: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    for fits, message in (
        (max_tokens >= 0, f"max_tokens={max_tokens}: give 0 or more"),
        (temperature >= 0, f"temperature={temperature}: give 0 (greedy) or more"),
        (top_k is None or top_k >= 1, f"top_k={top_k}: give 1 or more, or null for no limit"),
        (top_p is None or 0 < top_p <= 1, f"top_p={top_p}: give a share above 0 and up to 1, or null for no limit"),
    ):
        if not fits:
            raise ConfigError(message)
    for row, text in enumerate(texts):
        if not text:
            raise ConfigError(f"prompt {row} is empty: start with the end-of-text id, as every document does")
        if not 0 <= min(text) <= max(text) < n_vocab:
            raise ConfigError(f"prompt {row} has ids outside the vocabulary of {n_vocab}")
