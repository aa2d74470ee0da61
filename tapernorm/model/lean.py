"""The same computation, arranged for decoding: without nn.Module around it, and with fast products of few rows.

Decoding a small model runs some 230 operators of a microsecond or two a token; looking up parameters and calling
modules through nn.Module then takes a third of the time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapernorm.model.decoder import Decoder

# oneDNN's operator for a dense matrix, without a public name in torch. tests/model/test_lean.py notices a change.
ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def lean(module: nn.Module) -> Any:
    """An object with the module's methods and tensors whose submodules and parameters are plain attributes.

    It runs the module's own `forward`, so there is nothing to keep in step and the numbers are the same bit for bit,
    but for large products (see `product`). It shares the tensors and is a snapshot of all else (a gate's phase), so
    make one for a piece of work and drop it. A submodule with hooks stays a module, so that the hooks are called.
    """
    if module._forward_hooks or module._forward_pre_hooks:
        return module
    if isinstance(module, nn.ModuleList):
        return [lean(child) for child in module]
    kind: Any = type(module)
    plain: Any = object.__new__(_plain_class(kind))
    plain.__dict__.update(
        {name: value for name, value in vars(module).items() if not name.startswith("_")}
        | module._parameters
        | module._buffers
        | {name: child if child is None else lean(child) for name, child in module._modules.items()}
    )
    if isinstance(module, Decoder) and module.head is None:
        plain.head = object.__new__(_plain_class(nn.Linear))
        plain.head.weight, plain.head.bias = module.embed.weight, None
    return plain


@cache
def _plain_class(kind: Any) -> type[Any]:
    """A class with what `kind` and its parents define, short of nn.Module."""
    body: dict[str, Any] = {}
    for parent in reversed(kind.__mro__[: kind.__mro__.index(nn.Module)]):
        body.update(vars(parent))
    for name in ("__init__", "__dict__", "__weakref__", "__slots__"):
        body.pop(name, None)
    return type(kind.__name__, (), body | {"__call__": _linear if kind is nn.Linear else kind.forward})


def _linear(layer: Any, x: Tensor) -> Tensor:
    return product(x, layer.weight, layer.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b: (..., I), (O, I), (O,) -> (..., O).

    A decoding step streams every weight past a few rows, and there the default BLAS of a CPU can read large float32
    matrices at half the speed of oneDNN, which knows no gradient and no autocast here. All else is F.linear's.
    """
    if (
        ONEDNN is None
        or min(weight.shape) < 256  # oneDNN's fixed cost, about 15 us a call, is not earned back
        or weight.dtype is not torch.float32
        or weight.device.type != "cpu"
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
    ):
        return F.linear(x, weight, bias)
    return ONEDNN(x, weight, bias, "none", [], "")
