"""Two processes, started by torchrun: one run, and the same numbers as one process with twice the accumulation."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from tapernorm.config.options import Config
from tapernorm.config.schema import ConfigError, to_dict
from tapernorm.runtime import dist
from tapernorm.runtime.record import read_metrics
from tapernorm.training import checkpoint as checkpoints
from tapernorm.training.loop import train
from tests.conftest import GPT2, merge

pytestmark = [
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="this torch has no gloo, which joins processes on a CPU",
    ),
    pytest.mark.skipif(sys.platform == "win32", reason="signals and torchrun as on Unix"),
]
ROOT = Path(__file__).resolve().parents[2]
TRAIN = str(ROOT / "train.py")
LIMIT = 120  # seconds for one command: a hang is a failure, not a wait
SMALL = [
    "experiment=smoke",
    "trainer.device=cpu",
    "trainer.samples=0",
    "trainer.progress=none",
    "tracking=none",
    "report=false",
]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}


def torchrun(*arguments: str, directory: Path) -> subprocess.Popen[str]:
    """Start two processes; they are gone with the one that is returned."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}", *arguments]
    return subprocess.Popen(
        command,
        cwd=directory,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """(Exit status of torchrun, output, errors) of processes that end within the limit."""
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its processes, in 30 s with force
        out, err = process.communicate()
        pytest.fail(f"still running after {LIMIT} s: {out[-2000:]}\n{err[-2000:]}")
    return process.returncode, out, err


def launch(*arguments: str, directory: Path) -> tuple[int, str, str]:
    return ended(torchrun(TRAIN, *arguments, directory=directory))


def alone(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """The same command in one process."""
    command = [sys.executable, TRAIN, *arguments]
    return subprocess.run(
        command, cwd=directory, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT
    )


def errors(err: str) -> list[str]:
    """The lines that our processes wrote there, without torchrun's own report."""
    return [line for line in err.splitlines() if line.startswith("error: ")]


def assert_close(one: Path, other: Path) -> None:
    """The same rows and weights, up to the order of a sum."""
    rows, others = read_metrics(one), read_metrics(other)
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for row, twin in zip(rows, others, strict=True):
        assert row.keys() == twin.keys()
        for name in row.keys() - {"throughput/tokens_per_s", "radial/bound_ok"}:
            assert row[name] == pytest.approx(twin[name], rel=1e-5, abs=1e-5), (row["step"], name)
    newest, newest_other = checkpoints.latest(one), checkpoints.latest(other)
    assert newest is not None and newest_other is not None and newest.name == newest_other.name
    weights, twins = checkpoints.read_weights(newest), checkpoints.read_weights(newest_other)
    assert weights.keys() == twins.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(
            tensor, twins[name], rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


# ----------------------------------------------------------------------------------------------------- the same numbers

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fixed_target": ("all_taper", {"anchor": {"kind": "fixed_target"}}),
    "mean_log": ("all_taper", {"anchor": {"kind": "mean_log"}}),
    "batch_mean": ("all_taper", {"anchor": {"kind": "batch_mean"}}),
    "fake_ln": ("fake_ln", {"gate": {"shape": "sequential"}}),
    "dropout": ("internal_taper", {"model": GPT2, "anchor": {"kind": "mean_log"}}),
    "fsdp": ("all_taper", {"trainer": {"parallel": "fsdp"}, "anchor": {"kind": "mean_log"}, "optim": {"clip": 0.5}}),
    "fsdp, z_loss": (
        "all_taper",
        {"trainer": {"parallel": "fsdp"}, "anchor": {"kind": "z_loss"}, "calibration": {"level": 1.0}},
    ),
    "fsdp, dropout": ("fake_ln", {"trainer": {"parallel": "fsdp"}, "model": GPT2, "anchor": {"kind": "batch_mean"}}),
}
ACCUMULATIONS = {"mean_log": 1}  # in each of the two processes; 2 in the other cases


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with runs of two processes, <case>-2, all of them in one launch."""
    return tmp_path_factory.mktemp("pairs")


def configured(tiny: Callable[..., Config], case: str, accumulation: int) -> Config:
    norm, keys = CASES[case]
    trainer = {"batch_size": 8, "accumulation": accumulation, "log_interval": 1}
    return tiny(norm=norm, **merge({"optim": {"lr": 1e-3}, "trainer": trainer}, keys))


@pytest.fixture
def two(tiny: Callable[..., Config], pairs: Path) -> Path:
    if not (pairs / "jobs.json").exists():
        jobs = []
        for case in CASES:
            (pairs / f"{case}-2").mkdir()
            jobs.append((f"{case}-2", to_dict(configured(tiny, case, ACCUMULATIONS.get(case, 2)))))
        (pairs / "jobs.json").write_text(json.dumps(jobs))
        status, _, err = ended(torchrun("-m", "tests.runtime.two_processes", "jobs.json", directory=pairs))
        assert status == 0, err
    return pairs


@pytest.mark.parametrize("case", CASES)
def test_P25_two_processes_equal_twice_the_accumulation(tiny: Callable[..., Config], two: Path, case: str) -> None:
    """Losses, weights, c, scale target and everything else that is logged; with dropout the masks, too."""
    (two / case).mkdir()
    config = configured(tiny, case, 2 * ACCUMULATIONS.get(case, 2))
    train(config, two / case)
    assert_close(two / case, two / f"{case}-2")
    seen = json.loads((two / f"{case}-2/processes.json").read_text())
    assert seen["equal"] == [True] * 24, "the processes' weights differ"
    assert seen["held"] == ([1.0, 1.0] if "fsdp" not in case else pytest.approx([0.5, 0.5], abs=0.02))


# -------------------------------------------------------------------------------------------------------------- one run


def test_P09_two_processes_are_one_run(tmp_path: Path) -> None:
    """One directory, one W&B run, one console, rows of every step once."""
    settings = [item for item in SMALL if not item.startswith(("tracking", "trainer.samples"))]
    status, out, err = launch(*settings, "tracking.wandb=offline", directory=tmp_path)
    assert status == 0, err
    (directory,) = (tmp_path / "runs").iterdir()
    assert len(list((directory / "wandb").glob("offline-run-*"))) == 1
    for line in ("run directory", "2 processes", "calibrated after step 4", "sample 1:", "finished: validation loss"):
        assert out.count(line) == 1, line
    steps = [row["step"] for row in read_metrics(directory)]
    assert steps == sorted(set(steps)) and steps[-1] == 30
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["tokens"]) == ("finished", 30, 30 * 4 * 64)


def test_faults_of_the_command_are_one_line_and_leave_nothing(tmp_path: Path) -> None:
    commands = {
        ("--multirun", "seed=1,2"): "--multirun: the jobs of a sweep are single processes; start it without torchrun",
        (*SMALL, "trainer.batch_size=6", "trainer.accumulation=2"): "trainer.batch_size=6 is not a multiple of "
        "trainer.accumulation=2 times the 2 processes",
        ("dataset=text", "dataset.train=nowhere.txt", *SMALL[1:]): "nowhere.txt",
    }
    started = [torchrun(TRAIN, *command, directory=tmp_path) for command in commands]
    for process, told in zip(started, commands.values(), strict=True):
        status, out, err = ended(process)
        assert status != 0 and out == ""
        (line,) = errors(err)
        assert told in line
        assert "exitcode  : 2 " in err and err.count("Traceback") == 1, "torchrun's own is the only one"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raise RuntimeError('no memory left')", "process 1: RuntimeError: no memory left"),
        ("os.kill(os.getpid(), 9)", "another process was killed, perhaps for want of memory"),
    ],
    ids=["raised", "killed"],
)
def test_a_fault_in_one_process_stops_all_and_is_the_one_told(tmp_path: Path, fault: str, told: str) -> None:
    (tmp_path / "faulty.py").write_text(
        "import os, runpy\n"
        "from tapernorm.training.state import TrainingRun\n"
        "finish = TrainingRun.finish_step\n"
        "def fail(self, step):\n"
        "    finish(self, step)\n"
        "    if step == 7 and os.environ['RANK'] == '1':\n"
        f"        {fault}\n"
        "TrainingRun.finish_step = fail\n"
        f"runpy.run_path({TRAIN!r}, run_name='__main__')\n"
    )
    status, _, err = ended(torchrun("faulty.py", *SMALL, "run_dir=run", directory=tmp_path))
    (line,) = errors(err)
    assert status != 0 and told in line
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", told)
    log = (tmp_path / "run/run.log").read_text()
    assert log.count("Traceback") == 1 and (fault in log or "kill" in fault)


# --------------------------------------------------------------------------------------------------------------- resume


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with `whole`, a run of one process."""
    directory = tmp_path_factory.mktemp("whole")
    done = alone(*SMALL, *LONGER, "run_dir=whole", "trainer.accumulation=2", directory=directory)
    assert done.returncode == 0, done.stderr
    return directory


LONGER = [
    "norm=all_taper",
    "anchor=mean_log",
    "trainer.max_steps=60",
    "trainer.save_interval=20",
    "trainer.keep_last=9",
]


def test_P24_one_process_goes_on_as_two_that_share_the_model_and_again_as_one(whole: Path) -> None:
    more = whole / "more"
    shutil.copytree(whole / "whole", more)
    settings = ["resume=more/checkpoints/step-00000020", "trainer.accumulation=1", "trainer.parallel=fsdp"]
    status, out, err = launch(*settings, directory=whole)
    assert status == 0, err
    assert "trainer.accumulation: 2 -> 1" in out and "trainer.parallel: ddp -> fsdp" in out
    assert_close(whole / "whole", more)
    checkpoint = more / "checkpoints/step-00000040"  # the shares, put together
    whole_state, state = (
        checkpoints.read_training(run / checkpoint.relative_to(more)) for run in (whole / "whole", more)
    )
    for index, moments in whole_state["optimizer"]["state"].items():
        for name, moment in moments.items():
            torch.testing.assert_close(moment, state["optimizer"]["state"][index][name], rtol=1e-4, atol=1e-6)
    train(checkpoints.read_config(checkpoint), more, checkpoint)
    assert_close(whole / "whole", more)


def test_SIGTERM_saves_two_processes_and_one_goes_on(whole: Path) -> None:
    """Sent to torchrun in the middle of the run, which is slowed down so that there is one."""
    slow = whole / "slow.py"
    slow.write_text(
        "import runpy, time\n"
        "from tapernorm.training.state import TrainingRun\n"
        "finish = TrainingRun.finish_step\n"
        "TrainingRun.finish_step = lambda self, step: (time.sleep(0.1 * (step > 23)), finish(self, step))\n"
        f"runpy.run_path({TRAIN!r}, run_name='__main__')\n"
    )
    process = torchrun(str(slow), *SMALL, *LONGER, "run_dir=two", directory=whole)
    metrics, began = whole / "two/metrics.jsonl", time.monotonic()
    while not (metrics.exists() and '"step": 25' in metrics.read_text()) and process.poll() is None:
        assert time.monotonic() - began < LIMIT
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, out, err = ended(process)
    summary = json.loads((whole / "two/summary.json").read_text())
    assert summary["status"] == "interrupted" and 25 <= summary["steps"] < 60, err
    assert out.count("interrupted; to go on: ") == 1 and not errors(err)
    assert (whole / f"two/checkpoints/step-{summary['steps']:08d}").is_dir()
    checkpoint = checkpoints.find(whole / "two")
    train(checkpoints.read_config(checkpoint), whole / "two", checkpoint)
    assert_close(whole / "whole", whole / "two")


# ---------------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize(
    ("device", "seen", "told"),
    [
        (
            "cuda",
            1,
            "trainer.device=cuda: 2 processes on this machine, and torch sees 1 CUDA devices; start one process",
        ),
        ("cuda:1", 2, "trainer.device=cuda:1: each of the 2 processes takes its own; use trainer.device=cuda"),
        ("mps", 0, "trainer.device=mps: several processes cannot share it; use trainer.device=cpu"),
    ],
)
def test_devices_that_do_not_suit_several_processes(
    monkeypatch: pytest.MonkeyPatch, device: str, seen: int, told: str
) -> None:
    monkeypatch.setattr(dist, "_size", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    for name, value in {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=re.escape(told)):
        dist.place(torch.device(device))


def test_shards_are_not_compiled(tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(trainer={"compile": True, "parallel": "fsdp"})
    dist.check(config.trainer)  # of one process nothing is sharded
    monkeypatch.setattr(dist, "_size", 2)
    with pytest.raises(ConfigError, match=r"trainer\.parallel=fsdp: trainer\.compile=true is for ddp"):
        dist.check(config.trainer)
