"""Shared fixtures: a tiny configuration, one prepared toy data set per session, and runs on it."""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys

# Tiny tensors: a second thread costs more than it brings, and results must not depend on how many there are.
os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tapernorm.cli.errors import CONFIGS
from tapernorm.config.options import Config
from tapernorm.config.resolve import build, resolve
from tapernorm.runtime.log import LOGGER, Lines

# A shell that starts the tests in the background has SIGINT and SIGQUIT ignored, nohup SIGHUP, and what the tests start
# would inherit that.
for name, handler in (("SIGINT", signal.default_int_handler), ("SIGQUIT", signal.SIG_DFL), ("SIGHUP", signal.SIG_DFL)):
    number = getattr(signal, name, None)  # Windows has SIGINT alone
    if number is not None and signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

TINY: dict[str, Any] = {
    "model": {"name": "tiny", "n_layer": 2, "n_ctx": 32, "d_model": 32, "head_dim": 16},
    "dataset": {"kind": "toy", "stories": 300, "valid_stories": 40, "vocab_size": 400},
    "optim": {"lr": 0.01},
    "trainer": {
        "max_steps": 24,
        "batch_size": 4,
        "log_interval": 4,
        "dynamics_interval": 6,
        "val_interval": 8,
        "save_interval": 8,
        "val_tokens": 256,
        "val_batch_size": 4,
        "probe_size": 2,
        "samples": 0,
        "device": "cpu",
        "progress": "none",
    },
    "gate": {"k_warmup": 10, "k_taper": 18},
    "calibration": {"window": 6},
    "tracking": {"wandb": "disabled"},
    "report": False,
}


class Heard(logging.Handler):
    """The lines that are said, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(Lines())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture(autouse=True)
def said() -> Iterator[list[str]]:
    """What the package says during a test; no console is left to the next one."""
    before, heard = (LOGGER.level, LOGGER.propagate), Heard()
    LOGGER.addHandler(heard)
    LOGGER.setLevel(logging.INFO)
    yield heard.lines
    LOGGER.handlers.clear()
    LOGGER.setLevel(before[0])
    LOGGER.propagate = before[1]


def merge(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """A deep copy of base with extra's leaves put over it."""
    result = {key: merge(value, {}) if isinstance(value, dict) else value for key, value in base.items()}
    for key, value in extra.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict) and "kind" not in value:
            result[key] = merge(result[key], value)
        else:
            result[key] = value
    return result


NORMS: dict[str, dict[str, Any]] = {
    "baseline": {"kind": "standard", "name": "baseline"},
    "internal_taper": {"kind": "taper", "name": "internal_taper", "sites": ["attn", "mlp"]},
    "all_taper": {"kind": "taper", "name": "all_taper", "sites": ["attn", "mlp", "final"]},
    "final_taper": {"kind": "taper", "name": "final_taper", "sites": ["final"]},
    "fake_ln": {"kind": "fake", "name": "fake_ln"},
    "none": {"kind": "none", "name": "none"},
    "dyt": {"kind": "dyt", "name": "dyt"},
    "derf": {"kind": "derf", "name": "derf"},
}

GPT2: dict[str, Any] = {
    "norm_family": "layer",
    "positions": "learned",
    "mlp": "gelu",
    "biases": True,
    "dropout": 0.1,
}


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data of the whole session in one place, and nothing of the user's."""
    path = tmp_path_factory.mktemp("cache")
    os.environ["TAPERNORM_CACHE"] = str(path)
    os.environ["WANDB_MODE"] = "offline"
    return path


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where transformers copies exported code to, instead of the user's cache.

    Once for all tests: what has been imported from one place cannot be imported from another in the same process.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """command('checkpoint=run', ...) -> status of evaluate.py, and its output or, of a fault, its error."""

    def evaluate(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["evaluate.py", "device=cpu", "samples=0", *arguments])
        capsys.readouterr()
        try:
            runpy.run_path(str(CONFIGS.parent / "evaluate.py"), run_name="__main__")
        except SystemExit as stop:
            return int(stop.code or 0), capsys.readouterr().err
        return 0, capsys.readouterr().out

    return evaluate


@pytest.fixture
def tiny() -> Callable[..., Config]:
    """tiny(norm='all_taper', anchor={'kind': 'mean_log'}, trainer={'max_steps': 8}) -> resolved Config."""

    def make(norm: str = "internal_taper", **sections: Any) -> Config:
        return resolve(build(merge(TINY, {"norm": NORMS[norm], **sections})))

    return make


SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_real_text = pytest.mark.skipif(
    not (SHARED / "tinystories_train.txt").is_file(), reason="real TinyStories text is not beside the checkout"
)
