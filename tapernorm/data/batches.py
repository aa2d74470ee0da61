"""Token files to training batches and validation windows: pure functions of their arguments."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from tapernorm.config.schema import ConfigError


def n_windows(n_tokens: int, n_ctx: int) -> int:
    """How many windows a text has, each with the target of its last token."""
    return max(0, n_tokens - 1) // n_ctx


class Batches:
    """Training batches: row i of step k is a pure function of (seed, k).

    j = (k - 1) * batch_size + i;  epoch = j // n_windows;  window = permutation(seed, epoch)[j % n_windows].
    Window w is the tokens [w * n_ctx, w * n_ctx + n_ctx + 1), so each epoch visits every window once. windows (W,):
    the indices of those to use, which the permutation is then of; None: all.
    Raises ConfigError when `tokens` (n_tokens,) is shorter than one window or none is to be used.
    """

    def __init__(
        self, tokens: np.ndarray, n_ctx: int, batch_size: int, seed: int, windows: np.ndarray | None = None
    ) -> None:
        _check_length("training", len(tokens), n_ctx, "dataset.train, dataset.stories or dataset.max_stories")
        _check_windows("training", windows)
        self._tokens = tokens
        self._n_ctx = n_ctx
        self._batch_size = batch_size
        self._seed = seed
        self._windows = windows
        self.n_windows = n_windows(len(tokens), n_ctx) if windows is None else len(windows)
        self.tokens_per_epoch = self.n_windows * n_ctx
        self._permutation = functools.lru_cache(maxsize=2)(self._permute)  # a batch may straddle two epochs

    def _permute(self, epoch: int) -> np.ndarray:
        order = np.random.default_rng([self._seed, epoch]).permutation(self.n_windows)
        return order if self._windows is None else self._windows[order]

    def windows(self, step: int) -> list[int]:
        """Indices of the windows of a step (1-based), row by row."""
        first = (step - 1) * self._batch_size
        places = [divmod(index, self.n_windows) for index in range(first, first + self._batch_size)]
        return [int(self._permutation(epoch)[place]) for epoch, place in places]

    def batch(self, step: int, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, T) int64 of a step, counted from 1, or of some of its rows; targets are one ahead."""
        if step < 1:
            raise ValueError(f"steps count from 1, got {step}")
        windows = self.windows(step)[part]
        rows = np.empty((len(windows), self._n_ctx + 1), dtype=np.int64)
        for row, window in zip(rows, windows, strict=True):
            start = window * self._n_ctx
            row[:] = self._tokens[start : start + self._n_ctx + 1]
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def validation_windows(
    tokens: np.ndarray, n_ctx: int, n_tokens: int, windows: np.ndarray | None = None
) -> tuple[Tensor, Tensor]:
    """Inputs and targets (N, T) int64 of the first N windows, N * n_ctx <= n_tokens; views of one buffer.

    windows (W,): the indices of those to use, in order; None: all. Depends on nothing but the arguments. Raises
    ConfigError when tokens or n_tokens are less than one window, or none is to be used.
    """
    _check_length("validation", len(tokens), n_ctx, "dataset.valid, dataset.held_out or dataset.valid_stories")
    _check_windows("validation", windows)
    if n_tokens < n_ctx:
        raise ConfigError(f"trainer.val_tokens={n_tokens} is less than one context, model.n_ctx={n_ctx}")
    if windows is None:
        count = min(n_windows(len(tokens), n_ctx), n_tokens // n_ctx)
        flat = torch.from_numpy(tokens[: count * n_ctx + 1].astype(np.int64))
        return flat[:-1].view(count, n_ctx), flat[1:].view(count, n_ctx)
    starts = windows[: n_tokens // n_ctx] * n_ctx
    rows = torch.from_numpy(tokens[starts[:, None] + np.arange(n_ctx + 1)].astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def _check_windows(split: str, windows: np.ndarray | None) -> None:
    if windows is not None and not len(windows):
        raise ConfigError(
            f"the filter leaves no window of the {split} split: every one has an id that does not occur in "
            "dataset.reference; read more of that (dataset.reference.max_stories), or lower model.n_ctx"
        )


def _check_length(split: str, n_tokens: int, n_ctx: int, key: str) -> None:
    if n_tokens < n_ctx + 1:
        raise ConfigError(
            f"the {split} split has {n_tokens:,} tokens, one window needs model.n_ctx + 1 = {n_ctx + 1:,}; "
            f"give it more text ({key}) or lower model.n_ctx"
        )
