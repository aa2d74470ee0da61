"""Started by torchrun (see test_dist): trains one configuration after the other, and compares the processes' weights.

    torchrun ... -m tests.two_processes JOBS.json      JOBS: [[directory, configuration as plain data], ...]

Writes processes.json into each directory. equal: for every step, whether all parameters and buffers that every process
has as a whole had the same bits everywhere; held: the share of the parameters, and of their moments, in process 0.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tapernorm.runtime import dist

dist.start()

from tapernorm.config.resolve import build, resolve  # noqa: E402
from tapernorm.training.loop import train  # noqa: E402
from tapernorm.training.state import TrainingRun  # noqa: E402


def bits(run: TrainingRun) -> str:
    digest = hashlib.blake2b()
    for tensor in [*run.model.state_dict().values(), *run.model.buffers()]:
        if not dist.is_sharded(tensor):
            digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def held(tensors: Iterable[Any]) -> float:
    listed = list(tensors)
    local = [tensor.to_local() if dist.is_sharded(tensor) else tensor for tensor in listed]
    return sum(tensor.numel() for tensor in local) / sum(tensor.numel() for tensor in listed)


def main() -> None:
    finish_step = TrainingRun.finish_step

    def finish_and_compare(self: TrainingRun, step: int) -> None:
        finish_step(self, step)
        seen["equal"].append(len(set(dist.gather(bits(self)))) == 1)
        moments = [moment for state in self.optimizer.state.values() for moment in state.values()]
        seen["held"] = [held(self.model.parameters()), held(moments)]

    TrainingRun.finish_step = finish_and_compare  # type: ignore[method-assign]
    for name, tree in json.loads(Path(sys.argv[1]).read_text()):
        seen: dict[str, Any] = {"equal": []}
        train(resolve(build(tree)), Path(name))
        if dist.leads():
            (Path(name) / "processes.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
