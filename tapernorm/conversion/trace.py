"""Which projections read a norm, or are read by it: found by running any model once and watching its tensors.

Nothing here knows an architecture. A norm can be folded into projections if they are the only readers of its output,
or into the projection that is the only source of its input (as the per-head norms of queries and keys are).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tapernorm.conversion.recognise import Projection


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for part in parts:
        yield from tensors(part)


class Trace(TorchFunctionMode):
    """Watches one forward pass: who reads what the norms and the projections put out.

    A tensor is known by its storage, so a view counts as what it is a view of. Every torch function that takes a
    watched tensor and makes anything but a view of it, or writes to it, is another reader and noted by name; what a
    watched module does inside itself is its own affair.
    """

    def __init__(self, norms: Mapping[str, nn.Module], projections: Mapping[str, Projection]) -> None:
        super().__init__()
        self.norms, self.projections = norms, projections
        self.readers: dict[str, set[str]] = defaultdict(set)  # producer -> the watched modules that read it
        self.sources: dict[str, set[str | None]] = defaultdict(set)  # reader -> producers, None: something else
        self.others: dict[str, list[str]] = defaultdict(list)  # producer -> what else reads it
        # By storage; the tensor is kept, because a freed storage could come back under another one.
        self._produced: dict[int, tuple[str, Tensor]] = {}
        self._inside = False

    def run(self, forward: Callable[[], Any]) -> Any:
        """forward(), watched."""
        modules = {**self.norms, **{name: item.module for name, item in self.projections.items()}}
        with ExitStack() as stack:
            for name, module in modules.items():
                hook = partial(self._enter, name)
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(partial(self._leave, name)).remove)
            with self:
                output = forward()
        for producer in filter(None, map(self._of, tensors(output))):
            self.others[producer].append("the model's output")
        self._produced.clear()
        return output

    def plan(self, name: str, dim: int) -> tuple[list[str], bool] | str:
        """The projections that a norm of this name and width folds into, or the reason why it does not.

        They read its output (False) or, upstream (True), the norm reads the one of them.
        """
        reason = self._why_not_downstream(name, dim)
        if reason is None:
            return sorted(self.readers[name]), False
        source, *more = self.sources[name] or {None}
        if source is None or more or self.readers[source] != {name} or self.others[source]:
            return reason
        if source not in self.projections or self.projections[source].weight.shape[0] % dim:
            return reason
        return [source], True

    def _why_not_downstream(self, name: str, dim: int) -> str | None:
        if not self.sources[name]:
            return "the example does not reach it"
        readers = sorted(self.readers[name])
        if self.others[name]:
            return f"its output is {'also ' if readers else ''}read by {', '.join(dict.fromkeys(self.others[name]))}"
        if not readers:
            return "nothing reads its output"
        for reader in readers:
            if reader not in self.projections:
                return f"its output is read by {reader}, which is no projection"
            if more := self.sources[reader] - {name}:
                return f"{reader}, which reads it, also reads {', '.join(sorted(s or 'something else' for s in more))}"
            if (inputs := self.projections[reader].weight.shape[1]) != dim:
                return f"{reader}, which reads it, has {inputs} inputs, not {dim}"
        return None

    def _of(self, tensor: Tensor) -> str | None:
        try:
            return self._produced.get(tensor.untyped_storage().data_ptr(), (None, tensor))[0]
        except RuntimeError:  # it has no storage of its own, as those inside vmap
            return None

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in tensors((args, kwargs)):
            producer = self._of(tensor)
            self.sources[name].add(producer)
            if producer is not None:
                self.readers[producer].add(name)
        self._inside = True

    def _leave(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._inside = False
        self._produced[output.untyped_storage().data_ptr()] = (name, output)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        watched = [(tensor, tensor._version) for tensor in tensors((args, kwargs)) if self._of(tensor)]
        result = func(*args, **kwargs)
        made = {self._of(tensor) for tensor in tensors(result)}
        for tensor, version in watched:
            producer = self._of(tensor)
            if producer and (tensor._version != version or made - {producer}):
                self.others[producer].append(getattr(func, "__name__", str(func)).strip("_"))
        return result
