"""Started by torchrun (see test_dist): trains one configuration after the other, and compares the processes' weights.

    torchrun ... -m tests.two_processes JOBS.json      JOBS: [[directory, configuration as plain data], ...]

Writes equal.json into each directory: for every step, whether all parameters and buffers had the same bits everywhere.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from tapernorm import dist

dist.start()

from tapernorm.config import build, resolve  # noqa: E402
from tapernorm.loop import train  # noqa: E402
from tapernorm.trainer import TrainingRun  # noqa: E402


def bits(run: TrainingRun) -> str:
    digest = hashlib.blake2b()
    for tensor in [*run.model.state_dict().values(), *run.model.buffers()]:
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    finish_step = TrainingRun.finish_step

    def finish_and_compare(self: TrainingRun, step: int) -> None:
        finish_step(self, step)
        equal.append(len(set(dist.gather(bits(self)))) == 1)

    TrainingRun.finish_step = finish_and_compare  # type: ignore[method-assign]
    for name, tree in json.loads(Path(sys.argv[1]).read_text()):
        equal: list[bool] = []
        train(resolve(build(tree)), Path(name), say=lambda line: None)
        if dist.leads():
            (Path(name) / "equal.json").write_text(json.dumps(equal))


if __name__ == "__main__":
    main()
