"""Kill one run again and again at random moments, and see whether it comes out as if nothing had happened.

python scripts/dev/soak.py --kills 200 [--seed 0] [--directory soak]

First the undisturbed run. Then the same command with SIGKILL, restarted each time until it finishes: at random moments
of its whole life, every third time in the midst of a checkpoint's writing, and every tenth time, with the prepared
data deleted, in the midst of the preparation. Exit status 0 if the final weights are equal bit for bit and
metrics.jsonl has each step exactly once with the same numbers, else 1.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tapernorm.runtime.record import read_metrics

ROOT = Path(__file__).resolve().parents[2]
CLOCK = "throughput/tokens_per_s"
SAVE_INTERVAL = 5


def command(directory: Path, steps: int) -> list[str]:
    options = [
        "experiment=smoke",
        "norm=all_taper",
        "anchor=fixed_target",
        "tracking=none",
        "report=false",
        "resume=auto",
        f"run_dir={directory / 'run'}",
        f"cache_dir={directory / 'cache'}",
        f"trainer.max_steps={steps}",
        f"trainer.save_interval={SAVE_INTERVAL}",
        "trainer.val_interval=7",
        "trainer.log_interval=1",
        "trainer.samples=0",
        "trainer.device=cpu",
        "trainer.progress=none",
    ]
    return [sys.executable, str(ROOT / "train.py"), *options]


def start(directory: Path, steps: int) -> subprocess.Popen[bytes]:
    with (directory / "console.txt").open("ab") as console:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command(directory, steps), stdout=console, stderr=console, env=environment)


def undisturbed(directory: Path, steps: int) -> float:
    """Seconds of the run; SystemExit if it fails."""
    directory.mkdir(parents=True)
    began = time.monotonic()
    if start(directory, steps).wait():
        raise SystemExit(f"error: the undisturbed run failed; see {directory / 'console.txt'}")
    return time.monotonic() - began


WORK = {"in a save": "run/checkpoints/.writing-*", "in the preparation": "cache/*.tmp-*"}  # there while it lasts


def kill(process: subprocess.Popen[bytes], directory: Path, seconds: float, moment: str | None) -> str | None:
    """Kill the process after `seconds`, or when then the next of WORK is done; where that was, None if it had ended."""
    left = {name: set(directory.glob(files)) for name, files in WORK.items()}  # by earlier kills

    def works(name: str) -> bool:
        return not left[name].issuperset(directory.glob(WORK[name]))

    end = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() >= end and (moment is None or works(moment)):
            break
        time.sleep(0.0005)
    ended = process.poll() is not None
    process.kill()
    process.wait()
    if ended:
        return None
    return next(filter(works, WORK), "elsewhere")


def last_saved(directory: Path) -> int:
    found = [path.name for path in (directory / "run" / "checkpoints").glob("step-*[0-9]")]
    return max((int(name.removeprefix("step-")) for name in found), default=0)


def difference(expected: Path, found: Path, steps: int) -> str | None:
    """The first thing in which two finished runs differ."""
    weights = Path("run", "checkpoints", f"step-{steps:08d}", "model.safetensors")
    if (expected / weights).read_bytes() != (found / weights).read_bytes():
        return "the final weights differ"
    a, b = rows(expected), rows(found)
    if [row["step"] for row in b] != list(range(1, steps + 1)):
        return "metrics.jsonl does not have each step exactly once"
    for one, other in zip(a, b, strict=True):
        if one != other:
            return f"the metrics of step {one['step']} differ"
    return None


def rows(directory: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != CLOCK} for row in read_metrics(directory / "run")]


def soak(directory: Path, kills: int, seed: int, steps: int) -> str | None:
    """Run, kill, restart; what went wrong, None if nothing did."""
    draw = random.Random(seed)
    whole = undisturbed(directory / "undisturbed", steps)
    print(f"undisturbed: {steps} steps in {whole:.1f} s", flush=True)
    killed = directory / "killed"
    killed.mkdir()
    done = 0
    while done < kills:
        moment, seconds = None, draw.uniform(0, 1.1 * whole)
        if done % 10 == 1:  # the key stays the same, so the run goes on with data that is made again
            shutil.rmtree(killed / "cache", ignore_errors=True)
            moment, seconds = "in the preparation", 0
        elif done % 3 == 2:
            moment = "in a save"
        process = start(killed, steps)
        where = kill(process, killed, seconds, moment)
        if where is None:
            if process.returncode:
                return f"status {process.returncode} instead of a run that goes on; see {killed / 'console.txt'}"
            if problem := difference(directory / "undisturbed", killed, steps):
                return problem
            print("finished and equal; once more from the start", flush=True)
            shutil.rmtree(killed / "run")
            continue
        done += 1
        print(f"kill {done} of {kills}: {where}, last checkpoint at step {last_saved(killed)}", flush=True)
    if status := start(killed, steps).wait():
        return f"status {status} of the last start; see {killed / 'console.txt'}"
    return difference(directory / "undisturbed", killed, steps)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="how often to kill (200)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    parser.add_argument("--steps", type=int, default=300, help="of the run (300)")
    parser.add_argument("--directory", type=Path, default=Path("soak"), help="a new directory to work in (soak)")
    given = parser.parse_args(arguments)
    if given.directory.exists():
        parser.error(f"--directory {given.directory} exists; name a new one")
    problem = soak(given.directory.absolute(), given.kills, given.seed, given.steps)
    verdict = f"FAILED: {problem}" if problem else "equal: weights bit for bit, each step exactly once"
    print(f"{given.kills} kills, seed {given.seed}: {verdict}", flush=True)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
