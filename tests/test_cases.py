"""Faults that people who do this job have met (P01 to P36), met here as they meet them: whole commands on real files.

Most of these cases have their tests beside the module that answers for them; the last test here sees to it that each
has one, by its number in the test's name.
"""

from __future__ import annotations

import ast
import json
import os
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tapernorm.cli.errors import CONFIGS
from tapernorm.config.options import Config
from tapernorm.runtime.log import LOGGER, append_log, open_log
from tapernorm.runtime.record import read_metrics, write_summary
from tapernorm.training import checkpoint as checkpoints
from tapernorm.training import console, loop
from tapernorm.training.state import TrainingRun
from tests.training.test_training import assert_same_weights, rows, weights

ROOT = CONFIGS.parent
SMOKE = [
    "experiment=smoke",
    "norm=all_taper",
    "tracking=none",
    "report=false",
    "trainer.samples=0",
    "trainer.device=cpu",
    "trainer.progress=none",
    "trainer.log_interval=1",
    "trainer.save_interval=5",
]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """python('evaluate.py', 'checkpoint=...') inside this process: (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(script: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(ROOT / script), *arguments])
        capsys.readouterr()
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
            status: Any = 0
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def train(python: Command) -> Command:
    return lambda *arguments: python("train.py", *SMOKE, *arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run of SMOKE."""
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    done = start(directory)
    assert done.returncode == 0, done.stderr
    return directory


def start(directory: Path, *arguments: str, **keys: Any) -> subprocess.CompletedProcess[str]:
    """SMOKE in a process of its own."""
    command = [sys.executable, str(ROOT / "train.py"), *SMOKE, f"run_dir={directory}", *arguments]
    options = {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True, "timeout": 120}
    return subprocess.run(command, cwd=directory.parent, **options | keys)


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    """Have something happen when a run enters a step for the first time."""
    enter, due = TrainingRun.enter, [act]

    def entered(self: TrainingRun, number: int) -> None:
        if number == step and due:
            due.pop()()
        enter(self, number)

    monkeypatch.setattr(TrainingRun, "enter", entered)


def assert_equals(finished: Path, directory: Path) -> None:
    """The run came out as the undisturbed one, and tells each step once."""
    assert_same_weights(weights(finished, 30), weights(directory, 30))
    assert rows(finished) == rows(directory)
    assert [row["step"] for row in read_metrics(directory)] == list(range(1, 31))


def summary_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "summary.json").read_text())


# ------------------------------------------------------------------------------------------------------------- stopping


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGXCPU", "SIGQUIT"])
def test_P03_a_signal_saves_and_the_same_command_goes_on(
    train: Command, finished: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    at_step(monkeypatch, 8, lambda: signal.raise_signal(getattr(signal, name)))
    status, out, err = train("run_dir=run", "resume=auto")
    assert (status, err) == (130, "") and "stopped by a signal after step 8, which is saved" in out
    assert summary_of(Path("run"))["status"] == "interrupted"
    assert checkpoints.step_of(checkpoints.find(Path("run"))) == 8
    status, out, _ = train("run_dir=run", "resume=auto")
    assert status == 0 and "resumed after step 8" in out
    assert_equals(finished, Path("run"))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_P03_a_signal_stops_a_sweep_and_the_same_command_goes_on(
    train: Command, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(monkeypatch, 8, lambda: signal.raise_signal(signal.SIGTERM))
    command = ["-m", "seed=0,1", "sweep.name=s"]
    status, out, err = train(*command)
    assert (status, err) == (130, "") and "2 of 2 jobs are not done; the same command goes on with them" in out
    status, out, _ = train(*command)
    assert status == 0 and out.count("resumed after step 8") == 1
    jobs = [path.parent for path in Path("runs/sweeps/s").glob("*/summary.json")]
    [first] = [job for job in jobs if summary_of(job)["seed"] == 0]
    assert_equals(finished, first)


def test_a_closed_terminal_does_not_stop_what_nohup_has_started(
    train: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(monkeypatch, 8, lambda: signal.raise_signal(signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert train("run_dir=run")[0] == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_P62_a_run_whose_checkpoints_are_all_damaged_is_left_as_it_is(finished: Path, train: Command) -> None:
    shutil.copytree(finished, "run")
    summary = Path("run/summary.json")
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"status": "interrupted"}))
    for path in Path("run/checkpoints").glob("step-*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    status, _, err = train("resume=run")
    assert status == 2 and err.count("\n") == 1 and "no other is left" in err
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


def test_a_second_ctrl_c_stops_at_once(train: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    at_step(monkeypatch, 8, twice)
    status, out, _ = train("run_dir=run")
    assert status == 130 and re.search(r"to go on: python \S*train\.py resume=\S+/run$", out, re.M)
    assert summary_of(Path("run"))["status"] == "interrupted"
    assert checkpoints.step_of(checkpoints.find(Path("run"))) == 5


def test_a_schedulers_repeated_signal_does_not_cut_the_save_short(
    train: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    at_step(monkeypatch, 8, twice)
    assert train("run_dir=run")[0] == 130
    assert checkpoints.step_of(checkpoints.find(Path("run"))) == 8


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_a_signal_during_the_preparation_ends_it_as_ctrl_c_does(
    train: Command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("tapernorm.data.prepare.prepare", lambda *_: signal.raise_signal(getattr(signal, name)))
    status, _, err = train("run_dir=run")
    assert (status, err) == (130, "") and summary_of(Path("run"))["status"] == "interrupted"


def test_P03_a_start_killed_before_it_wrote_anything_can_be_repeated(train: Command) -> None:
    Path("run/.hydra").mkdir(parents=True)
    assert train("run_dir=run", "resume=auto")[0] == 0
    assert train("run_dir=run")[0] == 2


def test_P02_who_loses_the_race_for_a_directory_leaves_the_winners_files(train: Command) -> None:
    Path("run/.hydra").mkdir(parents=True)
    with open_log(Path("run")):
        status, _, err = train("run_dir=run")
    assert status == 2 and "in use by another process" in err and Path("run/run.log").exists()


def test_whoever_reads_along_may_leave(finished: Path, tmp_path: Path) -> None:
    """As in `python train.py | head -1`: the run goes on, and its exit status is its own."""
    reading, writing = os.pipe()
    os.close(reading)
    done = start(tmp_path / "run", "trainer.progress=lines", capture_output=False, stdout=writing, stderr=writing)
    os.close(writing)
    assert done.returncode == 0
    assert_equals(finished, tmp_path / "run")


# ---------------------------------------------------------------------------------------------- disks and directories


def test_P30_a_disk_that_is_full_while_saving_is_one_line(finished: Path, tmp_path: Path) -> None:
    """With a limit on the size of a file, so that a real write fails in mid-file, in torch's own code."""
    directory = tmp_path / "run"
    done = start(directory, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18)))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {directory}/checkpoints/step-00000005: File too large"), done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" in (directory / "run.log").read_text()
    assert summary_of(directory)["status"] == "failed" and list((directory / "checkpoints").iterdir()) == []
    assert start(directory, "resume=auto").returncode == 0
    assert_equals(finished, directory)


def full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_P30_a_disk_that_fills_later_costs_no_checkpoint(
    train: Command, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.save
    at_step(monkeypatch, 13, lambda: monkeypatch.setattr(torch, "save", full))
    status, _, err = train("run_dir=run")
    where = Path("run/checkpoints/step-00000015").absolute()
    assert status == 1 and err.count("\n") == 1
    assert err.startswith(f"error: {where}: No space left on device; make room, then go on from the last checkpoint")
    assert checkpoints.step_of(checkpoints.find(Path("run"))) == 10
    monkeypatch.setattr(torch, "save", save)
    assert train("resume=run")[0] == 0
    assert_equals(finished, Path("run"))


def test_a_finished_run_that_cannot_be_made_longer_keeps_its_results(
    train: Command, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished, "run")
    before = Path("run/summary.json").read_bytes()
    at_step(monkeypatch, 33, lambda: monkeypatch.setattr(torch, "save", full))
    assert train("resume=run", "trainer.max_steps=40")[0] == 1
    assert Path("run/summary.json").read_bytes() == before and not Path("run/summary.json.before").exists()


def test_a_log_that_cannot_be_written_costs_no_run(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_log(tmp_path):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))
            for line in ("one", "two", "three"):
                LOGGER.info(line)
            append_log(tmp_path, "a traceback")
            write_summary(tmp_path, {"status": "failed"})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "one",
        "two",
        f"warning: {tmp_path / 'run.log'} cannot be written: File too large; the run goes on",
        "three",
        f"warning: {tmp_path / 'summary.json'} cannot be written: File too large",
    ]
    assert not (tmp_path / "summary.json").exists() and not (tmp_path / "summary.json.tmp").exists()


def test_a_run_whose_directory_vanishes_stops_in_one_line(train: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    at_step(monkeypatch, 8, lambda: shutil.rmtree("run"))
    directory = Path("run").absolute()
    status, _, err = train("run_dir=run")
    assert (status, err) == (1, f"error: {directory}: the run's directory has vanished\n")
    assert not directory.exists(), "nothing is made anew that would look like the run"


def test_a_cache_that_vanishes_is_made_again(train: Command, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_step(monkeypatch, 8, lambda: shutil.rmtree("mine"))
    at_step(monkeypatch, 12, lambda: signal.raise_signal(signal.SIGTERM))
    assert train("run_dir=run", "cache_dir=mine")[0] == 130
    status, out, _ = train("run_dir=run", "cache_dir=mine", "resume=auto")
    assert status == 0 and "prepared" in out
    assert_equals(finished, Path("run"))


@pytest.mark.parametrize("where", ["run_dir", "runs_dir", "cache_dir"])
def test_directories_that_cannot_be_written_are_named(
    train: Command, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    Path("file").touch()  # root may write to any directory, but not to this
    status, _, err = train(f"{where}=file/inside")
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert str(Path("file/inside").absolute()) in err and "Not a directory" in err
    assert not list(Path().glob("runs/*"))


def test_a_full_disk_under_the_cache_is_one_line(train: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tapernorm.data.cache.sync", full)
    status, _, err = train("cache_dir=mine")
    assert status == 2 and "cache_dir=" in err and "No space left on device" in err and err.count("\n") == 1
    assert [path.suffix for path in Path("mine").iterdir()] == [".lock"] and not Path("runs").exists()


def test_a_disk_that_will_be_too_small_is_said_at_the_start(
    train: Command, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "shutil", SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=1_200_000)))
    _, out, _ = train("run_dir=run", "trainer.max_steps=20")
    [warning] = [line for line in out.splitlines() if "free in" in line]
    assert warning.startswith("warning: 1.2 MB free in ") and warning.endswith("or lower trainer.keep_last=2")
    kept = sum(file.stat().st_size for file in checkpoints.find(finished).iterdir())
    model, _, _ = checkpoints.load_model(finished / "checkpoints" / "step-00000030")
    assert checkpoints.expected_size(model) == pytest.approx(kept, rel=0.1)


def test_P01_a_full_disk_fails_one_job_of_a_sweep(train: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    save = torch.save

    def once(*given: Any) -> None:
        monkeypatch.setattr(torch, "save", save)
        full()

    at_step(monkeypatch, 3, lambda: monkeypatch.setattr(torch, "save", once))
    status, out, _ = train("-m", "seed=0,1", "sweep.name=s")
    assert status == 1
    states = [summary_of(path.parent)["status"] for path in Path("runs/sweeps/s").glob("*/summary.json")]
    assert sorted(states) == ["failed", "finished"]
    assert out.count("step-00000005: No space left on device; make room") == 2  # as it happens, and below the table
    assert train("-m", "seed=0,1", "sweep.name=s")[0] == 0


# ------------------------------------------------------------------------------------------------------------ bad input


def text(path: str, words: int, name: str = "cat") -> str:
    """dataset.train or .valid of so many bytes, about."""
    lines = [f"The {name} number {i} sat on the mat and looked at the moon." for i in range(words // 50)]
    Path(path).write_text("\n".join(lines))
    return path


def test_P26_corpus_shorter_than_the_context(train: Command) -> None:
    bytes_ = ["dataset=text", "tokenizer=bytes"]
    train_file, valid = text("long.txt", 5000), text("valid.txt", 5000, "dog")
    Path("short.txt").write_text("Once upon a time")
    Path("empty.txt").touch()
    for given, message in (
        ([f"dataset.train={train_file}", "dataset.valid=short.txt"], "the validation split has 17 tokens"),
        (["dataset.train=short.txt", f"dataset.valid={valid}"], "the training split has 17 tokens"),
        ([f"dataset.train={train_file}", "dataset.valid=empty.txt"], "the validation split has 0 tokens"),
        (["dataset.train=empty.txt", f"dataset.valid={valid}"], "there is no document to train on"),
    ):
        status, _, err = train(*bytes_, *given)
        assert status == 2 and err.startswith("error: ") and err.count("\n") == 1 and message in err
        assert "split" not in message or "model.n_ctx + 1 = 65" in err
        assert not Path("runs").exists()


def test_P18_bytes_that_are_no_utf8_are_said_and_the_run_goes_on(train: Command) -> None:
    file = Path(text("train.txt", 8000))
    file.write_bytes(file.read_bytes() + b"\nA caf\xe9 by the sea.")
    status, out, _ = train("dataset=text", "dataset.train=train.txt", "dataset.valid=" + text("valid.txt", 5000, "dog"))
    assert status == 0 and f"the first byte that is not UTF-8: {file.absolute()} line 161" in out


def test_P23_ranks_of_another_vocabulary(train: Command, finished: Path) -> None:
    """Refused by a run that has begun with others, and by a model of another size."""
    ranks = Path("ranks.tiktoken")
    ours = checkpoints.find(finished) / "tokenizer.tiktoken"
    shutil.copy(ours, ranks)
    assert train("tokenizer.ranks=ranks.tiktoken", "run_dir=run")[0] == 0
    before = Path("run/summary.json").read_bytes()
    lines = ours.read_bytes().splitlines()
    (one, i), (other, j) = (line.split() for line in lines[-2:])
    for changed, message in (
        ([*lines[:-2], one + b" " + j, other + b" " + i], "the data set or its tokenizer has changed"),
        (lines[:-9], "model.vocab_size=512 differs from the tokenizer's 503"),
    ):
        ranks.write_bytes(b"\n".join(changed))
        status, _, err = train("resume=run", "tokenizer.ranks=ranks.tiktoken", "trainer.max_steps=40")
        assert status == 2 and err.count("\n") == 1 and message in err
        assert Path("run/summary.json").read_bytes() == before
    status, _, err = train("tokenizer.ranks=ranks.tiktoken", "model.vocab_size=50304")
    assert status == 2 and "model.vocab_size=50304 differs from the tokenizer's 503" in err


def test_a_checkpoint_of_a_newer_format_is_not_taken_for_a_damaged_one(train: Command, finished: Path) -> None:
    shutil.copytree(finished, "run")
    newest = Path("run/checkpoints/step-00000030/meta.json")
    newest.write_text(json.dumps({"format": checkpoints.FORMAT + 1}))
    files = sorted(Path("run").rglob("*"))
    status, _, err = train("resume=run", "trainer.max_steps=40")
    assert status == 2 and err.count("\n") == 1
    assert f"format {checkpoints.FORMAT + 1} is newer than {checkpoints.FORMAT}; update tapernorm" in err
    assert sorted(Path("run").rglob("*")) == files


def test_P30_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(train: Command, finished: Path) -> None:
    shutil.copytree(finished, "run")
    Path("run/summary.json").unlink()  # as after a kill
    weights_file = Path("run/checkpoints/step-00000030/model.safetensors")
    weights_file.write_bytes(weights_file.read_bytes()[:-1])
    status, out, _ = train("run_dir=run", "resume=auto")
    assert status == 0 and "step-00000030: model.safetensors is damaged" in out and "resumed after step 25" in out
    assert weights_file.parent.with_name("step-00000030.damaged").is_dir()
    assert_equals(finished, Path("run"))


def test_a_truncated_token_file_is_made_again(train: Command, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_step(monkeypatch, 12, lambda: signal.raise_signal(signal.SIGTERM))
    assert train("run_dir=run", "cache_dir=mine")[0] == 130
    [tokens] = Path("mine").glob("*/train.bin")
    os.truncate(tokens, tokens.stat().st_size // 2)
    status, out, _ = train("run_dir=run", "cache_dir=mine", "resume=auto")
    assert status == 0 and "is damaged (train.bin has " in out and "preparing it again" in out
    assert_equals(finished, Path("run"))


def test_a_gate_beyond_the_end_of_the_run_is_refused(train: Command) -> None:
    for override in ("gate.k_taper=31", "gate.k_warmup=30", "gate.k_taper_share=1.2"):
        status, out, err = train(override)
        assert (status, out) == (2, "") and err.count("\n") == 1 and "gate.k_" in err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.d_model=64", "model.d_model: 32 -> 64"),
        ("dataset.seed=1", "dataset.seed: 0 -> 1"),
        ("gate.k_taper=20", "gate.k_taper: 15 -> 20"),
        ("trainer.max_steps=20", "trainer.max_steps: 30 -> 20"),
    ],
)
def test_P16_a_resume_with_another_model_other_data_or_horizon_is_refused(
    train: Command, finished: Path, override: str, told: str
) -> None:
    shutil.copytree(finished, "run")
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    status, _, err = train("run_dir=run", "resume=auto", override)
    assert status == 2 and told in err and err.count("\n") == 1
    assert before == {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}


def test_P14_a_learning_rate_that_explodes_is_logged_and_told(train: Command) -> None:
    status, _, err = train("optim.lr=1e30", "optim.warmup_steps=0", "run_dir=run")
    assert status == 1 and err.startswith("error: the loss or its gradient is not finite at step ")
    last = read_metrics(Path("run"))[-1]
    assert last["nonfinite/count"] >= 1 and last["train/loss"] is None
    assert "non-finite values are logged as null" in Path("run/run.log").read_text()


def test_P21_the_separator_in_a_story_and_in_a_prompt_is_text(python: Command, train: Command, finished: Path) -> None:
    story = [f"Tim wrote <|endoftext|> on page {i} and looked at the moon." for i in range(200)]
    Path("train.txt").write_text("\n".join(story))
    status, _, err = train("dataset=text", "dataset.train=train.txt", "dataset.valid=" + text("valid.txt", 5000))
    assert (status, err) == (0, "")
    prompt = "prompt='a <|endoftext|> b'"
    status, out, _ = python("evaluate.py", f"checkpoint={finished}", "samples=1", "device=cpu", prompt)
    assert status == 0 and "a <|endoftext|> b" in out


def test_P27_a_compiled_run_is_evaluated_uncompiled(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda f, **keys: compiler(f, backend="eager", **keys))
    summary = loop.train(tiny(norm="all_taper", trainer={"compile": True}), tmp_path)
    torch._dynamo.reset()
    from tapernorm.analysis.evaluate import evaluate_checkpoint
    from tapernorm.config.programs import EvaluateConfig

    path = checkpoints.find(tmp_path)
    assert set(torch.load(path / "training.pt")) >= {"optimizer", "counters"}  # torch's default: plain data alone
    report = evaluate_checkpoint(EvaluateConfig(checkpoint=str(path), samples=0, device="cpu"))
    assert report["loss"] == pytest.approx(summary["val_loss"], abs=1e-5)


def test_P28_no_device_is_assumed(finished: Path) -> None:
    """Device and precision are stated in one line."""
    log = (finished / "run.log").read_text().splitlines()
    assert [line for line in log if line.startswith("device ")] == ["device cpu, float32, 1 threads"]


# --------------------------------------------------------------------------------------------------- every case has one


def test_every_case_has_a_test_of_its_number() -> None:
    names = [
        node.name
        for file in Path(__file__).parent.rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    missing = [f"P{k:02}" for k in range(1, 37) if not any(f"_P{k:02}_" in f"{name}_" for name in names)]
    assert not missing, f"no test carries {', '.join(missing)}"
