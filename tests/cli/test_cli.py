"""The command line: one-line faults before anything is written, directories, paths, replay, resume, exit codes."""

import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from tapernorm import training
from tapernorm.cli import errors, jobs, run
from tapernorm.cli.composition import HELP_KEYS
from tapernorm.cli.errors import CONFIGS
from tapernorm.cli.resume import claim
from tapernorm.config.options import Config
from tapernorm.config.resolve import build, resolve
from tapernorm.config.schema import ConfigError, all_keys, to_dict, write_yaml
from tapernorm.runtime.log import in_use, open_log

ROOT = CONFIGS.parent


class Trainer:
    """Stands in for tapernorm.training.loop: writes what the real one writes, and fails as it is told."""

    class Divergence(RuntimeError):
        def __init__(self, step: int, gate: float, layer: str) -> None:
            super().__init__(f"not finite at step {step}, gate {gate:.2f}, layer {layer}")
            self.step, self.gate, self.layer, self.summary = step, gate, layer, {"steps": step}

    class Interrupted(Exception):
        def __init__(self, step: int) -> None:
            super().__init__(f"stopped after step {step}")
            self.summary, self.signal = {"steps": step}, signal.SIGTERM

    def __init__(self) -> None:
        self.calls: list[tuple[Config, Path, Path | None]] = []
        self.fail = lambda config: None

    def train(self, config, directory, checkpoint=None, at_end=None):
        self.calls.append((config, directory, checkpoint))
        self.fail(config)
        config = resolve(config, 512)
        write_yaml(directory / "config.yaml", to_dict(config))
        (directory / "checkpoints" / f"step-{config.trainer.max_steps:08d}").mkdir(parents=True, exist_ok=True)
        logging.getLogger("tapernorm.test").info("trained")
        loss = 3.0 + 0.1 * config.seed + (0.03 if config.norm.kind == "taper" else 0.0)
        return {"val_loss": loss, "steps": config.trainer.max_steps, "gate": 0.0}


def latest(directory: Path) -> Path | None:
    return max((directory / "checkpoints").glob("step-*"), default=None)


@pytest.fixture
def trainer(monkeypatch, tmp_path):
    fake = Trainer()
    checkpoint = types.SimpleNamespace(latest=latest, step_of=lambda path: int(path.name[5:]))
    for name, module in {"loop": fake, "checkpoint": checkpoint}.items():
        monkeypatch.setitem(sys.modules, f"tapernorm.training.{name}", module)
        monkeypatch.setattr(training, name, module, raising=False)
    # Reports have tests of their own, and cost a second a time.
    monkeypatch.setattr(run, "write_page", lambda directory, summary: None)
    monkeypatch.setattr(jobs, "write_report", lambda directory: None)
    monkeypatch.chdir(tmp_path)
    return fake


@pytest.fixture
def launch(trainer, monkeypatch, capsys):
    """Run train.py inside this process: (exit status, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py"), *arguments])
        capsys.readouterr()
        try:
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
            status = 0
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return call


def runs(folder: str = "runs") -> list[Path]:
    return sorted(path for path in Path(folder).glob("*") if path.name != "sweeps")


def read_summary(directory: Path) -> dict:
    return json.loads((directory / "summary.json").read_text())


# --------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optim.learning_rat=1"], "unknown key 'optim.learning_rat'; did you mean 'optim.lr'?"),
        (["+optim.learning_rat=1"], "unknown key 'optim.learning_rat'; did you mean 'optim.lr'?"),
        (["nrom=dyt"], "unknown key 'nrom'; did you mean 'norm'?"),
        (["++new=1"], "unknown key 'new'"),
        (["experiment=gpt2/fakeln"], "unknown choice experiment=gpt2/fakeln; did you mean experiment=gpt2/fake_ln? "),
        (
            ["experiment=fake_ln"],
            "did you mean experiment=gpt2/fake_ln? experiment has chasing, comparators, gpt2/fake_ln, ",
        ),
        (["norm=dit"], "unknown choice norm=dit; did you mean norm=dyt? norm has all_taper, baseline, derf"),
        (["experiment=smok"], "did you mean experiment=smoke?"),
        (["norm=baseline", "norm.alpha=1"], "the chosen norm has no key 'norm.alpha'; the kinds dyt, derf have it"),
        (["+optim.lr=[1,"], "cannot read '+optim.lr=[1,'"),
        (["seed=1,2"], "seed=1,2 lists several values; add --multirun"),
        (["dataset=text"], "dataset.train is missing"),
        (["dataset=text", "dataset.train=???"], "dataset.train is missing"),
        (["~seeed"], "'seeed' does not exist"),
        (["trainer=5"], "trainer=5: trainer has default"),
        (["model.head_dim=5"], "not a multiple of model.head_dim=5"),
        (["resume=nowhere"], "there is no such directory"),
        (["--multirun", "--run"], "Only one of"),
        (["--config-name", "other"], "Cannot find primary config 'other'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_P05_P08_faults_are_one_line_before_anything_exists(launch, trainer, arguments, message):
    status, out, err = launch(*arguments)
    assert status == 2
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert message in err
    assert out == "" and not trainer.calls and not list(Path().iterdir())


def test_tracebacks_are_there_for_who_asks(launch, monkeypatch):
    monkeypatch.setattr(errors, "WANTS_TRACEBACKS", True)
    with pytest.raises(Exception, match="Could not override"):
        launch("optim.learning_rat=1")


def test_an_existing_key_takes_plus_where_hydra_does(launch, trainer):
    status, _, err = launch("+optim.beta1=0.8")
    assert status == 2 and "An item is already at 'optim.beta1'" in err
    assert launch("++optim.beta1=0.8")[0] == 0
    assert trainer.calls[-1][0].optim.beta1 == 0.8


# ---------------------------------------------------------------------------------------------------------- directories


def test_a_run_leaves_its_files_and_nothing_else(launch, trainer):
    status, _, err = launch("experiment=smoke", "name=a b/c")
    assert (status, err) == (0, "")
    assert [path.name for path in Path().iterdir()] == ["runs"]
    (directory,) = runs()
    assert directory.name.endswith("_a-b-c")
    files = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    ours = {".hydra/config.yaml", ".hydra/overrides.yaml", "config.yaml", "run.lock", "run.log", "summary.json"}
    assert files == ours
    composed = yaml.safe_load((directory / ".hydra/config.yaml").read_text())
    assert composed["gate"]["k_warmup"] is None and composed["runs_dir"] == str(Path("runs").absolute())
    assert yaml.safe_load((directory / ".hydra/overrides.yaml").read_text()) == ["experiment=smoke", "name=a b/c"]
    summary = read_summary(directory)
    assert summary["status"] == "finished" and summary["val_loss"] == 3.03 and summary["steps"] == 30
    assert (summary["norm"], summary["anchor"], summary["seed"], summary["error"]) == (
        "internal_taper",
        "none",
        0,
        None,
    )
    assert "trained" in (directory / "run.log").read_text()


def test_P02_starts_in_the_same_second_get_directories_of_their_own(tmp_path):
    config = Config(runs_dir=str(tmp_path / "runs"))
    barrier, claimed = threading.Barrier(8), []

    def start() -> None:
        barrier.wait()
        claimed.append(claim(config))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(claimed)) == 8 and all(path.is_dir() for path in claimed)
    assert all("custom-custom_taper-none-s0" in path.name for path in claimed)


def test_P02_an_occupied_run_dir_is_refused(launch):
    assert launch("run_dir=mine")[0] == 0
    status, _, err = launch("run_dir=mine")
    assert status == 2 and "mine already holds a run; add resume=auto" in err and err.count("\n") == 1
    status, out, _ = launch("run_dir=mine", "resume=auto")
    assert status == 0 and "has finished; nothing to do" in out


def test_who_only_asks_whether_a_run_is_in_use_does_not_stop_it(tmp_path):
    assert not in_use(tmp_path) and not list(tmp_path.iterdir()), "asking creates nothing"
    asking = FileLock(tmp_path / "run.lock", thread_local=False)
    asking.acquire()
    threading.Timer(0.05, asking.release).start()
    with open_log(tmp_path):
        assert in_use(tmp_path)
    assert not in_use(tmp_path)


def test_a_killed_run_is_not_in_use(tmp_path):
    script = (
        "import logging, os, pathlib; from tapernorm.runtime.log import open_log\n"
        "with open_log(pathlib.Path.cwd()) : logging.getLogger('tapernorm').info('hello'); os.kill(os.getpid(), 9)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment).returncode == -9
    assert (tmp_path / "run.lock").exists() and not in_use(tmp_path)


def test_a_run_in_use_is_left_alone(launch, trainer):
    assert launch("run_dir=mine", "trainer.max_steps=30")[0] == 0
    with open_log(Path("mine")):
        status, _, err = launch("resume=mine", "trainer.max_steps=40")
    assert status == 2 and "in use by another process" in err
    assert read_summary(Path("mine"))["status"] == "finished"


def test_P06_paths_do_not_depend_on_chdir(launch, trainer):
    Path("toy.txt").write_text("story")
    for chdir in ("true", "false"):
        assert launch(f"hydra.job.chdir={chdir}", "dataset=text", "dataset.train=toy.txt", "cache_dir=cache")[0] == 0
        config, directory, _ = trainer.calls[-1]
        assert config.dataset.train == str(Path("toy.txt").absolute())
        assert config.cache_dir == str(Path("cache").absolute())
        assert directory.parent == Path("runs").absolute()


def test_P06_paths_of_a_sweep_do_not_depend_on_chdir(launch, trainer):
    for chdir in ("true", "false"):
        arguments = ["dataset=text", "dataset.train=toy.txt", f"hydra.job.chdir={chdir}", f"sweep.name=s{chdir}"]
        assert launch("-m", "seed=1,2", *arguments)[0] == 0
        config, directory, _ = trainer.calls[-1]
        assert config.dataset.train == str(Path("toy.txt").absolute())
        assert directory.parent == Path("runs/sweeps", f"s{chdir}").absolute()
    assert [path.name for path in Path().iterdir()] == ["runs"]


def test_P07_works_from_any_directory_and_replays(launch, trainer, tmp_path):
    status, out, _ = launch("--cfg", "job", "--resolve")
    assert status == 0 and list(yaml.safe_load(out))[:3] == ["model", "norm", "anchor"]
    assert launch("norm=derf", "norm.shift=0.5", "run_dir=first", "optim.lr=0.125", "trainer.max_steps=50")[0] == 0
    os.chdir("/")
    saved = tmp_path / "first" / ".hydra"
    assert launch("--config-path", str(saved), "--config-name", "config", "seed=3")[0] == 0
    (before, _, _), (after, directory, _) = trainer.calls
    assert after.norm == before.norm and after.optim == before.optim and after.trainer == before.trainer
    assert after.seed == 3 and directory.parent == tmp_path / "runs"


def test_P07_a_real_process_finds_its_configuration(tmp_path):
    """From another directory, without torch, which is slow to import."""
    code = f"import runpy, sys; sys.argv = ['train.py', '--cfg', 'job']; runpy.run_path({str(ROOT / 'train.py')!r}, "
    code += "run_name='__main__'); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert build(yaml.safe_load(done.stdout)).model.name == "1m"
    assert not list(tmp_path.iterdir())


def test_help(launch):
    status, out, _ = launch("--help")
    assert status == 0
    assert "python train.py experiment=smoke" in out
    for text in (
        "all_taper",
        "mean_log",
        "experiment   chasing, comparators, gpt2/fake_ln, ",
        "trainer.max_steps=300",
        "optim.lr=null",
        "dataset.train=???",
    ):
        assert text in out
    assert all(key in dict(all_keys(Config)) for key in HELP_KEYS)


# ---------------------------------------------------------------------------------------------------------- exit status


def stop_with(error: BaseException):
    def fail(config: Config) -> None:
        raise error

    return fail


def test_P01_a_failure_is_one_line_with_its_traceback_in_the_log(launch, trainer):
    trainer.fail = stop_with(RuntimeError("disk\nfull"))
    status, _, err = launch()
    (directory,) = runs()
    assert status == 1 and err.count("\n") == 1
    assert "RuntimeError: disk full" in err and str(directory.name) in err
    assert "Traceback" in (directory / "run.log").read_text()
    assert read_summary(directory)["status"] == "failed"


@pytest.mark.parametrize(
    ("norm", "expected"), [("dyt", 0), ("derf", 0), ("none", 0), ("baseline", 1), ("all_taper", 1)]
)
def test_P31_a_divergence_is_told_and_fails_only_where_it_should_not_happen(launch, trainer, norm, expected):
    trainer.fail = stop_with(Trainer.Divergence(7, 0.25, "blocks.1"))
    status, out, err = launch(f"norm={norm}")
    assert status == expected
    for text in ("step 7", "gate 0.25", "blocks.1"):
        assert text in (err if expected else out)
    summary = read_summary(*runs())
    assert (summary["status"], summary["steps"]) == ("diverged", 7)


def test_P28_faults_of_device_or_data_take_the_directory_away_again(launch, trainer):
    trainer.fail = stop_with(ConfigError("trainer.device=cuda: torch sees 0 CUDA devices"))
    status, _, err = launch("trainer.device=cuda")
    assert status == 2 and "trainer.device=cuda" in err and not runs()
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("kept")
    assert launch("run_dir=mine")[0] == 2
    assert Path("mine/notes.txt").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Trainer.Interrupted(7)], ids=["at once", "saved"])
def test_an_interrupted_run_says_how_to_go_on(launch, trainer, error):
    trainer.fail = stop_with(error)
    status, out, err = launch()
    (directory,) = runs()
    assert (status, err) == (130, "") and f"resume={directory.absolute()}" in out
    assert read_summary(directory)["status"] == "interrupted"


def test_P09_half_an_environment_of_torchrun_is_refused(launch, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, err = launch()
    assert status == 2 and "WORLD_SIZE=2" in err and not runs()


def test_evaluation_is_one_process(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "checkpoint=runs/RUN"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(CONFIGS.parent / "evaluate.py"), run_name="__main__")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: evaluate.py is one process (WORLD_SIZE=2); start it without torchrun\n"


# --------------------------------------------------------------------------------------------------------------- resume


@pytest.fixture
def interrupted(launch, trainer):
    """A run of 30 steps that was interrupted after its first checkpoint."""

    def stop(config: Config) -> None:
        directory = trainer.calls[-1][1]
        write_yaml(directory / "config.yaml", to_dict(resolve(config, 512)))
        (directory / "checkpoints" / "step-00000015").mkdir(parents=True)
        raise KeyboardInterrupt

    trainer.fail = stop
    assert launch("experiment=smoke", "norm=all_taper", "seed=5")[0] == 130
    trainer.fail = lambda config: None
    return runs()[0].absolute()


def test_resume_of_a_run_takes_its_saved_configuration(launch, trainer, interrupted):
    status, out, _ = launch(f"resume={interrupted}")
    assert status == 0 and "going on from" in out
    first, second = trainer.calls
    assert second[1:] == (interrupted, interrupted / "checkpoints" / "step-00000015")
    assert second[0] == resolve(first[0], 512)
    assert read_summary(interrupted)["status"] == "finished"


def test_resume_of_a_checkpoint(launch, trainer, interrupted):
    (interrupted / "checkpoints" / "step-00000020").mkdir()
    assert launch(f"resume={interrupted}/checkpoints/step-00000015")[0] == 0
    assert trainer.calls[-1][1:] == (interrupted, interrupted / "checkpoints" / "step-00000015")


def test_P16_what_may_change_is_said(launch, trainer, interrupted):
    before = trainer.calls[0][0]
    changes = ["trainer.max_steps=800", "trainer.val_interval=7", "tracking.wandb=offline", "trainer.accumulation=2"]
    status, out, _ = launch(f"resume={interrupted}", *changes)
    assert status == 0
    for text in ("trainer.max_steps: 30 -> 800", "trainer.val_interval: 15 -> 7", "trainer.accumulation: 1 -> 2"):
        assert text in out and text in (interrupted / "run.log").read_text()
    after = trainer.calls[-1][0]
    assert after.trainer.max_steps == 800 and after.tracking.wandb == "offline"
    assert after.gate == before.gate and after.optim == before.optim  # the horizons do not bend
    status, out, _ = launch(f"resume={interrupted}")  # the change is remembered
    assert status == 0 and "nothing to do" in out


def test_P57_a_longer_run_says_what_its_learning_rate_does(launch, trainer, interrupted):
    status, out, _ = launch(f"resume={interrupted}", "trainer.max_steps=60")
    assert status == 0
    assert "the learning rate is 0.0003 from step 30 on; optim.decay_steps=60 lets it fall until the new end" in out
    status, out, _ = launch(f"resume={interrupted}", "trainer.max_steps=90", "optim.decay_steps=90")
    assert status == 0 and "the learning rate is" not in out and "optim.decay_steps: 30 -> 90" in out
    assert (trainer.calls[-1][0].optim.decay_steps, trainer.calls[-1][0].trainer.max_steps) == (90, 90)
    status, _, err = launch(f"resume={interrupted}", "optim.decay_steps=50")
    assert status == 2 and "optim.decay_steps: 90 -> 50" in err


def test_P57_a_longer_run_at_rate_0_is_refused(launch, trainer):
    trainer.fail = lambda config: None
    assert launch("experiment=smoke", "optim.min_lr_ratio=0", "run_dir=zero")[0] == 0
    before = {path: path.read_bytes() for path in Path("zero").rglob("*") if path.is_file()}
    status, _, err = launch("resume=zero", "trainer.max_steps=60")
    assert status == 2 and err.count("\n") == 1
    assert "trainer.max_steps=60: the learning rate is 0 from step 30 on; optim.decay_steps=60 lets it fall" in err
    assert {path: path.read_bytes() for path in Path("zero").rglob("*") if path.is_file()} == before
    assert launch("resume=zero", "trainer.max_steps=60", "optim.decay_steps=60")[0] == 0


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.d_model=64", "model.d_model: 32 -> 64"),
        ("norm=baseline", "norm.kind: taper -> standard"),
        ("anchor=mean_log", "anchor.kind: none -> mean_log"),
        ("gate.k_taper=20", "gate.k_taper: 15 -> 20"),
        ("calibration.decay=0.9", "calibration.decay: 0.5 -> 0.9"),
        ("dataset.seed=1", "dataset.seed: 0 -> 1"),
        ("optim.lr=1", "optim.lr: 0.003 -> 1"),
        ("seed=1", "seed: 5 -> 1"),
        ("trainer.batch_size=8", "trainer.batch_size: 4 -> 8"),
        ("trainer.dtype=bfloat16", "trainer.dtype: auto -> bfloat16"),
        ("trainer.max_steps=20", "trainer.max_steps: 30 -> 20"),
        ("experiment=smoke", "norm.name: all_taper -> internal_taper"),
    ],
)
def test_P16_what_may_not_change_is_refused_by_name(launch, trainer, interrupted, override, told):
    status, _, err = launch(f"resume={interrupted}", override)
    assert status == 2 and told in err and err.count("\n") == 1
    assert len(trainer.calls) == 1 and read_summary(interrupted)["status"] == "interrupted"


def test_resume_auto_finds_the_run_of_the_same_command(launch, trainer, interrupted):
    command = ["experiment=smoke", "norm=all_taper", "seed=5", "resume=auto"]
    assert launch(*command, "trainer.log_interval=3")[0] == 0
    assert trainer.calls[-1][1] == interrupted and trainer.calls[-1][2] is not None
    status, out, _ = launch(*command)
    assert status == 0 and "starting a new one" in out
    assert trainer.calls[-1][1] != interrupted


def test_resume_auto_passes_other_configurations_by(launch, trainer, interrupted):
    status, out, _ = launch("experiment=smoke", "norm=all_taper", "seed=6", "resume=auto")
    assert status == 0 and "starting a new one" in out and len(runs()) == 2


def test_resume_needs_a_run(launch, tmp_path):
    (tmp_path / "empty").mkdir()
    status, _, err = launch("resume=empty")
    assert status == 2 and "empty holds no run" in err


def test_a_replayed_configuration_has_no_groups(launch, trainer):
    status, _, _ = launch("experiment=smoke", "tracking=none", "run_dir=first")
    assert status == 0
    replay = ["--config-path", str(Path("first/.hydra").absolute()), "--config-name", "config"]
    status, _, err = launch(*replay, "norm=baseline")
    assert status == 2 and err.count("\n") == 1
    assert "norm=baseline: a configuration that is replayed has no groups" in err


def test_P02_a_directory_with_other_files_is_refused(launch, trainer):
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    for arguments in (["run_dir=mine"], ["run_dir=''"], ["runs_dir=/proc/x"]):
        status, _, err = launch("experiment=smoke", *arguments)
        assert status == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    assert sorted(path.name for path in Path().rglob("*")) == ["mine", "notes.txt"]


def test_faults_of_lists_and_devices_say_what_is_meant(launch, trainer):
    _, _, err = launch("norm.sites=attn")
    assert "norm.sites='attn': should be a list, as in norm.sites=[attn]" in err
    _, _, err = launch("trainer.device=gpu")
    assert "trainer.device='gpu': should be one of auto, cpu, cuda" in err


def test_a_named_model_wins_over_the_experiments(launch, trainer):
    assert launch("experiment=smoke", "model=3m")[0] == 0
    assert trainer.calls[-1][0].model.name == "3m"
