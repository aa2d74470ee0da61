"""Token files to windows, and windows to batches as a pure function of (seed, step).

Window w of a text is the tokens [w * n_ctx, w * n_ctx + n_ctx + 1): n_ctx inputs and, one ahead, as many targets.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tapernorm.config.schema import ConfigError

SCANNED = 1 << 24  # tokens at a time


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """A prepared split. tokens: memory-mapped ids (n_tokens,); n_bytes: UTF-8 bytes of the documents.

    allowed: for each id (V,) whether a window may hold it; None: every window is used.
    """

    path: Path
    tokens: np.ndarray
    n_documents: int
    n_tokens: int
    vocab_size: int
    n_bytes: int
    allowed: np.ndarray | None = None

    def __str__(self) -> str:
        purpose = "training" if self.path.stem == "train" else "validation"
        return f"{self.n_documents:,} documents, {self.n_tokens:,} tokens for {purpose}"

    @classmethod
    def open(cls, path: Path) -> TokenFile:
        """Map `path` as the JSON beside it says. Raises ValueError when they differ, OSError when one is missing."""
        meta = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        dtype, n_tokens = np.dtype(meta["dtype"]), meta["n_tokens"]
        size, expected = path.stat().st_size, n_tokens * dtype.itemsize
        if size != expected:
            raise ValueError(f"{path.name} has {size} bytes instead of {expected}")
        # an empty file cannot be mapped
        tokens = np.memmap(path, dtype=dtype, mode="r") if n_tokens else np.empty(0, dtype=dtype)
        return cls(path, tokens, meta["n_documents"], n_tokens, meta["vocab_size"], meta["n_bytes"])

    def windows(self, n_ctx: int) -> np.ndarray | None:
        """Indices (W,) of the windows without an id that is not allowed; None: all of them."""
        return None if self.allowed is None else usable_windows(self.tokens, n_ctx, self.allowed)


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds every id: uint16 up to 65,536 ids, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def n_windows(n_tokens: int, n_ctx: int) -> int:
    """How many windows a text has, each with the target of its last token."""
    return max(0, n_tokens - 1) // n_ctx


def usable_windows(tokens: np.ndarray, n_ctx: int, allowed: np.ndarray) -> np.ndarray:
    """Indices of the windows whose n_ctx + 1 tokens, inputs and last target, are all allowed, in order.

    tokens (n_tokens,): ids; allowed (V,): of each id. Neighbouring windows share a token: it is checked in both.
    """
    usable = np.ones(n_windows(len(tokens), n_ctx), dtype=bool)
    for start in range(0, len(tokens), SCANNED):
        places = start + np.flatnonzero(~allowed[tokens[start : start + SCANNED]])
        for bad in (places // n_ctx, (places - 1) // n_ctx):  # as an input, and as the target of the one before
            usable[bad[(bad >= 0) & (bad < len(usable))]] = False
    return np.flatnonzero(usable)


class Batches:
    """Training batches: row i of step k is a pure function of (seed, k).

    j = (k - 1) * batch_size + i;  epoch = j // n_windows;  window = permutation(seed, epoch)[j % n_windows].
    So each epoch visits every window once. windows (W,): the indices of those to use, which the permutation is then
    of; None: all. Raises ConfigError when `tokens` (n_tokens,) is shorter than one window or none is to be used.
    """

    def __init__(
        self, tokens: np.ndarray, n_ctx: int, batch_size: int, seed: int, windows: np.ndarray | None = None
    ) -> None:
        self._windows = _checked("training", tokens, n_ctx, windows, "train, dataset.stories or dataset.max_stories")
        self._tokens = tokens
        self._n_ctx = n_ctx
        self._batch_size = batch_size
        self._seed = seed
        self.n_windows = len(self._windows)
        self.tokens_per_epoch = self.n_windows * n_ctx
        self._permutation = functools.lru_cache(maxsize=2)(self._permute)  # a batch may straddle two epochs

    def _permute(self, epoch: int) -> np.ndarray:
        return self._windows[np.random.default_rng([self._seed, epoch]).permutation(self.n_windows)]

    def windows(self, step: int) -> list[int]:
        """Indices of the windows of a step (1-based), row by row."""
        first = (step - 1) * self._batch_size
        places = [divmod(index, self.n_windows) for index in range(first, first + self._batch_size)]
        return [int(self._permutation(epoch)[place]) for epoch, place in places]

    def batch(self, step: int, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, T) int64 of a step, counted from 1, or of some of its rows; targets are one ahead."""
        if step < 1:
            raise ValueError(f"steps count from 1, got {step}")
        inputs, targets = _rows(self._tokens, self._n_ctx, self.windows(step)[part])
        return inputs.contiguous(), targets.contiguous()


def validation_windows(
    tokens: np.ndarray, n_ctx: int, n_tokens: int, windows: np.ndarray | None = None
) -> tuple[Tensor, Tensor]:
    """Inputs and targets (N, T) int64 of the first N windows, N * n_ctx <= n_tokens; views of one buffer.

    windows (W,): the indices of those to use, in order; None: all. Depends on nothing but the arguments. Raises
    ConfigError when tokens or n_tokens are less than one window, or none is to be used.
    """
    windows = _checked("validation", tokens, n_ctx, windows, "valid, dataset.held_out or dataset.valid_stories")
    if n_tokens < n_ctx:
        raise ConfigError(f"trainer.val_tokens={n_tokens} is less than one context, model.n_ctx={n_ctx}")
    return _rows(tokens, n_ctx, windows[: n_tokens // n_ctx])


def _rows(tokens: np.ndarray, n_ctx: int, windows: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
    starts = np.asarray(windows, dtype=np.int64) * n_ctx
    rows = torch.from_numpy(tokens[starts[:, None] + np.arange(n_ctx + 1)].astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def _checked(split: str, tokens: np.ndarray, n_ctx: int, windows: np.ndarray | None, keys: str) -> np.ndarray:
    """The windows, or all of the text's for None. Raises ConfigError when there is none; keys: which give more text."""
    if len(tokens) < n_ctx + 1:
        raise ConfigError(
            f"the {split} split has {len(tokens):,} tokens, one window needs model.n_ctx + 1 = {n_ctx + 1:,}; "
            f"give it more text (dataset.{keys}) or lower model.n_ctx"
        )
    if windows is None:
        return np.arange(n_windows(len(tokens), n_ctx))
    if not len(windows):
        raise ConfigError(
            f"the filter leaves no window of the {split} split: every one has an id that does not occur in "
            "dataset.reference; read more of that (dataset.reference.max_stories), or lower model.n_ctx"
        )
    return windows
