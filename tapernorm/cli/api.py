"""The programs from Python: what a command says, as a function that returns what it made and raises what went wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra

from tapernorm.cli.composition import plain, register
from tapernorm.cli.errors import CONFIGS, ConfigError, explain
from tapernorm.cli.run import RunFailed, run_single
from tapernorm.config.options import Config
from tapernorm.config.paths import absolute_paths
from tapernorm.config.resolve import build
from tapernorm.runtime.log import to_console
from tapernorm.runtime.record import Tree, load_summary, read_metrics
from tapernorm.runtime.saved import load_run

if TYPE_CHECKING:
    import pandas

    from tapernorm.data.tokenizer import Tokenizer
    from tapernorm.model.decoder import Decoder


@dataclass(frozen=True)
class Run:
    """A run's directory, and what is in it."""

    directory: Path

    @cached_property
    def config(self) -> Config:
        """Every setting, resolved."""
        return build(load_run(self.directory).resolved)

    @property
    def summary(self) -> Tree:
        """summary.json: status, losses, verdict; empty while the run goes on."""
        return load_summary(self.directory) or {}

    @property
    def metrics(self) -> pandas.DataFrame:
        """metrics.jsonl, a row a step; docs/metrics.md has the columns' formulas and units."""
        import pandas

        return pandas.DataFrame(read_metrics(self.directory)).set_index("step")

    @cached_property
    def _loaded(self) -> tuple[Decoder, Config, Tokenizer]:
        from tapernorm.training import checkpoint

        return checkpoint.load_model(checkpoint.find(self.directory))

    @property
    def model(self) -> Decoder:
        """The model of the newest checkpoint, on the CPU."""
        return self._loaded[0]

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded[2]


def compose(*overrides: str) -> Config:
    """The configuration that these overrides give, as `tapernorm train` would; raises ConfigError."""
    return build(_composed(overrides))


def train(*overrides: str) -> Run:
    """`tapernorm train` with these overrides: train("experiment=smoke", "norm=all_taper").

    Raises ConfigError before anything is written, RunFailed if the run fails or diverges.
    """
    to_console()
    directory, _ = run_single(_composed(overrides), overrides=overrides)
    return Run(directory)


def sweep(*overrides: str) -> list[Run]:
    """`tapernorm train -m` in a process of its own; its runs, by name. Raises RunFailed if a job fails."""
    command = [sys.executable, "-m", "tapernorm", "train", "-m", *overrides]
    directory, last = None, ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for last in filter(str.strip, process.stdout):
            print(last, end="", flush=True)
            if found := re.match(r"sweep .*: \S+ jobs in (.*)$", last):
                directory = Path(found[1])
    if process.returncode or directory is None:
        raise RunFailed(f"{last.strip()} (sweep in {directory})" if directory else last.strip())
    return [Run(path.parent.parent) for path in sorted(directory.glob("*/.hydra/config.yaml"))]


def load(path: str | Path | Run) -> Run:
    """The run in a directory. Raises ConfigError if it holds none."""
    run = path if isinstance(path, Run) else Run(Path(path))
    load_run(run.directory)
    return run


def report(runs: Sequence[str | Path | Run], out: str | Path = "report") -> Path:
    """`tapernorm report`: writes page, tables and figures of runs and sweeps into `out`; returns the page."""
    from tapernorm.analysis.report import write_report

    return write_report([run.directory if isinstance(run, Run) else Path(run) for run in runs], Path(out))


def _composed(overrides: Sequence[str]) -> Tree:
    register()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            tree: Any = hydra.compose("train", list(overrides))
    except Exception as error:
        raise ConfigError(explain(error)) from None
    return absolute_paths(plain(tree), Path.cwd())
