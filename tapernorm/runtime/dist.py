"""Several processes for one run, as torchrun starts them. Without it every function here returns at once.

All processes take the same steps, each with its own rows of the global batch; `average` makes gradients and sums those
of the whole batch, the same bits everywhere, and so are the weights after the step. Process 0 leads: the directory, the
console and the tracker are its alone. The first process to fail tells it (`blame`).

There is no wrapper around the model: it would have to be built anew at each phase of the gate, and would stand in the
way of torch.compile's one graph per phase. torch is imported where it is needed: faults of a command line come first.
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from tapernorm.config.options import TrainerConfig
from tapernorm.config.schema import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

T = TypeVar("T")
Item = TypeVar("Item")

# A process that dies is noticed by its launcher at once; these limits are for a machine that stops answering.
STEP_LIMIT = timedelta(hours=1)  # of a reduction, which waits while process 0 saves or generates
CONTROL_LIMIT = timedelta(hours=12)  # of a decision, which waits while process 0 prepares the data
LAST_WORDS = timedelta(seconds=10)  # for a process that has failed to say so
BUCKET = 2**25  # elements, about, that are reduced together

_rank, _size = 0, 1
_store: Any = None  # what processes tell each other even if they no longer step together
_control: Any = None  # their group for plain data, on the CPU, apart from the one that reduces


def start() -> None:
    """Join the processes that torchrun has started beside this one; nothing if it has not.

    Only process 0 keeps its standard output. Raises ConfigError for an environment that is half set.
    """
    global _rank, _size, _store, _control
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return
    wanted = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in wanted if name not in os.environ]:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} without {', '.join(missing)}: start with torchrun, "
            "or unset WORLD_SIZE"
        )
    import torch
    import torch.distributed as td

    if not (td.is_available() and td.is_gloo_available()):
        raise ConfigError("this torch has no gloo backend, which several processes need; start without torchrun")
    _store, _rank, _size = next(iter(td.rendezvous("env://", timeout=STEP_LIMIT)))
    atexit.register(_leave)
    if _rank:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  (as long as the process)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    td.init_process_group(
        backend, store=td.PrefixStore("steps", _store), rank=_rank, world_size=_size, timeout=STEP_LIMIT
    )
    _control = td.new_group(backend="gloo", timeout=CONTROL_LIMIT)


def rank() -> int:
    """The number of this process, 0 to size() - 1."""
    return _rank


def size() -> int:
    return _size


def leads() -> bool:
    """Whether this is the process that writes and speaks."""
    return _rank == 0


# ------------------------------------------------------------------------------------------------------ who does what


def check(trainer: TrainerConfig) -> None:
    """Raise ConfigError for a batch that cannot be cut into equal microbatches, and for what does not go together."""
    if _size > 1 and trainer.parallel == "fsdp" and trainer.compile:
        raise ConfigError("trainer.parallel=fsdp: trainer.compile=true is for ddp; leave one of the two out")
    if trainer.batch_size % (trainer.accumulation * _size):
        raise ConfigError(
            f"trainer.batch_size={trainer.batch_size} is not a multiple of trainer.accumulation={trainer.accumulation} "
            f"times the {_size} processes"
        )


def place(device: torch.device) -> torch.device:
    """The device of this process: of several on one machine, each takes a CUDA device of its own."""
    if _size == 1 or device.type == "cpu":
        return device
    import torch

    local = int(os.environ["LOCAL_RANK"])
    here, seen = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1)), torch.cuda.device_count()
    if device.type != "cuda":
        raise ConfigError(f"trainer.device={device}: several processes cannot share it; use trainer.device=cpu")
    if device.index is not None:
        raise ConfigError(
            f"trainer.device={device}: each of the {_size} processes takes its own; use trainer.device=cuda"
        )
    if here > seen:
        raise ConfigError(
            f"trainer.device=cuda: {here} processes on this machine, and torch sees {seen} CUDA devices; "
            "start one process per device, or use trainer.device=cpu"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def rows(batch_size: int) -> slice:
    """This process's rows of the global batch."""
    count = batch_size // _size
    return slice(_rank * count, (_rank + 1) * count)


def divided(work: Callable[[Item], T], items: Sequence[Item]) -> list[T]:
    """[work(item) for item in items] in every process, the items dealt out in turn; results are plain data.

    Every process calls `work` equally often, the last time maybe for nothing, so that it may communicate.
    """
    rounds = -(-len(items) // _size)
    own = [work(items[min(turn * _size + _rank, len(items) - 1)]) for turn in range(rounds)]
    dealt = [result for together in zip(*gather(own), strict=True) for result in together]
    return dealt[: len(items)]


# ---------------------------------------------------------------------------------------------------------- reductions


def average(tensors: Iterable[Tensor]) -> None:
    """Replace tensors of one device by their means over the processes, the same bits in each of them.

    Gradients of sharded parameters are left alone: these are means already.
    """
    if _size == 1:
        return
    import torch
    import torch.distributed as td

    tensors = [tensor for tensor in tensors if not is_sharded(tensor)]
    ends = itertools.accumulate(tensor.numel() for tensor in tensors)
    with torch.no_grad():
        # Together, as a reduction costs a fixed time; not all at once, as a flat copy costs memory.
        for _, group in itertools.groupby(zip(tensors, ends, strict=True), lambda item: item[1] // BUCKET):
            bucket = [tensor for tensor, _ in group]
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            td.all_reduce(flat)
            flat /= _size
            for tensor, mean in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(mean.view_as(tensor))


# ------------------------------------------------------------------------------------------------------------ sharding
# A matrix may be sharded by its rows (a DTensor), its gradient and moments like it; vectors stay whole everywhere.


def shard(model: nn.Module, layers: Iterable[nn.Module], methods: Sequence[str]) -> None:
    """FSDP2: from here on every process holds its rows of the model's matrices; a layer's are whole while it computes.

    `methods` of the model may be called like its forward. Gains and biases, a thousandth of the weights, stay whole:
    scalars among them cannot be shared. The optimizer is to be built afterwards.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(next(model.parameters()).device.type, (_size,))
    vectors = {parameter for parameter in model.parameters() if parameter.dim() < 2}
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, ignored_params=vectors)
    for name in methods:
        register_fsdp_forward_method(model, name)


def is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor")


def kinds(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Those that are whole and those that are sharded, which torch takes in different calls."""
    listed = list(parameters)
    return [kind for sharded in (False, True) if (kind := [p for p in listed if is_sharded(p) is sharded])]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; to be called by every process."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def collected(tree: Any) -> Any:
    """Plain nested data with whole tensors in process 0; the others, which must call it too, get no sharded ones."""
    if isinstance(tree, dict):
        return {key: collected(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [collected(value) for value in tree]
    if not is_sharded(tree):
        return tree
    tensor = tree.full_tensor()
    return tensor.cpu() if leads() else None


def share_of(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """What this process holds of a whole tensor that belongs to a parameter and has its shape."""
    if not is_sharded(parameter) or tensor.shape != parameter.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    there: Any = parameter
    return distribute_tensor(tensor, there.device_mesh, there.placements, src_data_rank=None)


# ----------------------------------------------------------------------------------------------------------- decisions


def gather(value: T) -> list[T]:
    """Every process's value, plain data, in the order of the processes."""
    if _size == 1:
        return [value]
    import torch.distributed as td

    values: list[Any] = [None] * _size
    td.all_gather_object(values, value, group=_control)
    return values


def decide(work: Callable[[], T]) -> T:
    """What `work` gives in process 0, plain data, in every process; if it raises there, all raise."""
    if _size == 1:
        return work()
    result: T | None = None
    fault: Exception | None = None
    if leads():
        try:
            result = work()
        except Exception as error:
            fault = error
            told = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            blame(told)  # before others can
    # Not every exception can be sent.
    sent = fault if isinstance(fault, ConfigError | None) else RuntimeError(f"process 0 has failed: {fault}")
    decided, received = gather((result, sent))[0]
    if raised := fault or received:
        raise raised
    return decided  # type: ignore[return-value]  # the leader's


def in_turn(lead: Callable[[], T], follow: Callable[[], T] | None = None) -> T:
    """`lead` in process 0 and then `follow` (default: the same) in the others; if the first raises, all do."""
    own: list[T] = []
    decide(lambda: own.append(lead()))
    return own[0] if leads() else (follow or lead)()


def largest_asked(number: int) -> int:
    """The largest number that any process gives. On the hosts, so that nobody waits for a device."""
    if _size == 1:
        return number
    import torch
    import torch.distributed as td

    asked = torch.tensor(number)
    td.all_reduce(asked, td.ReduceOp.MAX, group=_control)
    return int(asked)


# --------------------------------------------------------------------------------------------------------- the way out


def blame(error: str, after_you: bool = False) -> tuple[str, bool]:
    """(The fault that stops the run, whether it is this process's): the first that any process has told.

    When one fails, the others fail too, because they wait for it. Theirs is not what there is to know. `after_you`:
    of a fault that all find alike process 0 tells, which may have more to write, or a directory to take away.
    """
    if _store is None:
        return error, True
    if re.search("Connection (closed|reset) by peer", error):  # gloo's words; whoever could have said more has done so
        error = "another process was killed, perhaps for want of memory"
    if after_you and not leads():
        with suppress(RuntimeError):  # it has no fault to tell
            _store.wait(["fault"], LAST_WORDS)
    told = _store.compare_set("fault", "", f"{_rank} {error}").decode()
    number, _, first = told.partition(" ")
    own = int(number) == _rank
    return (first if int(number) == 0 else f"process {number}: {first}"), own


def _leave() -> None:
    """At the end of every process: the one that has the last word goes first, because a launcher then ends the others.

    That is the one that failed, which may still be printing why, or else process 0.
    """
    import torch.distributed as td

    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(RuntimeError):  # the store is gone, and with it who keeps it
        failed = _store.check(["fault"])
        last = int(_store.get("fault").split()[0]) if failed else 0
        if td.is_initialized() and not failed:  # else those who wait for this process wake up when it is gone
            td.destroy_process_group()
        if _rank == last:
            _store.set("over", "")
        else:
            _store.wait(["over"], LAST_WORDS if failed else CONTROL_LIMIT)
