"""A preallocated cache of keys and values, outside the model and its state.

Rows are aligned at the left: slot j of a row holds its token j, so the slot is the position that rotary embeddings
count. Shorter prompts are padded at the right, where causality alone hides the padding: a prompt's forward needs no
mask and is the one of training, no row ever attends to nothing (which would be NaN), and forgetting the padding is
setting a length. The price is that rows of unequal lengths write each to its own slot, under a mask.

Shape legend: B rows, T new tokens, H heads, K head width, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class KVCache:
    """Keys and values (B, H, S, K) of every layer and the filled length (B,) of each row; all rows start empty.

    `extend` makes room for new tokens before a forward, `layers[i].attend` stores and attends, `truncate` forgets.
    With `fixed`, every step attends to all S slots under a mask: slower, but of the same shapes at each step and with
    no number of the host's in it, as graph capture and compilation want.
    """

    def __init__(
        self,
        n_layer: int,
        n_row: int,
        n_head: int,
        n_slot: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        fixed: bool = False,
    ) -> None:
        self.n_slot, self.fixed = n_slot, fixed
        shape = (n_row, n_head, n_slot, head_dim)
        self.layers = [
            # Zeros: a slot that the mask hides must still be finite, for 0 * NaN is NaN.
            LayerCache(
                self, torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
            )
            for _ in range(n_layer)
        ]
        self.lengths = torch.zeros(n_row, dtype=torch.int64, device=device)
        self.longest = 0  # of the lengths, known without asking the device
        self.even = True  # all lengths are equal
        # Of the current forward: the slots to fill, `fill` or where they differ by row `slots` (B, T) with `rows`
        # (B, 1); the slots to read; which of them each new token sees (None: all, or with `causal` the new up to it).
        self.rows: Tensor | None = None
        self.slots: Tensor | None = None
        self.mask: Tensor | None = None
        self.fill = self.read = slice(0, 0)
        self.causal = True

    def extend(self, n_new: int) -> slice | Tensor:
        """Make room for `n_new` (T) more tokens in every row, for the forward that follows.

        Returns the positions of the new tokens, to index a table (S, K) with: a slice, or (B, 1, T) where they differ
        by row. Raises ValueError when a row would not have the room.
        """
        start, end = self.longest, self.longest + n_new
        if end > self.n_slot:
            raise ValueError(f"the cache has {self.n_slot} slots, no room for {end} tokens")
        device, n_read = self.lengths.device, self.n_slot if self.fixed else end
        self.fill, self.read = slice(start, end), slice(n_read)
        self.causal = start == 0 and not self.fixed  # nothing but the new tokens is there to be seen
        self.rows = self.slots = self.mask = None
        if self.fixed or not self.even:
            self.rows = torch.arange(self.lengths.shape[0], device=device)[:, None]
            self.slots = self.lengths[:, None] + torch.arange(n_new, device=device)  # (B, T)
            self.mask = (torch.arange(n_read, device=device) <= self.slots[..., None])[:, None]  # (B, 1, T, n_read)
        elif n_new > 1 and not self.causal:
            self.mask = torch.arange(n_read, device=device) <= torch.arange(start, end, device=device)[:, None]
        self.lengths += n_new
        self.longest = end
        return self.fill if self.slots is None else self.slots[:, None]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first lengths[row] tokens of each row, such as a prompt without its padding."""
        self._set_lengths(torch.tensor(lengths, device=self.lengths.device))

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows; those that stay are in the order given."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.lengths.device)  # also when none stays
        self._set_lengths(self.lengths[index])
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[index], layer.values[index]

    def replace(self, rows: Sequence[int], other: KVCache) -> None:
        """Put the rows of a cache with as many slots in the place of these rows."""
        index = torch.tensor(rows, device=self.lengths.device)
        for layer, new in zip(self.layers, other.layers, strict=True):
            layer.keys[index], layer.values[index] = new.keys, new.values
        self._set_lengths(self.lengths.index_copy(0, index, other.lengths))

    def _set_lengths(self, lengths: Tensor) -> None:
        if lengths.shape == self.lengths.shape:
            self.lengths.copy_(lengths)  # in place, for a captured graph holds it
        else:
            self.lengths = lengths
        host = lengths.tolist()
        self.longest, self.even = max(host, default=0), len(set(host)) <= 1


class LayerCache:
    """One layer's keys and values (B, H, S, K), and its attention."""

    def __init__(self, cache: KVCache, keys: Tensor, values: Tensor) -> None:
        self.cache, self.keys, self.values = cache, keys, values

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new tokens' k and v, and let q attend to all that is filled up to itself: each (B, H, T, K)."""
        cache = self.cache
        if cache.slots is None:
            self.keys[:, :, cache.fill] = k
            self.values[:, :, cache.fill] = v
        else:
            self.keys[cache.rows, :, cache.slots] = k.transpose(1, 2)
            self.values[cache.rows, :, cache.slots] = v.transpose(1, 2)
        if cache.causal:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        keys, values = self.keys[:, :, cache.read], self.values[:, :, cache.read]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=cache.mask)
