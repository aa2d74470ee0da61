"""The programs: how train.py, evaluate.py and the scripts are started, what each of them does, exit codes.

docs/running.md has the table of exit codes.
"""

from __future__ import annotations

import io
import os
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from hydra.types import RunMode
from omegaconf import DictConfig

from tapernorm.cli import errors, jobs, sweep
from tapernorm.cli.composition import help_text, plain, register
from tapernorm.cli.replay import check_replayed
from tapernorm.cli.resume import put
from tapernorm.cli.run import run_single
from tapernorm.config.options import Config
from tapernorm.config.paths import DATASET, absolute_paths
from tapernorm.config.programs import BenchmarkConfig, EvaluateConfig, ExportConfig, GenerateConfig
from tapernorm.config.schema import ConfigError, leaves, validate
from tapernorm.runtime import dist
from tapernorm.runtime.log import to_console
from tapernorm.runtime.signals import stopped_by_signals

Schema = TypeVar("Schema")


def launch(main: Callable[[], Any], *, description: str | None, schema: type = Config) -> None:
    """Run a function decorated by `hydra.main`; errors of composition become one line and exit status 2.

    `description` is the head of --help, `schema` what the composed tree is checked against.
    """
    for stream in (sys.stdout, sys.stderr):  # one that lacks a character gets a question mark, not an error
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(help_text(description or "", schema))
        return
    to_console("stderr" if schema is GenerateConfig else "stdout")
    register()
    multirun = {"--multirun", "-m"}
    if multirun & set(sys.argv[1:]):  # first: Hydra's parser does not take it between overrides
        rest = [sweep.left_to_jobs(argument) for argument in sys.argv[1:] if argument not in multirun]
        sys.argv[1:] = ["--multirun", *rest]
    status = 0
    try:
        # With HYDRA_FULL_ERROR Hydra hands its exceptions over instead of printing them.
        with errors.in_one_line(schema), env_override({"HYDRA_FULL_ERROR": "1"}), stopped_by_signals():
            check_replayed(sys.argv)
            _join_processes(schema)
            main()
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        if isinstance(error, OSError) and error.errno in errors.DISK_FULL and not errors.WANTS_TRACEBACKS:
            errors.stop(errors.in_words(error), status=1)
        # A job's own failure never comes here: this is a worker that was killed, a scheduler that refused.
        if jobs.started is None or errors.WANTS_TRACEBACKS:
            raise
        text = textwrap.shorten(errors.in_words(error), 300)  # submitit's has the job's whole console in it
        errors.stop(f"the launcher failed: {text}", status=1)
    finally:
        try:
            failed = jobs.report()
        except KeyboardInterrupt:  # a second Ctrl-C: the table can be had again by the same command
            failed, status = True, 130
        _let_go_of_closed_streams()
    if status or failed:
        raise SystemExit(status or 1)


def _join_processes(schema: type) -> None:
    if schema is Config:
        dist.start()
        if dist.size() > 1 and "--multirun" in sys.argv:
            raise ConfigError("--multirun: the jobs of a sweep are single processes; start it without torchrun")
    elif (size := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ConfigError(f"{Path(sys.argv[0]).name} is one process (WORLD_SIZE={size}); start it without torchrun")


def _let_go_of_closed_streams() -> None:
    """Where stdout was closed, e.g. by head: else Python, when it ends, would make that the exit status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# ------------------------------------------------------------------------------------------------------- the programs
# torch is imported only once the command line is known to be right.


def train(tree: DictConfig) -> float | None:
    """The task of train.py: one run, or one job of a sweep. Returns the final validation loss."""
    to_console()  # of a worker
    settings = HydraConfig.get()
    overrides = sweep.as_typed(settings.overrides.task)
    with errors.in_one_line():
        composed = absolute_paths(plain(tree), Path(settings.runtime.cwd))
        if settings.mode == RunMode.MULTIRUN:
            summary = jobs.run_job(composed, overrides=overrides, number=int(settings.job.num))
        elif composed.get("sweep", {}).get("dry_run"):
            raise ConfigError("sweep.dry_run=true lists the jobs of a sweep: add --multirun")
        else:
            summary = run_single(composed, overrides=overrides)
    return summary.get("val_loss")


def evaluate(tree: DictConfig) -> None:
    """The task of evaluate.py."""
    with errors.in_one_line(EvaluateConfig):
        config = _settings(_only_validation(plain(tree)), EvaluateConfig)
        from tapernorm.analysis.evaluate import evaluate_checkpoint

        evaluate_checkpoint(config)


def generate(tree: DictConfig) -> None:
    """The task of scripts/generate.py: text on standard output, remarks on standard error."""
    with errors.in_one_line(GenerateConfig):
        config = _settings(plain(tree), GenerateConfig)
        from tapernorm.cli import continuation
        from tapernorm.model.generate import NotFinite

        try:
            continuation.continue_text(config)
        except NotFinite as error:
            errors.stop(f"checkpoint {config.checkpoint}: {error}", status=1)
        except BrokenPipeError:  # stdout was closed, e.g. by head
            _let_go_of_closed_streams()


def benchmark(tree: DictConfig) -> None:
    """The task of scripts/benchmark_decode.py."""
    with errors.in_one_line(BenchmarkConfig):
        config = _settings(plain(tree), BenchmarkConfig)
        shape = [item for item in HydraConfig.get().overrides.task if item.startswith("model")]
        if config.checkpoint and shape:
            raise ConfigError(f"{shape[0]}: the checkpoint brings its own shape; leave it out, or checkpoint=...")
        from tapernorm.bench import benchmark  # torch: only once the command line is known to be right

        benchmark.benchmark(config)


def export_hf(tree: DictConfig) -> None:
    """The task of scripts/export_hf.py."""
    with errors.in_one_line(ExportConfig):
        config = _settings(plain(tree), ExportConfig)
        from tapernorm.interop import export

        export.export(config)


def _settings(tree: dict[str, Any], schema: type[Schema]) -> Schema:
    return validate(absolute_paths(tree, Path(HydraConfig.get().runtime.cwd)), schema)


def _only_validation(tree: dict[str, Any]) -> dict[str, Any]:
    """Evaluation reads no training text: of `dataset=text` it needs dataset.valid, or held_out of dataset.train.

    Of a filter's reference it needs dataset.reference.train, however.
    """
    values = dict(leaves(tree))
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if name == "train" and value == "???" and re.fullmatch(DATASET, section) and not section.endswith("reference"):
            if values[f"{section}.valid"] is None:
                where = f"{section}.valid"
                raise ConfigError(f"{where} is missing: name the text to evaluate on, as in {where}=...")
            put(tree, key, values[f"{section}.valid"])
    return tree
