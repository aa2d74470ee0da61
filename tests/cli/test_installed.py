"""The wheel in an environment of its own, from an empty directory; and which checkout a program runs."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SHIPPED = ("tapernorm", "configs", "pyproject.toml", "README.md", "LICENSE")


def run(command: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=250,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin of an environment that holds our wheel; what it depends on is borrowed from this one."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "source").mkdir()  # a build leaves its traces there
    for name in SHIPPED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / "source" / name)
    pip = [sys.executable, "-m", "pip"]
    built = run([*pip, "wheel", "-q", "--no-deps", "-w", str(folder), str(folder / "source")], folder, PYTHONPATH="")
    if built.returncode and "setuptools" in built.stderr:
        pytest.skip("no network to fetch the build backend from")
    assert built.returncode == 0, built.stderr
    assert run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], folder).returncode == 0
    python = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (wheel,) = folder.glob("*.whl")
    done = run(
        [*pip, "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)], folder, PYTHONPATH=""
    )
    assert done.returncode == 0, done.stderr
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"])
    return python.parent


def test_the_wheel_does_everything_from_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()

    def tapernorm(*arguments: str) -> str:
        command = [str(installed / "tapernorm"), *arguments]
        done = run(command, tmp_path / "work", HOME=str(tmp_path / "home"), PYTHONPATH="")
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert f"in {installed.parent}" in tapernorm("--version")
    out = tapernorm("train", "experiment=smoke", "run_dir=run", "tracking=none")
    assert out.splitlines()[-1] == f"tapernorm evaluate checkpoint={tmp_path / 'work' / 'run'}"
    assert "norms removed" in tapernorm("evaluate", "checkpoint=run", "fold=true")
    assert "format tapernorm" in tapernorm("export", "checkpoint=run", "out=exported")
    assert tapernorm("report", "run", "out=pages") == "pages/report.html\n"
    assert tapernorm("generate", "checkpoint=run", "max_tokens=3")
    out = tapernorm("train", "-m", "experiment=smoke", "seed=0,1", "tracking=none", "hydra/launcher=joblib")
    assert out.count("finished") >= 2 and "report: " in out
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["exported", "pages", "run", "runs"]


def test_every_package_and_configuration_is_shipped(installed: Path) -> None:
    (package,) = installed.parent.glob("lib/python*/site-packages/tapernorm")
    ours = {path.relative_to(ROOT / "tapernorm") for path in (ROOT / "tapernorm").rglob("*") if path.is_file()}
    ours = {path for path in ours if "__pycache__" not in path.parts}
    ours |= {Path("configs") / path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml")}
    theirs = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    assert {path for path in theirs if "__pycache__" not in path.parts} == ours


@pytest.mark.parametrize("program", ["train.py", "scripts/report.py", "scripts/generate.py"])
def test_P70_a_program_runs_the_checkout_that_it_lies_in(program: str, tmp_path: Path) -> None:
    for name in ("tapernorm", "configs", "train.py", "scripts"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    done = run([sys.executable, str(tmp_path / program), "--version"], ROOT, PYTHONPATH="")
    assert done.stdout.endswith(f", in {tmp_path}\n")


def test_the_command_without_and_with_a_wrong_program(tmp_path: Path) -> None:
    tapernorm = [sys.executable, "-m", "tapernorm"]
    done = run([*tapernorm, "trian"], tmp_path, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "it has train, evaluate" in done.stderr
    assert "tapernorm PROGRAM key=value" in run(tapernorm, tmp_path, PYTHONPATH=str(ROOT)).stdout
    done = run([*tapernorm, "train", "--cfg", "job", "seed=3"], tmp_path, PYTHONPATH=str(ROOT))
    assert yaml.safe_load(done.stdout)["seed"] == 3
    assert (
        "python -m tapernorm train experiment=smoke"
        in run([*tapernorm, "train", "--help"], tmp_path, PYTHONPATH=str(ROOT)).stdout
    )
