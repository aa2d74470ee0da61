"""Two processes, started by torchrun: one run, and the same numbers as one process with twice the accumulation."""

from __future__ import annotations

import json
import os
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

from tapernorm import checkpoint as checkpoints
from tapernorm.config import Config, to_dict
from tapernorm.loop import train
from tapernorm.tracking import read_metrics
from tests.conftest import GPT2

pytestmark = [
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="this torch has no gloo, which joins processes on a CPU",
    ),
    pytest.mark.skipif(sys.platform == "win32", reason="signals and torchrun as on Unix"),
]
ROOT = Path(__file__).resolve().parents[1]
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


# ------------------------------------------------------------------------------------------------------ the same numbers

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fixed_target": ("all_taper", {"anchor": {"kind": "fixed_target"}}),
    "mean_log": ("all_taper", {"anchor": {"kind": "mean_log"}}),
    "batch_mean": ("all_taper", {"anchor": {"kind": "batch_mean"}}),
    "fake_ln": ("fake_ln", {"gate": {"shape": "sequential"}}),
    "dropout": ("internal_taper", {"model": GPT2, "anchor": {"kind": "mean_log"}}),
}
ACCUMULATIONS = {"mean_log": 1}  # in each of the two processes; 2 in the other cases


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with runs of two processes, <case>-2, all of them in one launch."""
    return tmp_path_factory.mktemp("pairs")


def configured(tiny: Callable[..., Config], case: str, accumulation: int) -> Config:
    norm, keys = CASES[case]
    trainer = {"batch_size": 8, "accumulation": accumulation, "log_interval": 1}
    return tiny(norm=norm, **{"optim": {"lr": 1e-3}, "trainer": trainer, **keys})


@pytest.fixture
def two(tiny: Callable[..., Config], pairs: Path) -> Path:
    if not (pairs / "jobs.json").exists():
        jobs = []
        for case in CASES:
            (pairs / f"{case}-2").mkdir()
            jobs.append((f"{case}-2", to_dict(configured(tiny, case, ACCUMULATIONS.get(case, 2)))))
        (pairs / "jobs.json").write_text(json.dumps(jobs))
        status, _, err = ended(torchrun("-m", "tests.two_processes", "jobs.json", directory=pairs))
        assert status == 0, err
    return pairs


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_twice_the_accumulation(tiny: Callable[..., Config], two: Path, case: str) -> None:
    """Losses, weights, c, scale target and everything else that is logged; with dropout the masks, too."""
    (two / case).mkdir()
    config = configured(tiny, case, 2 * ACCUMULATIONS.get(case, 2))
    train(config, two / case, say=lambda line: None)
    assert_close(two / case, two / f"{case}-2")
    assert json.loads((two / f"{case}-2/equal.json").read_text()) == [True] * 24, "the processes' weights differ"
