"""The same computation without nn.Module around it, for decoding.

Decoding a small model runs some 230 operators of a microsecond or two a token; looking up parameters and calling
modules through nn.Module then takes a third of the time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn


def lean(module: nn.Module) -> Any:
    """An object with the module's methods and tensors whose submodules and parameters are plain attributes.

    It runs the module's own `forward`, so there is nothing to keep in step and the numbers are the same bit for bit. It
    shares the tensors and is a snapshot of all else (a gate's phase), so make one for a piece of work and drop it. A
    submodule with hooks stays a module, so that the hooks are called.
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
    return plain


@cache
def _plain_class(kind: Any) -> type[Any]:
    """A class with what `kind` and its parents define, short of nn.Module."""
    body: dict[str, Any] = {}
    for parent in reversed(kind.__mro__[: kind.__mro__.index(nn.Module)]):
        body.update(vars(parent))
    for name in ("__init__", "__dict__", "__weakref__", "__slots__"):
        body.pop(name, None)
    return type(kind.__name__, (), body | {"__call__": kind.forward})
