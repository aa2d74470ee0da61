"""Sweeps: checked first, one directory per job, all failures told, repeatable."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from tapernorm.cli import errors, sweep
from tapernorm.cli.jobs import LONGEST_NAME, Labelled, Sweep, job_name, rows_of, sweep_name
from tapernorm.config.resolve import resolve
from tapernorm.config.schema import to_dict, write_yaml
from tapernorm.runtime.record import load_summary, read_metrics, write_summary
from tests.cli.test_cli import ROOT, Trainer, launch, trainer  # noqa: F401  (fixtures)

# ruff: noqa: F811


def jobs(name: str = "s") -> dict[str, dict]:
    files = Path("runs", "sweeps", name).glob("*/summary.json")
    return {file.parent.name: json.loads(file.read_text()) for file in files}


# --------------------------------------------------------------------------------------------------------------- naming


def test_P04_names_need_no_quoting_and_are_unique():
    overrides = [
        ["norm=baseline", "seed=1"],
        ["norm.sites=[attn,0.mlp]"],
        ["norm.sites=[attn-0.mlp]"],
        ["dataset.train='/a b/c=d.txt'"],
        ["gate.k_taper_share=-1"],
        ["gate.k_taper_share=1"],
        ["++model={d_model: 32}"],
        ["~optim.clip"],
        [f"trainer.{key}=100000" for key in ("max_steps", "batch_size", "val_tokens", "save_interval", "keep_last")],
        [f"trainer.{key}=100000" for key in ("max_steps", "batch_size", "val_tokens", "save_interval", "samples")],
        [],
    ]
    names = [job_name(items) for items in overrides]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[\w.+-]+", name) and len(name) <= LONGEST_NAME for name in names), names
    assert names[0] == "norm-baseline_seed-1"
    for name in names:  # a path to one needs no quotes on a command line either
        override = OverridesParser.create().parse_override(f"checkpoint=runs/sweeps/s/{name}")
        assert override.value() == f"runs/sweeps/s/{name}"


def test_P04_a_long_name_tells_what_was_swept(launch, trainer):
    """Thirty jobs with twenty settings in common would else all have the same hundred characters in front."""
    shared = [f"trainer.{key}=100000" for key in ("batch_size", "val_tokens", "save_interval", "keep_last")]
    shared += ["dataset.seed=5", "norm.name=tried"]
    assert launch("-m", *shared, "experiment=smoke", "norm=dyt,baseline", "seed=0,1", "sweep.name=s")[0] == 0
    names = sorted(jobs())
    assert [name.rpartition("-")[0] for name in names] == [
        f"norm-{norm}_seed-{seed}" for norm in ("baseline", "dyt") for seed in (0, 1)
    ]
    items = ["norm=dyt", "seed=0", *(f"trainer.key{number}=1" for number in range(20))]
    assert len({job_name([*items, last], ["norm", "seed"]) for last in ("a=1", "a=2")}) == 2


def test_names_leave_out_where_and_how_a_job_runs():
    places = ["sweep.name=x", "resume=auto", "tracking=none", "tracking.wandb=offline", "runs_dir=/tmp/x"]
    places += ["cache_dir=c", "trainer.device=cpu", "trainer.progress=none"]
    assert job_name(["seed=1", *places]) == "seed-1"
    assert sweep_name(["a=1", "b=2", *places]) == sweep_name(["a=1", "b=2"])
    assert sweep_name(["a=1"]) != sweep_name(["a=2"])


# ------------------------------------------------------------------------------------------------------------- checking


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["norm=baseline,dyt2"], "job 1 (norm=dyt2): unknown choice norm=dyt2; did you mean norm=dyt?"),
        (
            ["seed=1,2", "+optim.learning_rat=1"],
            "job 0 (seed=1 +optim.learning_rat=1): unknown key 'optim.learning_rat'",
        ),
        (["seed=1,2", "optim.weight_decy=0,1"], "unknown key 'optim.weight_decy'; did you mean 'optim.weight_decay'?"),
        (["norm=derf,dyt", "norm.shift=1"], "job 1 (norm=dyt norm.shift=1): the chosen norm has no key 'norm.shift'"),
        (["norm=derf,dyt", "+norm.shft=1"], "job 0 (norm=derf +norm.shft=1): unknown key 'norm.shft'"),
        (["dataset=toy,text"], "job 1 (dataset=text): dataset.train is missing"),
        (["seed=1,1"], "job 1 (seed=1): the same settings as job 0"),
        (["seed=1,2", "resume=x"], "resume="),
        (["seed=1,2", "run_dir=x"], "run_dir="),
        (["seed=1,2", "sweep.name='a b'"], "sweep.name=a b"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_faults_of_composition_stop_the_sweep_before_it_starts(launch, trainer, arguments, message):
    status, _, err = launch("-m", *arguments)
    assert status == 2
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err, err
    assert not trainer.calls and not list(Path().iterdir())


# -------------------------------------------------------------------------------------------------------------- running


def test_P01_good_jobs_finish_and_every_failure_is_told(launch, trainer):
    status, out, err = launch("-m", "seed=1,2", "model.head_dim=32,5", "sweep.name=s")
    assert (status, err) == (1, "")
    assert sorted(summary["status"] for summary in jobs().values()) == ["failed", "failed", "finished", "finished"]
    table = out[out.index(" job ") :]
    for seed in (1, 2):
        name = f"seed-{seed}_model.head_dim-5"
        log = Path("runs/sweeps/s").absolute() / name / "run.log"
        assert f"failed: {name}: model.d_model=64 is not a multiple of model.head_dim=5 ({log})" in table
        assert "not a multiple" in log.read_text() and "Traceback" in log.read_text()
    assert [path.name for path in Path().iterdir()] == ["runs"]


def test_P01_two_bad_jobs_of_four_are_told_with_their_tracebacks(launch, trainer):
    def fail(config):
        if config.seed in (1, 2):
            raise RuntimeError(f"no space left for {config.seed}")

    trainer.fail = fail
    status, out, _ = launch("-m", "seed=0,1,2,3", "sweep.name=s")
    assert status == 1 and len(trainer.calls) == 4
    assert [summary["status"] for _, summary in sorted(jobs().items())] == ["finished", "failed", "failed", "finished"]
    for seed in (1, 2):
        log = Path(f"runs/sweeps/s/seed-{seed}/run.log").absolute()
        assert f"failed: seed-{seed}: RuntimeError: no space left for {seed} ({log})" in out
        assert log.read_text().count("Traceback") == 1 and f"left for {seed}" in log.read_text()
    assert "Traceback" not in out and "Traceback" not in Path("runs/sweeps/s/seed-0/run.log").read_text()


def test_a_broken_launcher_is_one_line_and_the_table_comes_all_the_same(launch, trainer, monkeypatch):
    def killed(*_, **__):
        raise ChildProcessError("a worker\nwas killed")

    assert launch("-m", "seed=0", "sweep.name=s")[0] == 0
    monkeypatch.setattr("tapernorm.cli.jobs.run_job", killed)
    status, out, err = launch("-m", "seed=0,1", "sweep.name=s")
    assert status == 1 and err.endswith("\nerror: the launcher failed: ChildProcessError: a worker was killed\n")
    assert "Traceback" not in err
    assert "finished" in out and "1 of 2 jobs are not done" in out


def test_a_launcher_that_is_not_installed_says_how_to_get_it():
    text = errors._unknown_choice("hydra/launcher", "submitit_slurm", ["basic"])
    assert "pip install -c constraints.txt -e '.[slurm]'" in text


@pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="a POSIX signal")
def test_a_schedulers_signal_reaches_its_handler_after_the_job_is_saved(launch, trainer):
    """As submitit's handler does: have the job queued again and end the process."""

    def stop(config):
        fault = Trainer.Interrupted(3)
        fault.signal = signal.SIGUSR2
        raise fault

    def requeue(number, frame):
        assert jobs()["seed-0"]["status"] == "interrupted"
        raise SystemExit(144)

    trainer.fail, before = stop, signal.signal(signal.SIGUSR2, requeue)
    try:
        status, out, _ = launch("-m", "seed=0", "sweep.name=s")
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert status == 144 and "interrupted" in out


@pytest.mark.parametrize("code", [0, 3, None])
def test_P56_an_exit_in_a_job_is_its_failure_and_the_rest_runs(launch, trainer, code):
    trainer.fail = lambda config: sys.exit(code) if config.seed == 0 else None
    status, out, _ = launch("-m", "seed=0,1,2", "sweep.name=s")
    assert status == 1 and len(trainer.calls) == 3
    found = {name: summary["status"] for name, summary in jobs().items()}
    assert found == {"seed-0": "failed", "seed-1": "finished", "seed-2": "finished"}, out
    assert "failed: seed-0: SystemExit" in out
    trainer.fail = lambda config: None
    assert launch("-m", "seed=0,1,2", "sweep.name=s")[0] == 0


def test_P01_fail_fast_stops_at_the_first_failure(launch, trainer):
    status, out, _ = launch("-m", "seed=0,1,2", "model.head_dim=5", "sweep.name=s", "sweep.fail_fast=true")
    assert status == 1 and list(jobs()) == ["seed-0_model.head_dim-5"]
    assert out.count("not run") == 2 and "2 of 3 jobs are not done" in out
    assert out.count("not started, as another job has failed") == 2
    assert launch("-m", "seed=0,1,2", "model.head_dim=5", "sweep.name=s")[0] == 1
    assert len(jobs()) == 3


def test_a_sweep_says_how_much_is_left(launch, trainer):
    """Jobs that were finished before, or have gone, are not counted."""
    command = ["-m", "seed=0,1,2,3", "sweep.name=s"]
    _, out, _ = launch(*command)
    said = re.findall(r"^\[job \d\] seed-\d(.*)$", out, flags=re.M)
    assert said == ["", *(f"  ({left} of 4 left, about 0:00)" for left in (3, 2, 1))]
    for seed in (1, 3):
        shutil.rmtree(Path("runs/sweeps/s") / f"seed-{seed}")
    _, out, _ = launch(*command)
    assert re.findall(r"\((\d) of 4 left", out) == ["1", "1"]


def test_divergence_of_a_comparator_is_a_result(launch, trainer):
    def fail(config):
        if config.norm.kind != "standard":
            raise Trainer.Divergence(3, 1.0, "blocks.0")

    trainer.fail = fail
    assert launch("-m", "norm=baseline,none", "sweep.name=s")[0] == 0
    assert jobs()["norm-none"]["status"] == "diverged"
    assert launch("-m", "norm=baseline,all_taper", "sweep.name=t")[0] == 1


def test_the_table_pairs_by_seed_and_is_never_cut(launch, trainer, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    arguments = ["norm=baseline,all_taper", "anchor=none,mean_log", "seed=1,2", "optim.lr=0.01", "sweep.name=s"]
    status, out, _ = launch("-m", *arguments)
    assert status == 0
    rows = {row.split()[0]: row.split()[1:] for row in out.splitlines() if row.startswith(" norm-")}
    assert len(rows) == 8
    for seed in (1, 2):
        base = 3 + seed / 10
        job = rows[f"norm-all_taper_anchor-mean_log_seed-{seed}_optim.lr-0.01"]
        gap = f"{100 * ((base + 0.03) / base - 1):+.2f}"
        assert job[:6] == ["finished", "all_taper", "mean_log", str(seed), f"{base + 0.03:.4f}", gap]
        assert job[6] == "300"


def test_the_table_has_mismatch_and_best_temperature_where_the_summaries_do(launch, trainer):
    assert launch("-m", "norm=baseline,all_taper", "sweep.name=s")[0] == 0
    found = Sweep(Path("runs/sweeps/s"), [])
    new = ("loss T*", "drift", "mismatch", "at end")
    assert {row[key] for row in rows_of(found) for key in new} == {None}
    for name, mismatch in (("baseline", None), ("all_taper", {"gate_0": 0.06, "end": 0.1})):
        directory = found.directory / f"norm-{name}"
        measured = {"mismatch": mismatch, "val_loss_best_temperature": 2.9, "drift": -0.2}
        write_summary(directory, load_summary(directory) | measured)
    rows = {row["norm"]: [row[key] for key in new] for row in rows_of(found)}
    assert rows == {"baseline": [2.9, -0.2, None, None], "all_taper": [2.9, -0.2, 0.06, 0.1]}


def test_jobs_know_their_sweep(launch, trainer):
    assert launch("-m", "seed=0,1")[0] == 0
    first, second = trainer.calls
    assert first[0].sweep.name == first[0].tracking.group == first[1].parent.name == second[0].sweep.name
    assert first[1].parent.parent == Path("runs/sweeps").absolute()
    assert launch("-m", "seed=0,1", "tracking.group=mine", "sweep.name=t")[0] == 0
    assert trainer.calls[-1][0].tracking.group == "mine"


def test_keys_of_the_swept_kinds(launch, trainer):
    """Hydra's first composition knows the default norm alone; the jobs' norms have these keys."""
    arguments = ["norm=dyt,derf", "norm.alpha=0.25", "norm.sites=[attn,final]", "norm.name='a b'", "sweep.name=s"]
    assert launch("-m", *arguments)[0] == 0
    norms = [config.norm for config, _, _ in trainer.calls]
    assert [(norm.kind, norm.alpha, norm.sites, norm.name) for norm in norms] == [
        ("dyt", 0.25, ("attn", "final"), "a b"),
        ("derf", 0.25, ("attn", "final"), "a b"),
    ]
    trainer.calls.clear()
    assert launch("-m", "norm=dyt", "norm.alpha=0.25,0.5", "sweep.name=t")[0] == 0
    assert [config.norm.alpha for config, _, _ in trainer.calls] == [0.25, 0.5]


def test_an_interpolation_is_one_job_whoever_names_it(launch, trainer):
    """The launching process and the job's own have the same name for it, so its result is found."""
    command = ["-m", "seed=0,1", "norm.name=n-${seed}", "dataset.seed=${seed}", "sweep.name=s"]
    status, out, _ = launch(*command)
    assert status == 0 and "not run" not in out and len(jobs()) == 2
    assert [(config.norm.name, config.dataset.seed) for config, *_ in trainer.calls] == [("n-0", 0), ("n-1", 1)]
    status, out, _ = launch(*command, "sweep.dry_run=true")
    assert status == 0 and set(listed(out)) == set(jobs()) and set(listed(out).values()) == {"finished"}


def test_an_experiment_can_name_its_own_sweep(launch, trainer):
    assert launch("-m", "experiment=comparators", "trainer.max_steps=20", "seed=0")[0] == 0
    names = ["baseline", "internal_taper", "all_taper", "dyt", "derf", "none", "fake_ln"]
    assert [config.norm.name for config, _, _ in trainer.calls] == names


# ------------------------------------------------------------------------------------------------------------ repeating


def test_P03_the_same_command_goes_on(launch, trainer):
    def stop(config):
        if config.seed == 1:
            directory = trainer.calls[-1][1]
            write_yaml(directory / "config.yaml", to_dict(resolve(config, 512)))
            (directory / "checkpoints" / "step-00000050").mkdir(parents=True)
            raise KeyboardInterrupt

    trainer.fail = stop
    command = ["-m", "seed=0,1,2,3", "optim.lr=0.01"]
    status, out, _ = launch(*command)
    assert status == 130 and "interrupted" in out and "not run" in out
    trainer.fail, trainer.calls = lambda config: None, []
    status, out, _ = launch(*command)
    assert status == 0 and "[job 0] finished before; skipped" in out
    assert [config.seed for config, _, _ in trainer.calls] == [1, 2, 3]
    assert trainer.calls[0][2].name == "step-00000050" and trainer.calls[1][2] is None
    assert out.count("finished ") >= 4


def test_P03_changed_settings_are_refused_by_name(launch, trainer):
    assert launch("-m", "seed=0,1", "sweep.name=s")[0] == 0
    trainer.calls.clear()
    file = Path("runs/sweeps/s/seed-1/.hydra/config.yaml")
    file.write_text(file.read_text().replace("weight_decay: 0.1", "weight_decay: 0.3"))
    saved = Path("runs/sweeps/s/seed-1/config.yaml")
    saved.write_text(saved.read_text().replace("weight_decay: 0.1", "weight_decay: 0.3"))
    status, _, err = launch("-m", "seed=0,1", "sweep.name=s")
    assert status == 2 and "job 1 (seed=1)" in err and "optim.weight_decay: 0.3 -> 0.1" in err
    assert not trainer.calls


def test_P03_failed_jobs_run_again(launch, trainer):
    def fail(config):
        raise RuntimeError("once")

    trainer.fail = fail
    assert launch("-m", "seed=0,1", "sweep.name=s")[0] == 1
    trainer.fail = lambda config: None
    assert launch("-m", "seed=0,1", "sweep.name=s")[0] == 0
    assert all(summary["status"] == "finished" for summary in jobs().values())


# ------------------------------------------------------------------------------------------------------------- dry run


def listed(out: str) -> dict[str, str]:
    """State by job, from what a dry run prints."""
    return dict(re.findall(r"^\[job \d+\] (\S+) +(.+)$", out, flags=re.M))


def test_a_dry_run_lists_the_jobs_and_leaves_no_trace(launch, trainer):
    status, out, _ = launch("-m", "seed=0,1", "model.head_dim=16,5", "sweep.dry_run=true")
    assert status == 0 and not trainer.calls and not list(Path().iterdir())
    assert listed(out) == {
        f"seed-{seed}_model.head_dim-{size}": text
        for seed in (0, 1)
        for size, text in [
            (16, "new"),
            (5, "new, but will fail: model.d_model=64 is not a multiple of model.head_dim=5"),
        ]
    }
    status, _, err = launch("sweep.dry_run=true")
    assert status == 2 and "add --multirun" in err and not list(Path().iterdir())


def test_a_sweep_that_cannot_be_checked_does_not_start(launch, trainer, monkeypatch):
    """Hydra would go on after an exception in a callback."""
    monkeypatch.setattr(sweep, "list_jobs", lambda *_: 1 / 0)
    status, _, err = launch("-m", "seed=0,1", "sweep.dry_run=true")
    assert status == 1 and "ZeroDivisionError" in err
    assert not trainer.calls and not list(Path().iterdir())


def test_a_dry_run_tells_what_earlier_starts_have_left(launch, trainer):
    def fail(config):
        directory = trainer.calls[-1][1]
        write_yaml(directory / "config.yaml", to_dict(resolve(config, 512)))
        if config.seed > 0:
            (directory / "checkpoints" / "step-00000050").mkdir(parents=True)
        if config.seed == 1:
            raise RuntimeError("no space left")
        if config.seed == 2:
            raise KeyboardInterrupt

    command = ["-m", "seed=0,1,2,3", "sweep.name=s"]
    trainer.fail = fail
    assert launch(*command)[0] == 130
    trainer.calls.clear()
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    status, out, _ = launch(*command, "sweep.dry_run=true")
    assert status == 0 and listed(out) == {
        "seed-0": "finished",
        "seed-1": "failed at step 50 of 300: RuntimeError: no space left",
        "seed-2": "interrupted at step 50 of 300",
        "seed-3": "new",
    }
    for directory in Path("runs/sweeps/s").glob("seed-*"):  # as if the experiment had been changed since
        for file in (directory / ".hydra" / "config.yaml", directory / "config.yaml"):
            file.write_text(file.read_text().replace("weight_decay: 0.1", "weight_decay: 0.3"))
    status, out, _ = launch(*command, "sweep.dry_run=true")
    texts = list(listed(out).values())
    assert status == 2 and texts[3] == "new"
    assert all(text.startswith("refused: ") and "optim.weight_decay: 0.3 -> 0.1" in text for text in texts[:3])
    assert not trainer.calls and set(before) == set(Path().rglob("*"))


# ---------------------------------------------------------------------------------------------------- whole processes

SMOKE = ["experiment=smoke", "trainer.samples=0", "trainer.device=cpu", "tracking=none"]


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *SMOKE, *arguments],  # also: -m after the first override
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def check_complete(directory: Path, steps: int) -> None:
    """A job that is a run of its own and all there."""
    rows = read_metrics(directory)
    assert json.loads((directory / "summary.json").read_text())["status"] == "finished"
    assert [rows[0]["step"], rows[-1]["step"]] == [1, steps]
    assert len({row["step"] for row in rows}) == len(rows)
    assert (directory / "checkpoints" / f"step-{steps:08d}" / "model.safetensors").is_file()
    assert {"config.yaml", "run.log", "data.json", ".hydra"} <= {path.name for path in directory.iterdir()}


def test_P03_a_killed_sweep_goes_on_bit_for_bit(tmp_path):
    """kill -9 during the second of four jobs; then the same command."""
    command = ["trainer.max_steps=80", "trainer.save_interval=10", "trainer.val_interval=40"]
    sweep = ["-m", "seed=1,2,3,4", "sweep.name=s", *command]
    killed = start(tmp_path, *sweep)
    second = "runs/sweeps/s/*seed-2*/"
    while not list(tmp_path.glob(f"{second}checkpoints/step-*10")):
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.002)
    killed.kill()
    killed.communicate()
    assert not list(tmp_path.glob(f"{second}summary.json")), "killed too late"
    [first] = tmp_path.glob("runs/sweeps/s/*seed-1*/summary.json")
    before = first.stat().st_mtime_ns

    again = start(tmp_path, *sweep)
    out, err = again.communicate()
    assert again.returncode == 0, err
    assert "[job 0] finished before; skipped" in out and first.stat().st_mtime_ns == before
    assert out.count("going on from") == 1
    found = {path.name for path in (tmp_path / "runs" / "sweeps" / "s").glob("*/")}
    assert all(any(f"seed-{seed}" in job for job in found) for seed in (1, 2, 3, 4)) and len(found) == 4
    for job in found:
        check_complete(tmp_path / "runs" / "sweeps" / "s" / job, 80)

    undisturbed = start(tmp_path, "seed=2", "run_dir=undisturbed", *command)
    undisturbed.communicate()
    assert undisturbed.returncode == 0
    weights = "checkpoints/step-00000080/model.safetensors"
    [resumed] = tmp_path.glob(second + weights)
    assert resumed.read_bytes() == (tmp_path / "undisturbed" / weights).read_bytes()


def test_lines_of_several_jobs_stay_whole_whichever_thread_prints():
    written = []
    stream = Labelled(types.SimpleNamespace(write=written.append, flush=lambda: None), "[job 0] ")

    def speak(name):
        for number in range(2000):
            print(name, number, file=stream, flush=True)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=speak, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(written) == sorted(f"[job 0] {name} {number}\n" for name in "ab" for number in range(2000))


def test_P10_joblib_runs_jobs_in_processes(tmp_path):
    """Two jobs train side by side, one cannot; the table comes from the files."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    parallel = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    arguments = ["trainer.max_steps=8", "seed=1,2,-1", "sweep.name=s", "tracking.wandb=offline"]
    done = start(tmp_path, "-m", *parallel, *arguments)
    out, err = done.communicate()
    assert done.returncode == 1, err
    files = sorted((tmp_path / "runs" / "sweeps" / "s").glob("*/summary.json"))
    statuses = {file.parent.name.split("seed-")[1][:1]: json.loads(file.read_text())["status"] for file in files}
    assert statuses == {"1": "finished", "2": "finished", "-": "failed"}
    for seed in (1, 2):
        check_complete(next(path.parent for path in files if f"seed-{seed}" in str(path)), 8)
    mirrored = [path.name.rpartition("-")[2] for path in tmp_path.glob("runs/sweeps/s/*/wandb/offline-run-*")]
    assert len(mirrored) == len(set(mirrored)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]
    lines, table = out[: out.index(" job ")].splitlines(), out[out.index(" job ") :]
    assert table.count("finished") == 2 and "seed=-1" in table
    assert lines[0].startswith("sweep s: 3 jobs in ") and all(re.match(r"\[job [012]\] ", line) for line in lines[1:])
    progress = [line for line in err.splitlines() if "step 8/8" in line]
    assert sorted(line[:8] for line in progress) == ["[job 0] ", "[job 1] "]


def test_P10_submitit_runs_jobs_as_it_does_on_a_cluster(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    done = start(tmp_path, "-m", "hydra/launcher=submitit_local", "trainer.max_steps=8", "seed=1,2", "sweep.name=s")
    out, err = done.communicate()
    assert done.returncode == 0, err
    sweep = tmp_path / "runs" / "sweeps" / "s"
    directories = sorted(path for path in sweep.glob("experiment*/"))
    assert len(directories) == 2
    for directory in directories:
        check_complete(directory, 8)
    table = out[out.index(" job ") :]
    assert table.count("finished") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]  # submitit's own files are in the sweep
    assert len(list((sweep / ".submitit").glob("*/*_result.pkl"))) == 2
