"""Checkpoints: atomic, plain, checked, clean keys; damaged ones are set aside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tapernorm.cli import errors
from tapernorm.config.options import Config
from tapernorm.config.schema import ConfigError, to_dict
from tapernorm.training import checkpoint as checkpoints
from tapernorm.training.loop import Interrupted, train
from tests.training.test_training import assert_same_weights, rows, run, weights


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints at steps 8, 16, 24."""
    from tapernorm.config.resolve import build, resolve
    from tests.conftest import NORMS, TINY, merge

    directory = tmp_path_factory.mktemp("finished")
    config = resolve(build(merge(TINY, {"norm": NORMS["all_taper"], "trainer": {"keep_last": 3}})))
    run(config, directory)
    return directory


@pytest.fixture
def a_run(finished: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_P27_plain_data_clean_keys_strict_load(a_run: Path) -> None:
    path = checkpoints.find(a_run)
    torch.load(path / "training.pt")  # torch's default is weights_only
    names = checkpoints.read_weights(path).keys()
    assert not any(name.startswith(("module.", "_orig_mod.")) or "_orig_mod" in name for name in names)
    model, config, tokenizer = checkpoints.load_model(path)
    assert tokenizer.n_vocab == config.model.vocab_size
    assert {norm.phase.value for norm in model.taper_norms().values()} == {"tapered"}
    assert not list(path.glob("*.pkl"))
    config_file = path / "config.yaml"
    config_file.write_text(config_file.read_text().replace("d_model: 32", "d_model: 16"))
    with pytest.raises(ConfigError, match=r"is not of the model in config\.yaml") as error:
        checkpoints.load_model(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["model.safetensors", "training.pt", "config.yaml", "meta.json"])
@pytest.mark.parametrize("damage", ["truncated", "missing", "flipped"])
def test_P30_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    a_run: Path, name: str, damage: str, said: list[str]
) -> None:
    newest = a_run / "checkpoints" / "step-00000024"
    target = newest / name
    if damage == "missing":
        target.unlink()
    elif damage == "truncated":
        target.write_bytes(target.read_bytes()[: target.stat().st_size // 2])
    else:
        content = bytearray(target.read_bytes())
        content[len(content) // 2] ^= 0xFF
        target.write_bytes(bytes(content))
    if (name, damage) == ("meta.json", "flipped"):
        target.write_bytes(b"\xff" + target.read_bytes())
    found = checkpoints.latest(a_run)
    assert found is not None and found.name == "step-00000016"
    assert "step-00000024" in said[0] and name in said[0]
    assert newest.exists() or damage == "missing", "reading changes nothing"
    checkpoints.clear_after(a_run, 16)  # what a run does that goes on
    assert not newest.exists() and newest.with_name("step-00000024.damaged").exists()


def test_P30_a_full_disk_leaves_the_last_checkpoint(a_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **keys: object) -> None:
        raise OSError(28, "No space left on device")

    model, config, tokenizer = checkpoints.load_model(checkpoints.find(a_run))
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.write(
            checkpoints.path_at(a_run, 32),
            32,
            model=model.state_dict(),
            training={},
            config=config,
            tokenizer=tokenizer,
            meta={"gate": 0.0},
        )
    latest = checkpoints.latest(a_run)
    assert latest is not None and latest.name == "step-00000024"
    assert not list((a_run / "checkpoints").glob(".writing-*")), "a full disk is not filled further"


def test_P30_kill_9_while_saving_every_step(a_run: Path, tmp_path: Path, cache: Path) -> None:
    """Killed at an arbitrary moment of a save-every-step loop, resumed, the run equals the undisturbed one."""
    config = checkpoints.read_config(a_run)
    tree = to_dict(config)
    tree["trainer"] |= {"save_interval": 1, "keep_last": 2, "max_steps": 24}
    script = (
        "import json, sys, pathlib\n"
        "from tapernorm.config.resolve import build\n"
        "from tapernorm.training.loop import train\n"
        "train(build(json.loads(sys.argv[1])), pathlib.Path(sys.argv[2]))\n"
    )
    directory = tmp_path / "killed"
    directory.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", script, json.dumps(tree), str(directory)],
        stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    deadline = time.time() + 120
    while time.time() < deadline and not any(
        checkpoints.step_of(path) >= 5 for path in checkpoints.list_checkpoints(directory)
    ):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = checkpoints.latest(directory)
    assert found is not None and checkpoints.step_of(found) >= 4
    from tapernorm.config.resolve import build

    train(build(tree), directory, found)
    assert_same_weights(weights(a_run, 24), weights(directory, 24))
    assert rows(a_run) == rows(directory)
    assert not list((directory / "checkpoints").glob(".writing-*"))


def test_a_signal_finishes_the_step_saves_and_leaves(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tapernorm.training.state import TrainingRun

    original = TrainingRun.enter

    def enter(self: TrainingRun, step: int) -> None:
        if step == 13:
            signal.raise_signal(signal.SIGTERM)
        original(self, step)

    config = tiny(norm="all_taper")
    monkeypatch.setattr(TrainingRun, "enter", enter)
    with pytest.raises(Interrupted) as stopped:
        run(config, tmp_path / "stopped")
    assert stopped.value.step == 13
    monkeypatch.undo()
    run(config, tmp_path / "stopped", checkpoints.latest(tmp_path / "stopped"))
    run(config, tmp_path / "whole")
    assert_same_weights(weights(tmp_path / "whole", 24), weights(tmp_path / "stopped", 24))


def test_retention_keeps_the_newest_and_the_best(a_run: Path) -> None:
    checkpoints.retain(a_run, keep_last=1, best_step=8)
    assert [checkpoints.step_of(path) for path in checkpoints.list_checkpoints(a_run)] == [8, 24]


def test_faults_in_one_line(a_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        checkpoints.find(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither a checkpoint nor a run"):
        checkpoints.find(tmp_path / "empty")
    path = checkpoints.find(a_run)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | {"format": checkpoints.FORMAT + 1}))
    with pytest.raises(ConfigError, match="newer"):
        checkpoints.read_meta(path)


@pytest.mark.parametrize("name", ["step", "gate", "tokens", "data", "files", "a checksum"])
def test_a_checkpoint_without_a_field_is_damaged(a_run: Path, name: str, said: list[str]) -> None:
    newest = a_run / "checkpoints" / "step-00000024"
    meta = json.loads((newest / "meta.json").read_text())
    if name == "a checksum":
        del meta["files"]["model.safetensors"]
    else:
        meta[name] = [name]
    (newest / "meta.json").write_text(json.dumps(meta))
    found = checkpoints.latest(a_run)
    assert found is not None and found.name == "step-00000016" and "step-00000024: meta.json has no" in said[0]


def test_weights_and_tokenizer_that_do_not_fit_are_told_in_one_line(a_run: Path) -> None:
    path = a_run / "checkpoints" / "step-00000024"
    meta = json.loads((path / "tokenizer.json").read_text())
    del meta["fingerprint"]
    (path / "tokenizer.json").write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match=r"tokenizer\.json lacks a name, pattern or fingerprint"):
        checkpoints.load_model(path)
    weights = checkpoints.read_weights(path)
    first = sorted(weights)[0]
    safetensors.torch.save_file(weights | {first: weights[first][:-1].clone()}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"not of the model in config\.yaml: size mismatch for"):
        checkpoints.load_model(path)
    (path / "config.yaml").write_text("[1]\n")
    with pytest.raises(ConfigError, match="it holds no configuration"):
        checkpoints.load_model(path)


def test_all_files_of_a_checkpoint_have_the_mode_that_the_umask_gives(a_run: Path) -> None:
    modes = {path.stat().st_mode for path in (a_run / "checkpoints" / "step-00000024").iterdir()}
    assert len(modes) == 1


def test_a_checkpoint_that_may_not_be_read_is_not_taken_for_a_damaged_one(
    a_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoints, "checksum", refuse)
    with pytest.raises(PermissionError):
        checkpoints.latest(a_run)
    with pytest.raises(SystemExit) as stop, errors.in_one_line():
        checkpoints.latest(a_run)
    assert stop.value.code == 2


def test_P62_where_all_checkpoints_are_damaged_nothing_is_begun_anew(a_run: Path) -> None:
    for path in checkpoints.list_checkpoints(a_run):
        (path / "model.safetensors").write_bytes(b"")
    before = {path: path.read_bytes() for path in a_run.rglob("*") if path.is_file()}
    with pytest.raises(
        ConfigError, match=r"model\.safetensors is damaged .*no other is left; mend it, or name"
    ) as fault:
        checkpoints.latest(a_run)
    assert "\n" not in str(fault.value)
    with pytest.raises(ConfigError, match="no other is left"):
        checkpoints.find(a_run)
    assert {path: path.read_bytes() for path in a_run.rglob("*") if path.is_file()} == before
