"""Metrics on disk, the Weights & Biases mirror (faults P11 to P16) and the progress output."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml

from tapernorm.config.options import TrackingConfig
from tapernorm.config.schema import ConfigError
from tapernorm.runtime.log import to_console
from tapernorm.runtime.progress import Progress
from tapernorm.runtime.record import METRICS, METRICS_FILE, read_metrics
from tapernorm.training.tracking import Tracker

REPO = Path(__file__).parents[2]
DISABLED = TrackingConfig(wandb="disabled")
KEY = "0123456789abcdef" * 3
log = logging.getLogger("tapernorm.test")


def make_tracker(directory: Path, **options: Any) -> Tracker:
    return Tracker(directory, {}, DISABLED, name="test", tokens_per_step=64, **options)


def line(step: int, metrics: dict[str, Any]) -> dict[str, Any]:
    """What is written of a step."""
    return {"step": step, "trainer/tokens": 64 * step, **metrics}


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / METRICS_FILE).read_text().splitlines()]


# ---------------------------------------------------------------------------------------------------- metrics.jsonl


def test_a_step_is_one_row_however_often_it_is_logged(tmp_path: Path) -> None:
    with make_tracker(tmp_path) as tracker:
        tracker.log(1, {"train/loss": 2.0})
        tracker.log(1, {"gate/g": 1})
        tracker.flush()
        tracker.log(1, {"train/loss": 3, "val/loss": None})
        tracker.log(2, {"train/loss": 1.0})
        assert lines_of(tmp_path)[-1] == line(2, {"train/loss": 1.0})  # on disk before the next step
    assert read_metrics(tmp_path) == [
        line(1, {"train/loss": 3, "gate/g": 1, "val/loss": None}),
        line(2, {"train/loss": 1.0}),
    ]
    assert [row["step"] for row in lines_of(tmp_path)] == [1, 1, 1, 2], "nothing is written twice"


def test_tensors_and_numpy_scalars_become_numbers(tmp_path: Path) -> None:
    values = {
        "a": torch.tensor(0.5, dtype=torch.bfloat16),
        "b": torch.tensor(3),
        "c": np.float32(0.25),
        "d": np.int64(2**40),
        "e": torch.ones(1, requires_grad=True),
    }
    with make_tracker(tmp_path) as tracker:
        tracker.log(1, values)
        with pytest.raises(TypeError, match="metric gate/g is a str"):
            tracker.log(1, {"gate/g": "closed"})
    assert lines_of(tmp_path) == [line(1, {"a": 0.5, "b": 3, "c": 0.25, "d": 2**40, "e": 1.0})]


def test_P13_resume_holds_every_step_exactly_once(tmp_path: Path) -> None:
    with make_tracker(tmp_path) as tracker:
        for step in range(1, 18):
            tracker.log(step, {"train/loss": 1 / step})
    with make_tracker(tmp_path, resume_step=10) as tracker:
        tracker.log(10, {"val/loss": 5.0})  # validation comes after the save, so a resumed run may repeat it
        for step in range(11, 21):
            tracker.log(step, {"train/loss": 1 / step})
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert [row["step"] for row in lines_of(tmp_path)] == sorted([10, *range(1, 21)])
    assert rows[9] == line(10, {"train/loss": 0.1, "val/loss": 5.0})
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


def test_P13_a_torn_last_line_is_dropped_by_the_reader_and_on_resume(tmp_path: Path) -> None:
    whole = "".join(json.dumps(line(step, {"a": step})) + "\n" for step in (1, 2))
    (tmp_path / METRICS_FILE).write_text(whole + '{"step": 3, "a"')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    with make_tracker(tmp_path) as tracker:
        tracker.log(3, {"a": 3})
    assert lines_of(tmp_path) == [line(step, {"a": step}) for step in (1, 2, 3)]


def test_P13_a_killed_process_loses_nothing_it_logged(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys; from tapernorm.config.options import TrackingConfig\n"
        "from tapernorm.training.tracking import Tracker\n"
        "tracker = Tracker(\n"
        "    pathlib.Path(sys.argv[1]), {}, TrackingConfig(wandb='disabled'), name='x', tokens_per_step=64)\n"
        "for step in range(1, 6): tracker.log(step, {'a': step}); tracker.log(step, {'b': step})\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=REPO, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert read_metrics(tmp_path) == [line(step, {"a": step, "b": step}) for step in range(1, 6)]


def test_reader_merges_rows_of_a_step_and_names_a_damaged_line(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 2, "a": 1}\n{"step": 1, "a": 0}\n{"step": 2, "b": 2}\n')
    assert read_metrics(tmp_path) == [{"step": 1, "a": 0}, {"step": 2, "a": 1, "b": 2}]
    path.write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2 is damaged"):
        read_metrics(tmp_path)
    with pytest.raises(ConfigError, match="not a run's directory"):
        read_metrics(tmp_path / "missing")


def test_P14_non_finite_values_are_null_and_counted_and_said_once(tmp_path: Path, said: list[str]) -> None:
    with make_tracker(tmp_path) as tracker:
        tracker.log(1, {"train/loss": 2.0})
        tracker.log(2, {"train/loss": math.nan, "grad/norm": torch.tensor(math.inf), "gate/g": 1.0})
        tracker.log(3, {"train/loss": np.float32("-inf")})
        tracker.log(4, {"train/loss": 1.0})
        state = tracker.state()
    first, second, third, fourth = lines_of(tmp_path)
    assert "nonfinite/count" not in first
    assert second == line(2, {"train/loss": None, "grad/norm": None, "gate/g": 1.0, "nonfinite/count": 2})
    assert (third["nonfinite/count"], fourth["nonfinite/count"]) == (3, 3)
    assert len(said) == 1 and "train/loss is nan at step 2" in said[0]
    assert state == {"wandb_id": None, "nonfinite": 3}

    with make_tracker(tmp_path, resume_step=4, state=state) as resumed:
        resumed.log(5, {"train/loss": math.nan})
        assert resumed.nonfinite == 4
    assert len(said) == 1


def test_state_is_plain_and_keeps_the_id_while_wandb_is_disabled(tmp_path: Path) -> None:
    state = {"wandb_id": "abcd1234", "nonfinite": 0}
    for older in ({}, {"row": line(2, {"train/loss": 1.0})}):  # of checkpoints before metrics.jsonl was append-only
        with make_tracker(tmp_path, state=state | older) as tracker:
            assert json.loads(json.dumps(tracker.state())) == state


# ------------------------------------------------------------------------------------------------- W&B, a real run

SCRIPT = """
import json, logging, math, sys
from pathlib import Path
from tapernorm.config.options import TrackingConfig
from tapernorm.runtime.log import to_console
from tapernorm.training.tracking import Tracker

logging.basicConfig(level=logging.INFO)  # as Hydra does
to_console()
root = Path(sys.argv[1])
tracking = TrackingConfig(wandb="offline", group="sweep", tags=("t1", "t2"))

def job(name, seed, **options):
    config = {"seed": seed, "model": {"n_layer": 2, "sites": ["attn", "mlp"], "d_ff": None}, "max_steps": 8}
    config |= options.pop("changed", {})
    return Tracker(root / name, config, tracking, name=name, tokens_per_step=64, **options)

try:
    with job("one", 1) as tracker:
        tracker.log(1, {"train/loss": 1.0})
        ids = [tracker.state()["wandb_id"]]
        raise RuntimeError("job 1 fails")
except RuntimeError:
    pass
with job("two", 2) as tracker:
    for step in range(1, 9):
        tracker.log(step, {"train/loss": math.nan if step == 3 else 1 / step})
        if step == 6:
            tracker.log(step, {"val/loss": 2.0})
    tracker.log(8, {"val/loss": 2.5})
    (root / "two" / "report.html").write_text("<p>report</p>")
    state = tracker.state()
    tracker.finish("finished", {"val_loss": 2.5, "where": {"commit": "abc"}})
with job("two", 2, changed={"max_steps": 12}, resume_step=5, state=state) as tracker:
    for step in range(6, 13):
        tracker.log(step, {"train/loss": 1 / step})
    ids += [state["wandb_id"], tracker.state()["wandb_id"]]
(root / "ids.json").write_text(json.dumps(ids))
"""


def wandb_environment(home: Path, **extra: str) -> dict[str, str]:
    """A machine without any W&B settings, key or network."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return clean | {"HOME": str(home), "WANDB_BASE_URL": "http://127.0.0.1:9", "NETRC": str(home / ".netrc")} | extra


def records_of(run: Path) -> Iterator[Any]:
    """The records of an offline run. Its file is a LevelDB log: 32 KiB blocks of chunks with a 7-byte header."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # generated

    data = next(run.glob("*.wandb")).read_bytes()
    position, record = 7, b""  # after the file's own header
    while position < len(data):
        if 32768 - position % 32768 < 7:  # too short for a header: padding
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield Record.FromString(record)
            record = b""


def items_of(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


class OfflineRun:
    """What an offline run would upload."""

    def __init__(self, path: Path) -> None:
        records = list(records_of(path))
        self.run = next(record.run for record in records if record.HasField("run"))
        self.config = items_of(self.run.config.update)
        self.rows = [items_of(record.history.item) for record in records if record.HasField("history")]
        self.metrics = [record.metric for record in records if record.HasField("metric")]
        self.artifacts = [record.artifact for record in records if record.HasField("artifact")]
        self.alerts = [record.alert for record in records if record.HasField("alert")]
        self.exit_code = next(record.exit.exit_code for record in records if record.HasField("exit"))
        self.summary: dict[str, Any] = {}
        for record in records:
            if record.HasField("summary"):
                self.summary |= items_of(record.summary.update)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three offline runs in one process: one that raises, one that finishes, and its continuation."""
    root = tmp_path_factory.mktemp("sweep")
    environment = wandb_environment(root / "home", WANDB_API_KEY=KEY, WANDB_RUN_ID="shared")
    arguments = [sys.executable, "-c", SCRIPT, str(root)]
    done = subprocess.run(arguments, cwd=REPO, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (root / "console.txt").write_text(done.stdout + done.stderr)
    return root


@pytest.fixture(scope="module")
def runs(sweep: Path) -> list[OfflineRun]:
    paths = [path for job in ("one", "two") for path in (sweep / job / "wandb").glob("offline-run-*")]
    # In the order they started; two in the same second differ by a suffix.
    return [OfflineRun(path) for path in sorted(paths, key=lambda path: next(path.glob("*.wandb")).stat().st_mtime_ns)]


def test_P11_jobs_of_one_process_are_runs_of_their_own(sweep: Path, runs: list[OfflineRun]) -> None:
    ids = json.loads((sweep / "ids.json").read_text())
    assert [run.run.run_id for run in runs] == ids
    assert ids[0] != ids[1] and "shared" not in ids
    assert [run.config["seed"] for run in runs] == [1, 2, 2]
    assert [run.exit_code for run in runs] == [1, 0, 0]
    assert [run.summary["status"] for run in runs] == ["failed", "finished", "finished"]
    assert [row["train/loss"] for row in runs[0].rows] == [1.0]


def test_P11_name_group_and_tags_arrive(runs: list[OfflineRun]) -> None:
    run = runs[1].run
    assert (run.display_name, run.run_group, list(run.tags)) == ("two", "sweep", ["t1", "t2"])


def test_P13_the_mirror_has_every_step_on_its_own_step_metric(sweep: Path, runs: list[OfflineRun]) -> None:
    steps = [row["trainer/step"] for row in runs[1].rows]
    assert sorted(set(steps)) == list(range(1, 9))
    assert [row["trainer/step"] for row in runs[2].rows] == list(range(6, 13))  # goes back without losing rows
    assert runs[1].rows[1]["train/loss"] == 0.5 and runs[1].rows[1]["trainer/tokens"] == 128
    assert [row["val/loss"] for row in runs[1].rows if "val/loss" in row] == [2.0, 2.5]
    assert all(row["trainer/tokens"] == 64 * row["trainer/step"] for run in runs for row in run.rows)
    assert [row["step"] for row in read_metrics(sweep / "two")] == list(range(1, 13))


def test_every_metric_is_defined_over_tokens(runs: list[OfflineRun]) -> None:
    defined = {metric.name or metric.glob_name: metric for metric in runs[1].metrics}
    assert set(defined) == {name.replace("<site>", "*") for name in METRICS}
    for name, metric in defined.items():
        assert metric.step_metric == ("" if name == "trainer/tokens" else "trainer/tokens")
        assert metric.summary.min == (name in ("val/loss", "val/perplexity"))
    assert runs[1].summary["val/loss"] == {"min": 2.0} and runs[1].summary["train/loss"] == 1 / 8


def test_a_report_is_an_artifact(runs: list[OfflineRun]) -> None:
    report = runs[1].artifacts[0]
    assert (report.type, [entry.path for entry in report.manifest.contents]) == ("report", ["report.html"])
    assert runs[0].artifacts == []  # there was none yet


def test_P14_a_nan_is_counted_and_raises_an_alert(runs: list[OfflineRun]) -> None:
    row = next(row for row in runs[1].rows if row["trainer/step"] == 3)
    assert "train/loss" not in row and row["nonfinite/count"] == 1
    assert [alert.text for alert in runs[1].alerts] == ["train/loss is nan at step 3"]
    assert runs[0].alerts == [] and runs[2].alerts == []


def test_P15_config_is_nested_and_the_summary_is_there(sweep: Path, runs: list[OfflineRun]) -> None:
    assert runs[1].config["model"] == {"n_layer": 2, "sites": ["attn", "mlp"], "d_ff": None}
    written = yaml.safe_load((sweep / "two" / "wandb" / "latest-run" / "files" / "config.yaml").read_text())
    assert written["model"]["value"] == runs[1].config["model"]
    assert runs[1].summary["val_loss"] == 2.5
    assert {"commit": "abc"} in (runs[1].summary.get("where"), {"commit": runs[1].summary.get("where/commit")})


def test_P15_the_api_key_is_in_no_file_and_the_console_is_silent(sweep: Path) -> None:
    files = [path for path in sweep.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    said = (sweep / "console.txt").read_text().splitlines()
    assert said == [
        "warning: train/loss is nan at step 3; non-finite values are logged as null and counted in nonfinite/count"
    ]


def test_P16_a_changed_setting_does_not_stop_the_resumed_run(runs: list[OfflineRun]) -> None:
    assert runs[1].run.run_id == runs[2].run.run_id
    assert (runs[1].config["max_steps"], runs[2].config["max_steps"]) == (8, 12)


def test_an_offline_run_holds_every_metric_of_every_step(tmp_path: Path) -> None:
    """One job of a sweep, with everything that can be measured, as W&B would upload it."""
    arguments = ["-m", "experiment=smoke", "norm=all_taper", "anchor=fixed_target", "sweep.name=s"]
    arguments += ["trainer.log_interval=1", "trainer.samples=0", "trainer.device=cpu"]
    subprocess.run(
        [sys.executable, str(REPO / "train.py"), *arguments],
        cwd=tmp_path,
        env=wandb_environment(tmp_path / "home"),
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=120,
    )
    [job] = (tmp_path / "runs" / "sweeps" / "s").glob("*/")
    run = OfflineRun(next((job / "wandb").glob("offline-run-*")))
    assert (run.run.run_group, run.run.display_name) == ("s", job.name)
    logged = {re.sub(r"\.(\d+\.(attn|mlp)|final)$", ".<site>", name) for row in run.rows for name in row}
    assert METRICS.keys() - logged == {"nonfinite/count"}
    assert {name for name in logged if not name.startswith("_")} <= METRICS.keys()
    rows: dict[int, dict[str, Any]] = {}
    for row in run.rows:
        rows.setdefault(row["trainer/step"], {}).update(row)
    assert list(rows) == list(range(1, 31)) and all("train/loss" in row for row in rows.values())
    assert [row["trainer/tokens"] for row in rows.values()] == [256 * step for step in range(1, 31)]
    config = yaml.safe_load((job / "config.yaml").read_text())
    assert {key: run.config[key] for key in config} == config and config["model"]["n_layer"] == 2
    assert run.summary["val_loss"] == pytest.approx(run.summary["val/loss"]["min"], rel=0.1)


# ----------------------------------------------------------------------------------------- W&B that does not work


def start_in_a_process(directory: Path, mode: str, strict: bool = False, **environment: str) -> Any:
    script = (
        "import pathlib, sys; from tapernorm.config.options import TrackingConfig\n"
        "from tapernorm.runtime.log import to_console; to_console()\n"
        "from tapernorm.training.tracking import Tracker\n"
        f"tracking = TrackingConfig(wandb={mode!r}, strict={strict})\n"
        "with Tracker(pathlib.Path(sys.argv[1]), {'seed': 1}, tracking, name='x', tokens_per_step=8) as tracker:\n"
        "    tracker.log(1, {'train/loss': 1.0})\n"
        "print('wandb' in sys.modules)"
    )
    return subprocess.run(
        [sys.executable, "-c", script, str(directory)],
        cwd=REPO,
        env=wandb_environment(directory / "home", WANDB_INIT_TIMEOUT="2", **environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_P12_online_without_a_key_warns_and_goes_on_offline(tmp_path: Path) -> None:
    done = start_in_a_process(tmp_path, "online")
    assert done.returncode == 0, done.stderr
    warning, _ = done.stdout.splitlines()
    assert warning.startswith("warning: W&B: no API key, so offline")
    assert done.stderr == ""
    [run] = (tmp_path / "wandb").glob("offline-run-*")
    assert len(OfflineRun(run).rows) == 1


def test_P12_an_unreachable_server_warns_and_goes_on_offline(tmp_path: Path) -> None:
    done = start_in_a_process(tmp_path, "auto", WANDB_API_KEY=KEY)
    assert done.returncode == 0, done.stderr
    warning, _ = done.stdout.splitlines()
    assert warning.startswith("warning: W&B: ") and "so offline" in warning
    assert done.stderr == ""
    [run] = (tmp_path / "wandb").glob("offline-run-*")
    assert len(OfflineRun(run).rows) == 1
    assert len(lines_of(tmp_path)) == 1


def test_P12_strict_stops_with_one_line(tmp_path: Path) -> None:
    done = start_in_a_process(tmp_path, "online", strict=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "ConfigError: tracking.wandb=online: W&B cannot be reached: no API key"
    )


def test_P12_strict_takes_the_new_run_away_again(tmp_path: Path) -> None:
    arguments = ["experiment=smoke", "trainer.device=cpu", "tracking.wandb=online", "tracking.strict=true"]
    done = subprocess.run(
        [sys.executable, str(REPO / "train.py"), *arguments],
        cwd=tmp_path,
        env=wandb_environment(tmp_path / "home"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "W&B cannot be reached: no API key" in done.stderr
    assert not list(tmp_path.glob("runs*"))


def test_P12_auto_without_a_key_is_offline_also_if_strict(tmp_path: Path) -> None:
    done = start_in_a_process(tmp_path, "auto", strict=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("W&B: no API key, so offline")


def test_auto_respects_WANDB_MODE_and_disabled_does_not_import_wandb(tmp_path: Path) -> None:
    done = start_in_a_process(tmp_path, "auto", WANDB_MODE="disabled")
    assert (done.returncode, done.stdout) == (0, "False\n")
    assert not (tmp_path / "wandb").exists()


FAKE_WANDB = """
import os, time

fault, _, where = os.environ["FAULT"].partition(" ")


class Run:
    id = "fake"

    def __init__(self, directory):
        self.dir, self.summary = directory, self

    def __getattr__(self, name):
        def call(*args, **options):
            if name != "define_metric":
                with open(os.path.join(self.dir, "calls.txt"), "a") as calls:
                    print(name, file=calls, flush=True)
                act(name)

        return call


def act(name):
    if where == name or (where == "everywhere" and name != "init"):
        if fault == "raises":
            raise ConnectionError("service gone\\ndetails")
        time.sleep(60)


def init(dir, **options):
    act("init")
    return Run(dir)


def Settings(**options):
    pass


def setup(settings):
    pass


def login(**options):
    return True
"""


@pytest.fixture
def mirrored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tracker]:
    """mirrored("hangs log") -> a tracker whose W&B hangs in, or raises from, a call of this name."""

    def make(fault: str, mode: Any = "offline", strict: bool = False) -> Tracker:
        (tmp_path / "fake").mkdir()
        (tmp_path / "fake" / "wandb.py").write_text(FAKE_WANDB)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
        monkeypatch.setenv("FAULT", fault)
        tracking = TrackingConfig(wandb=mode, strict=strict)
        return Tracker(tmp_path, {}, tracking, name="test", tokens_per_step=64)

    return make


def test_P14_a_failing_mirror_is_said_once_and_never_raises(
    tmp_path: Path, mirrored: Callable[..., Tracker], said: list[str]
) -> None:
    with mirrored("raises everywhere") as tracker:
        for step in range(1, 4):
            tracker.log(step, {"train/loss": 1.0})
        tracker.finish("finished", {})
        tracker.finish("failed", {})
    assert (tmp_path / "calls.txt").read_text().split() == ["log", "finish"]  # closed all the same, and once
    assert len(said) == 1 and "W&B failed (service gone); the run goes on" in said[0]
    assert len(lines_of(tmp_path)) == 3


@pytest.mark.parametrize("call", ["log", "finish"])
def test_a_hanging_mirror_neither_slows_nor_keeps_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirrored: Callable[..., Tracker], call: str, said: list[str]
) -> None:
    monkeypatch.setattr(Tracker, "FINISH_SECONDS", 0.2)
    began = time.monotonic()
    with mirrored(f"hangs {call}") as tracker:
        for step in range(1, 20):
            tracker.log(step, {"train/loss": 1.0})
        while call == "log" and not (tmp_path / "calls.txt").exists():
            time.sleep(0.01)
    assert time.monotonic() - began < 10
    assert len(said) == 1 and said[0].endswith("the run goes on with metrics.jsonl alone")
    assert "no answer within 0 s" in said[0]
    assert [row["step"] for row in lines_of(tmp_path)] == list(range(1, 20))


def test_ctrl_c_does_not_wait_for_a_hanging_mirror(tmp_path: Path, mirrored: Callable[..., Tracker]) -> None:
    def interrupted() -> None:
        with mirrored("hangs log") as tracker:
            tracker.log(1, {"train/loss": 1.0})
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - began < 10 and len(lines_of(tmp_path)) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_a_hanging_start_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirrored: Callable[..., Tracker], strict: bool, said: list[str]
) -> None:
    monkeypatch.setattr(Tracker, "START_SECONDS", 0.1)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "0.1")
    if strict:
        with pytest.raises(ConfigError, match="W&B cannot be reached: no answer within 0 s"):
            mirrored("hangs init", mode="online", strict=True)
        return
    with mirrored("hangs init", mode="online") as tracker:
        tracker.log(1, {"train/loss": 1.0})
    assert len(said) == 1 and "W&B cannot start (no answer within 0 s)" in said[0]
    assert len(lines_of(tmp_path)) == 1


def test_a_mirror_may_be_killed(tmp_path: Path, mirrored: Callable[..., Tracker], said: list[str]) -> None:
    with mirrored("hangs nowhere") as tracker:
        assert tracker._mirror is not None
        tracker._mirror._process.kill()
        tracker._mirror._process.wait()
        tracker.log(1, {"train/loss": math.inf})
    assert said[-1] == "warning: W&B failed (its process has ended); the run goes on with metrics.jsonl alone"
    assert len(said) == 2 and len(lines_of(tmp_path)) == 1


def test_a_killed_run_leaves_no_mirror_behind(tmp_path: Path) -> None:
    """It ends by itself, once W&B has what was logged."""
    script = (
        "import os, pathlib, sys; from tapernorm.config.options import TrackingConfig\n"
        "from tapernorm.training.tracking import Tracker\n"
        "offline = TrackingConfig(wandb='offline')\n"
        "tracker = Tracker(pathlib.Path(sys.argv[1]), {}, offline, name='x', tokens_per_step=64)\n"
        "tracker.log(1, {'a': 1})\n"
        "print(tracker._mirror._process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    arguments, environment = [sys.executable, "-c", script, str(tmp_path)], wandb_environment(tmp_path / "home")
    done = subprocess.run(arguments, cwd=REPO, env=environment, stdout=subprocess.PIPE, text=True, timeout=60)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(30)
    [run] = map(OfflineRun, (tmp_path / "wandb").glob("offline-run-*"))
    assert ([row["a"] for row in run.rows], run.summary["status"], run.exit_code) == ([1], "failed", 1)


@pytest.mark.parametrize("fate", ["SIGKILL", "SIGSTOP"])
def test_the_service_of_wandb_may_die_or_hang_in_mid_run(tmp_path: Path, fate: str) -> None:
    """A real offline run, in a process of its own that has to end, and silently."""
    script = (
        "import contextlib, pathlib, psutil, signal, sys; from tapernorm.config.options import TrackingConfig\n"
        "from tapernorm.runtime.log import to_console; to_console()\n"
        "from tapernorm.training.tracking import Tracker\n"
        "offline = TrackingConfig(wandb='offline')\n"
        "for name in ('one', 'two'):\n"
        "    Tracker.FINISH_SECONDS = 1.0 if name == 'one' else 60.0\n"
        "    folder = pathlib.Path(sys.argv[1], name)\n"
        "    with Tracker(folder, {'seed': 1}, offline, name=name, tokens_per_step=64) as tracker:\n"
        "        for step in range(1, 41):\n"
        "            tracker.log(step, {'a': step})\n"
        "            if step == 20 and name == 'one':\n"
        "                [service] = psutil.Process(tracker._mirror._process.pid).children()\n"
        f"                service.send_signal(signal.{fate})\n"
        "with contextlib.suppress(psutil.NoSuchProcess):\n"
        "    service.kill()\n"  # a stopped process cannot end by itself
    )
    with (tmp_path / "console.txt").open("w") as console:  # not a pipe, which a service that hangs would keep open
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            cwd=REPO,
            env=wandb_environment(tmp_path / "home"),
            stdout=console,
            stderr=console,
            timeout=60,
        )
    [warning] = (tmp_path / "console.txt").read_text().splitlines()
    assert done.returncode == 0 and warning.startswith("warning: W&B failed ("), warning
    assert ("no answer within 1 s" in warning) is (fate == "SIGSTOP")
    for name in ("one", "two"):
        assert lines_of(tmp_path / name) == [line(step, {"a": step}) for step in range(1, 41)]
    [run] = (tmp_path / "two" / "wandb").glob("offline-run-*")
    assert len(OfflineRun(run).rows) == 40, "the next run of the process has a service of its own"


def test_a_full_disk_of_wandb_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirrored: Callable[..., Tracker], said: list[str]
) -> None:
    """Its service loses rows without a word."""
    (tmp_path / "wandb").mkdir()
    with mirrored("hangs nowhere") as tracker:
        tracker.log(1, {"train/loss": 1.0})
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert said == ["warning: W&B failed (its disk is full); the run goes on with metrics.jsonl alone"]


# ----------------------------------------------------------------------------------------------- metrics and full disks


class FullFile:
    """metrics.jsonl on a disk that has `room` bytes left beyond what is there."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.end = file, file.seek(0, os.SEEK_END) + room

    def write(self, data: memoryview) -> int:
        left = self.end - self.file.tell()
        if left <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data[:left])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 20])
@pytest.mark.parametrize("step", [2, 3])
def test_a_full_disk_leaves_whole_rows(tmp_path: Path, room: int, step: int) -> None:
    """Whether more of the last step or a new one does not fit."""
    with make_tracker(tmp_path) as tracker:
        for k in (1, 2):
            tracker.log(k, {"train/loss": 1.0})
        before = lines_of(tmp_path)
        tracker._rows._file = FullFile(tracker._rows._file, room)  # type: ignore[assignment]
        with pytest.raises(OSError, match="No space left") as full:
            tracker.log(step, {"val/loss": 2.0, "val/perplexity": 3.0})
        assert full.value.filename == str(tmp_path / METRICS_FILE)
    assert lines_of(tmp_path) == before


def test_a_row_that_a_kill_tore_comes_back_when_its_step_is_logged_again(tmp_path: Path) -> None:
    with make_tracker(tmp_path) as tracker:
        for step in (1, 2):
            tracker.log(step, {"train/loss": 1.0})
        state = json.loads(json.dumps(tracker.state()))
        tracker.log(2, {"val/loss": 2.0})
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes()[:-15])
    with make_tracker(tmp_path, resume_step=2, state=state) as tracker:
        tracker.log(2, {"val/loss": 2.0})
    assert read_metrics(tmp_path) == [line(1, {"train/loss": 1.0}), line(2, {"train/loss": 1.0, "val/loss": 2.0})]
    assert len(lines_of(tmp_path)) == 3


# -------------------------------------------------------------------------------------------------------- progress


def test_progress_survives_whoever_read_along() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    progress = Progress(2, mode="lines", stream=Closed())
    progress.update(1, loss=1.0, gate=1.0, tokens_per_s=1.0)
    progress.close()


class FakeClock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("tapernorm.runtime.progress.time.monotonic", lambda: self.now)


def test_progress_lines_name_everything_and_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = FakeClock(monkeypatch), io.StringIO()
    progress = Progress(600, stream=stream)
    for step in range(1, 601):
        clock.now += 0.125  # exact in binary
        loss = 3.4121 if step % 10 == 0 else None
        progress.update(step, loss=loss, gate=0.871, tokens_per_s=15210.0, phase="tapering")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 1/600  0 %  gate 0.87 tapering  15.2k tokens/s  ETA 1:15"
    assert lines[3] == "step 121/600  20 %  loss 3.412  gate 0.87 tapering  15.2k tokens/s  ETA 1:00"
    assert lines[-1] == "step 600/600  100 %  loss 3.412  gate 0.87 tapering  15.2k tokens/s  ETA 0:00"
    assert len(lines) == 16


def test_progress_of_a_resumed_and_interrupted_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = FakeClock(monkeypatch), io.StringIO()
    progress = Progress(9000, done=100, mode="lines", stream=stream)
    for step in (101, 102):
        clock.now += 1.0
        progress.update(step, loss=1.0, gate=0.0, tokens_per_s=0.0, phase="tapered")
    progress.close()
    assert stream.getvalue().splitlines() == [
        "step 101/9000  1 %  loss 1.000  gate 0.00 tapered  ETA 2:28:19",
        "step 102/9000  1 %  loss 1.000  gate 0.00 tapered  ETA 2:28:18",
    ]


def test_progress_bar_shows_the_same_numbers_and_says_lines_around_itself(capsys: pytest.CaptureFixture[str]) -> None:
    to_console()
    stream = io.StringIO()
    progress = Progress(4, done=1, mode="bar", stream=stream)
    for step in (2, 3, 4):
        progress.update(step, loss=2.5, gate=0.5, tokens_per_s=999.0, phase="tapering")
        log.info(f"line {step}")
    progress.close()
    assert "4/4" in stream.getvalue() and "loss 2.500  gate 0.50 tapering  999 tokens/s" in stream.getvalue()
    assert capsys.readouterr().out.splitlines() == ["line 2", "line 3", "line 4"]


def test_progress_none_prints_only_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    to_console()
    stream = io.StringIO()
    progress = Progress(2, mode="none", stream=stream)
    progress.update(1, loss=1.0, gate=1.0, tokens_per_s=1.0, phase="normalized")
    log.info("hello")
    progress.close()
    assert (stream.getvalue(), capsys.readouterr().out) == ("", "hello\n")


# ------------------------------------------------------------------------------------------------------------ docs


def test_docs_define_every_metric_once_and_no_other() -> None:
    text = (REPO / "docs" / "metrics.md").read_text()
    defined = re.findall(r"^\| `([a-z_]+/[a-z0-9_.<>]+)` \|", text, flags=re.MULTILINE)
    assert sorted(defined) == sorted(METRICS)
    mentioned = set(re.findall(r"`([a-z]+/[a-z0-9_]+(?:\.<site>)?)`", text))
    assert mentioned <= set(METRICS)
