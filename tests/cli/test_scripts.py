"""scripts/wandb_dashboard.py, and the maintainers' scripts/dev/compare.py and soak.py."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tapernorm.runtime.record import METRICS

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str) -> SimpleNamespace:
    """A script's functions; they share one namespace, which can be changed."""
    functions = runpy.run_path(str(SCRIPTS / f"{name}.py"))
    return SimpleNamespace(functions=functions["main"].__globals__, main=functions["main"])


# ------------------------------------------------------------------------------------------------------- dev/compare.py


def make_run(directory: Path, losses: dict[int, float | None], val_loss: float = 2.5, **settings: Any) -> Path:
    directory.mkdir()
    rows = [{"step": step, "train/loss": loss} for step, loss in losses.items()]
    rows[-1]["val/loss"] = val_loss
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"run_dir": str(directory), "optim": {"lr": 0.1}, "seed": 0, **settings}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    return directory


def test_compare_finds_equal_runs_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (make_run(tmp_path / name, {1: 3.0, 2: 0.1 + 0.2, 3: None}) for name in "ab")
    assert load("dev/compare").main([str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "train/loss: bit-identical at 3 steps" in out and "val/loss: bit-identical at 1 steps" in out
    assert out.endswith("settings: no difference\n")  # where a run is, is not one


def test_compare_names_the_first_and_largest_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = make_run(tmp_path / "a", {1: 3.0, 2: 0.3, 3: 2.0, 4: 1.0})
    b = make_run(tmp_path / "b", {1: 3.0, 2: 0.1 + 0.2, 3: 1.5}, optim={"lr": 0.2}, model={"d_model": 8})
    main = load("dev/compare").main
    assert main([str(a), str(b)]) == 1
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if re.match(r" +\d", line)}
    assert rows["2"] == ["0.300000", "0.300000", "+5.55e-17"]
    assert "train/loss: 3 of 4 steps differ, the first is step 2; the largest difference is -5.00e-01, at step 3" in out
    assert "  optim.lr: 0.1 -> 0.2\n" in out and "  model.d_model: (no such key) -> 8\n" in out and "seed" not in out
    assert main([str(a), str(b), "--metrics", "val/loss"]) == 1  # logged at other steps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing", "missing"], "missing/config.yaml cannot be read"),
        (["a", "a", "--metrics", "gate/g"], "a and a have logged no gate/g"),
        (["a", "a", "--", "seed=1"], "arguments of train.py need --commits"),
        (["a", "a", "--metrics", "loss"], "invalid choice: 'loss'"),
        (["nowhere", "HEAD", "--commits"], "nowhere is no commit of"),
    ],
)
def test_compare_ends_with_one_line_where_nothing_can_be_compared(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("a"), {1: 1.0})
    with pytest.raises(SystemExit) as stop:
        load("dev/compare").main(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


TRAIN = """
import json, pathlib, sys
given = dict(argument.split("=") for argument in sys.argv[1:])
directory = pathlib.Path(given["run_dir"])
directory.mkdir()
directory.joinpath("metrics.jsonl").write_text(json.dumps({"step": 1, "train/loss": LOSS * int(given["seed"])}))
directory.joinpath("config.yaml").write_text("seed: " + given["seed"])
if given["seed"] == "0":
    raise SystemExit("error: seed")
"""


def test_compare_trains_two_commits_and_leaves_the_repository_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout

    git("init", "-q")
    for loss in ("1.5", "1.25"):
        (tmp_path / "train.py").write_text(TRAIN.replace("LOSS", loss))
        git("add", ".")
        git("commit", "-qm", loss)
    script = load("dev/compare")
    monkeypatch.setitem(script.functions, "ROOT", tmp_path)
    assert script.main(["--commits", "HEAD~1", "HEAD", "--", "seed=2"]) == 1
    assert "the largest difference is -5.00e-01, at step 1" in capsys.readouterr().out
    assert script.main(["--commits", "HEAD", "HEAD", "--", "seed=2"]) == 0
    with pytest.raises(SystemExit):
        script.main(["--commits", "HEAD", "HEAD", "--", "seed=0"])
    assert "train.py at HEAD ended with status 1: error: seed" in capsys.readouterr().err
    assert git("worktree", "list").count("\n") == 1 and git("status", "--porcelain") == ""


# ----------------------------------------------------------------------------------------------- wandb_dashboard.py


def panels(workspace: Any) -> list[Any]:
    return [panel for section in workspace.sections for panel in section.panels]


def test_the_dashboard_shows_metrics_that_exist_over_tokens_by_sweep() -> None:
    pytest.importorskip("wandb_workspaces")
    workspace = load("wandb_dashboard").functions["build"]("entity", "project", "name")
    assert {panel.x for panel in panels(workspace)} == {"trainer/tokens"} <= METRICS.keys()
    real = [name.replace("<site>", site) for name in METRICS for site in ("0.attn", "final")]
    for panel in panels(workspace):
        assert set(panel.y) <= METRICS.keys(), panel.title
        assert panel.y or [name for name in real if re.fullmatch(panel.metric_regex, name)], panel.title
    groups = workspace._to_model().spec.section.run_sets[0].grouping
    assert (groups[0].section, groups[0].name) == ("run", "group")


def test_the_dashboard_prints_itself_without_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb_workspaces")
    for name in ("WANDB_API_KEY", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    main = load("wandb_dashboard").main
    main(["--print"])
    out = capsys.readouterr().out
    assert "  Loss, with the gate: train/loss, val/loss, gate/g\n" in out and "Logit chasing\n" in out
    assert out.endswith("not shown: trainer/step, trainer/tokens, val/perplexity, probe/loss\n")
    main(["--print", "json"])
    sections = json.loads(capsys.readouterr().out)["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections][:2] == ["Loss and gate", "Logit chasing"]
    with pytest.raises(SystemExit):
        main([])
    assert "--entity is missing" in capsys.readouterr().err


def test_the_dashboard_without_its_extra_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(SystemExit) as stop:
        load("wandb_dashboard").main(["--print"])
    [line] = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and "pip install -c constraints.txt -e '.[dashboard]'" in line


# ---------------------------------------------------------------------------------------------------------- soak.py


def test_soak_kills_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three kills of a short run; the long version is for whoever changes how state is saved."""
    main = load("dev/soak").main
    assert main(["--kills", "3", "--steps", "60", "--directory", str(tmp_path / "soak")]) == 0
    out = capsys.readouterr().out
    assert out.count("kill ") == 3 and "kill 2 of 3: in the preparation" in out
    assert out.endswith("equal: weights bit for bit, each step exactly once\n")
    metrics = tmp_path / "soak" / "killed" / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if json.loads(line)["step"] < 60))
    difference = load("dev/soak").functions["difference"]
    assert "each step exactly once" in difference(tmp_path / "soak" / "undisturbed", tmp_path / "soak" / "killed", 60)
    with pytest.raises(SystemExit):
        main(["--directory", str(tmp_path)])
