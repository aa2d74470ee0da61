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
    What is kept carries no gradient. With `fixed`, every step attends to all S slots under a mask: slower, but of the
    same shapes at each step and with no number of the host's in it, as graph capture and compilation want.
    """

    def __init__(
        self, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device, fixed: bool
    ) -> None:
        """shape: layers, B, H, S, K."""
        n_layer, n_row, n_head, self.n_slot, head_dim = shape
        self.fixed = fixed
        # Keys and values of layer i at 2i and 2i + 1. Zeros: a slot that the mask hides must still be finite, for
        # 0 * NaN is NaN.
        self.store = torch.zeros(2 * n_layer, n_row, n_head, self.n_slot, head_dim, dtype=dtype, device=device)
        self.layers = [LayerCache(self, index) for index in range(n_layer)]
        self.lengths = torch.zeros(n_row, dtype=torch.int64, device=device)
        self.longest = 0  # of the lengths, known without asking the device
        self.even = True  # all lengths are equal
        # Of the current forward: views of the store, the slots to fill (or where they differ by row, `slots` (B, T)
        # with `rows` (B, 1)) and the slots to read, made for all layers at once because an indexing costs as much as a
        # small product; which slots each new token sees (None: all, or with `causal` the new up to it).
        self.rows: Tensor | None = None
        self.slots: Tensor | None = None
        self.mask: Tensor | None = None
        self.fill: tuple[Tensor, ...] = ()
        self.read: tuple[Tensor, ...] = ()
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
        self.causal = start == 0 and not self.fixed  # nothing but the new tokens is there to be seen
        self.rows = self.slots = self.mask = None
        if self.fixed or not self.even:
            self.rows = torch.arange(self.lengths.shape[0], device=device)[:, None]
            self.slots = self.lengths[:, None] + torch.arange(n_new, device=device)  # (B, T)
            self.mask = (torch.arange(n_read, device=device) <= self.slots[..., None])[:, None]  # (B, 1, T, n_read)
        elif n_new > 1 and not self.causal:
            self.mask = torch.arange(n_read, device=device) <= torch.arange(start, end, device=device)[:, None]
        self.fill = self.store[..., start:end, :].unbind() if self.slots is None else ()
        self.read = () if self.causal else self.store[..., :n_read, :].unbind()
        self.lengths += n_new
        self.longest = end
        return slice(start, end) if self.slots is None else self.slots[:, None]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first lengths[row] tokens of each row, such as a prompt without its padding."""
        self._set_lengths(torch.tensor(lengths, device=self.lengths.device))

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows; those that stay are in the order given."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.lengths.device)  # also when none stays
        self._set_lengths(self.lengths[index])
        self.store = self.store[:, index]

    def replace(self, rows: Sequence[int], other: KVCache) -> None:
        """Put the rows of a cache with as many slots in the place of these rows."""
        index = torch.tensor(rows, device=self.lengths.device)
        self.store[:, index] = other.store
        self._set_lengths(self.lengths.index_copy(0, index, other.lengths))

    def _set_lengths(self, lengths: Tensor) -> None:
        if lengths.shape == self.lengths.shape:
            self.lengths.copy_(lengths)  # in place, for a captured graph holds it
        else:
            self.lengths = lengths
        host = lengths.tolist()
        self.longest, self.even = max(host, default=0), len(set(host)) <= 1


class LayerCache:
    """One layer's keys and values, and its attention."""

    def __init__(self, cache: KVCache, index: int) -> None:
        self.cache, self.keys, self.values = cache, 2 * index, 2 * index + 1  # places in the cache's store

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new tokens' k and v, and let q attend to all that is filled up to itself: each (B, H, T, K)."""
        cache = self.cache
        if cache.slots is None:
            cache.fill[self.keys].copy_(k.detach())
            cache.fill[self.values].copy_(v.detach())
        else:
            cache.store[self.keys, cache.rows, :, cache.slots] = k.detach().transpose(1, 2)
            cache.store[self.values, cache.rows, :, cache.slots] = v.detach().transpose(1, 2)
        if cache.causal:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        keys, values = cache.read[self.keys], cache.read[self.values]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=cache.mask)
