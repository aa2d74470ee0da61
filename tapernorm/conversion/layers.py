"""The layers that stand in for a model's norms, and the padding that their statistics leave out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.conversion.recognise import NormSpec
from tapernorm.method.gate import Phase
from tapernorm.method.norms import TaperLN, TaperNorm, widened


@dataclass(eq=False)
class Seen:
    """What hooks keep of the last forward: its padding mask (B, T) and, with its graph, what the final norm has read.

    Copies of the model start without them.
    """

    mask: Tensor | None = None
    stream: Tensor | None = None

    def note_mask(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        mask = padding_mask(kwargs)
        if mask is not None or module.training:  # calibrate may know a batch's mask that its model does not take
            self.mask = mask

    def note_stream(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.stream = args[0]

    def __getstate__(self) -> dict[str, Any]:
        return {"mask": None, "stream": None}


def padding_mask(batch: Any) -> Tensor | None:
    """The batch's `attention_mask` if it is (B, T): 0 where a token is padding."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def over_tokens(mask: Tensor, values: Tensor) -> Tensor | None:
    """The mask (B, T), bool, so that it broadcasts to values (B, T, ...) or (B * T); None where it fits neither."""
    if values.shape[:2] == mask.shape:
        return mask.bool().view(*mask.shape, *(1,) * (values.dim() - 2))
    return mask.bool().flatten() if values.shape == (mask.numel(),) else None


def real_tokens(values: Tensor, mask: Tensor | None) -> Tensor:
    """The values (B, T, ...) or (B * T) of the tokens at which mask (B, T) is not 0, in one dimension.

    Raises ValueError where the shapes do not line up.
    """
    if mask is None:
        return values.flatten()
    real = over_tokens(mask, values)
    if real is None:
        shapes = f"a mask {tuple(mask.shape)} does not line up with tokens {tuple(values.shape)}"
        raise ValueError(f"{shapes}: use unpadded batches")
    return values[real.expand_as(values)]


VISIBLE = -1  # no id that torch gives


def _nothing(module: nn.Module, args: tuple[Any, ...]) -> None:
    pass


class HeldNorm(TaperNorm):
    """A TaperNorm in the place of a norm of the user's, which computes by itself while the gate is 1.

    Shapes: h (..., D) -> (..., D), in the dtype that the original's output has. The original is kept outside the
    module tree and shares this layer's parameters and hooks, so that the model's parameters keep their names and
    identities; new are `taper_weight` (D,) and the buffers `c` and `gate`.
    """

    original: nn.Module

    def __init__(self, original: nn.Module, spec: NormSpec, seen: Seen) -> None:
        super().__init__(spec.dim, spec.eps)
        parameters = original._parameters
        weight: Any = parameters["weight"]
        # One dictionary for both: whatever replaces a parameter of this layer later replaces the original's.
        self.__dict__["_parameters"] = parameters
        self.__dict__["original"] = original
        if "bias" in parameters:
            self.__dict__.pop("bias", None)
        else:
            self.__dict__["bias"] = None
        self.shift, self.seen = spec.shift, seen
        self.taper_weight = nn.Parameter(weight.detach() + spec.shift, requires_grad=False)
        self.c, self.gate, self.recorded = (b.to(weight.device) for b in (self.c, self.gate, self.recorded))
        self.trainable = weight.requires_grad

    def forward(self, h: Tensor) -> Tensor:
        out = super().forward(h)
        if self.phase is Phase.NORMALIZED:
            return out
        return out.to(torch.promote_types(h.dtype, self.weight.dtype))

    def standard(self, h: Tensor) -> Tensor:
        return self.original.forward(h)

    def gain(self) -> Tensor:
        return self.weight + self.shift if self.shift else self.weight

    def set_gate(self, gate: float, phase: Phase) -> None:
        super().set_gate(gate, phase)
        self.visible(phase is not Phase.NORMALIZED)
        if not self.trainable:  # a gain that the user has frozen stays frozen
            self.weight.requires_grad_(False)
            self.taper_weight.requires_grad_(False)

    def visible(self, on: bool) -> None:
        """A hook that does nothing: where no part has one, torch's encoder layers take a kernel that calls no norm."""
        self._forward_pre_hooks.pop(VISIBLE, None)
        if on:
            self._forward_pre_hooks[VISIBLE] = _nothing

    def release(self) -> nn.Module:
        """The original, alone again."""
        del self._parameters["taper_weight"]
        return self.original

    def statistics(self, h: Tensor) -> Tensor:
        """(2,) the sums over the tokens of h (..., D) that c is fitted to."""
        x = self.center(widened(h))
        return torch.stack([values.sum() for values in self.per_token(x, self.inverse_scale(x).squeeze(-1))])

    def record(self, x: Tensor, inverse: Tensor) -> None:
        if self.training and torch.is_grad_enabled():  # c follows what trains, and no evaluation
            super().record(x, inverse)

    def per_token(self, x: Tensor, inverse: Tensor) -> list[Tensor]:
        pair, mask = super().per_token(x, inverse), self.seen.mask
        if self.phase is Phase.NORMALIZED or mask is None:
            return [real_tokens(values, mask) for values in pair]
        # Not by index, so that it compiles and waits for no device. What is recomputed in backward may be of an earlier
        # batch than the mask: left out where it shows.
        real = over_tokens(mask, inverse)
        return [values.new_zeros(()) if real is None else torch.where(real, values, 0.0) for values in pair]


class HeldLN(HeldNorm, TaperLN):
    """HeldNorm for a LayerNorm: centres, and has a beta if the original has one."""


def replace(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever `old` is below `root`, with its mode and its hooks (the same dictionaries, so that the handles
    of hooks go on working)."""
    new.training = old.training
    vars(new).update({name: value for name, value in vars(old).items() if "_hook" in name})
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
