"""What README promises: its commands compose, its two install lines are there, its groups are the ones that exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tapernorm.cli import report_command

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
LINES = [line.split("#")[0].strip() for line in re.findall(r"^python (.*)$", README, flags=re.M)]
OWN_PARSERS = ("scripts/report.py", "scripts/doctor.py")  # these are not Hydra's
COMMANDS = [line for line in LINES if not line.startswith(OWN_PARSERS)]


def command(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_compose(line: str, tmp_path: Path) -> None:
    arguments = [argument for argument in shlex.split(line) if argument not in ("-m", "--help")]
    arguments = [argument.split(",")[0] if "[" not in argument else argument for argument in arguments]
    script = str(ROOT / arguments[0])
    done = command([script, *arguments[1:], "--cfg", "job"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


def test_the_report_command_is_understood() -> None:
    (arguments,) = (shlex.split(line)[1:] for line in LINES if line.startswith("scripts/report.py"))
    given = report_command.parser().parse_args(arguments)
    assert given.directories == [Path("runs/sweeps/NAME")] and given.watch == 30


def test_the_two_commands_are_there() -> None:
    assert "pip install -c constraints.txt -e . && python train.py" in README
    assert "pip install -c constraints.txt -e '.[test]' && pytest" in README
    assert (ROOT / "constraints.txt").read_text().count("torch==2.13.0") == 1


def test_every_folder_is_named() -> None:
    folders = {path.parent.name for path in (ROOT / "tapernorm").glob("*/__init__.py")}
    assert folders == set(re.findall(r"^\| `(\w+)` \|", README.partition("## Where things are")[2], re.MULTILINE))
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    lines = {
        name: int(number.replace(",", ""))
        for name, number in re.findall(r"^\| `(\w+)/` .* ([\d,]+) \|$", architecture, re.M)
    }
    assert folders == lines.keys()
    for folder, stated in lines.items():
        counted = sum(len(path.read_text().splitlines()) for path in (ROOT / "tapernorm" / folder).rglob("*.py"))
        assert abs(counted - stated) <= 0.03 * counted, f"docs/architecture.md: {folder} has {counted} lines"


def test_every_choice_is_named() -> None:
    for folder in (ROOT / "configs").iterdir():
        if folder.is_dir() and folder.name not in ("experiment", "dataset"):
            assert f"`{folder.name}`" in README
            for choice in folder.glob("*.yaml"):
                assert f"`{choice.stem}`" in README, f"{folder.name}={choice.stem}"


def test_help_lists_groups_and_keys_quickly(tmp_path: Path) -> None:
    done = command([str(ROOT / "train.py"), "--help"], tmp_path)
    assert done.returncode == 0
    for word in ("internal_taper", "fixed_target", "tinystories", "trainer.max_steps", "optim.lr", "resume"):
        assert word in done.stdout
    assert "torch" not in done.stderr


def test_a_whole_smoke_run_and_its_evaluation(tmp_path: Path) -> None:
    """The commands as a user types them: train, then the evaluate command that the last line prints."""
    os.environ.pop("WANDB_API_KEY", None)
    done = command([str(ROOT / "train.py"), "experiment=smoke", "norm=all_taper", "trainer.device=cpu"], tmp_path)
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    arguments = shlex.split(last.split("python ", 1)[1])
    checked = command([str(ROOT / arguments[0]), *arguments[1:], "device=cpu"], tmp_path)
    assert checked.returncode == 0, checked.stderr
    said = re.search(r"finished: validation loss ([\d.]+)", done.stdout)
    again = re.search(r"validation loss ([\d.]+)", checked.stdout)
    assert said and again and said[1] == again[1]
    run_dir = next((tmp_path / "runs").iterdir())
    names = {path.name for path in run_dir.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "summary.json", "checkpoints", "run.log", ".hydra", "report.html"} <= names
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}, "nothing stray in the launch directory"


def test_a_whole_sweep_with_offline_wandb_runs(tmp_path: Path) -> None:
    """Six jobs: six directories with stable names, six W&B runs, one table with the gaps to the baseline."""
    modes = ["norm=baseline,internal_taper,all_taper", "anchor=none,fixed_target"]
    done = command([str(ROOT / "train.py"), "-m", *modes, "experiment=smoke", "trainer.device=cpu"], tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (sweep,) = (tmp_path / "runs" / "sweeps").iterdir()
    jobs = sorted(path for path in sweep.iterdir() if path.is_dir())
    assert {path.name for path in jobs} == {
        f"norm-{norm}_anchor-{anchor}_experiment-smoke"
        for norm in ("baseline", "internal_taper", "all_taper")
        for anchor in ("none", "fixed_target")
    }
    summaries = [json.loads((job / "summary.json").read_text()) for job in jobs]
    assert {summary["status"] for summary in summaries} == {"finished"}
    made = {"report.html", "report.md", "report.csv", "chasing.png", "losses.png"}
    assert made <= {path.name for path in sweep.iterdir()}
    assert {summary["gate"] for summary in summaries if "taper" in summary["norm"]} == {0.0}
    assert len({path.name for path in sweep.glob("*/wandb/offline-run-*/*.wandb")}) == 6
    table = done.stdout[done.stdout.index(" job ") :]
    assert table.count("finished") == 6 and "gap %" in table and "+0.00" in table
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
