"""The programs: how train.py, evaluate.py and the scripts are started, what each of them does, exit codes.

docs/running.md has the table of exit codes.
"""

from __future__ import annotations

import inspect
import io
import os
import re
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from hydra.types import RunMode
from omegaconf import DictConfig

from tapernorm.cli import errors, jobs, sweep
from tapernorm.cli.composition import help_text, plain, register
from tapernorm.cli.errors import CONFIGS
from tapernorm.cli.replay import check_replayed
from tapernorm.cli.resume import put
from tapernorm.cli.run import RunFailed, run_single
from tapernorm.config.options import Config
from tapernorm.config.paths import DATASET, absolute_paths
from tapernorm.config.programs import BenchmarkConfig, EvaluateConfig, ExportConfig, GenerateConfig
from tapernorm.config.schema import ConfigError, leaves, validate
from tapernorm.runtime import dist
from tapernorm.runtime.log import to_console
from tapernorm.runtime.signals import stopped_by_signals
from tapernorm.runtime.typed import FACES

Schema = TypeVar("Schema")


def launch(name: str) -> None:
    """Run a program of PROGRAMS with the arguments in sys.argv; errors of composition become one line and status 2."""
    task, schema, config = PROGRAMS[name]
    for stream in (sys.stdout, sys.stderr):  # one that lacks a character gets a question mark, not an error
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if {"--help", "-h"} & set(sys.argv[1:]):
        typed = f"{own} {name}" if (own := os.environ.get("TAPERNORM_COMMAND")) else f"python {FACES[name]}"
        with suppress(OSError):  # stdout was closed, e.g. by head
            print(help_text(inspect.cleandoc(task.__doc__ or "").replace("COMMAND", typed), schema), flush=True)
        return _let_go_of_closed_streams()
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
            hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config)(task)()
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
    """Train a small language model whose normalization layers can be tapered away, and watch what they do.

    Every run gets its own directory with its configuration, metrics, checkpoints and log; --multirun compares runs.

    Examples:
      COMMAND experiment=smoke
      COMMAND model=3m norm=all_taper anchor=mean_log trainer.max_steps=2000
      COMMAND --multirun norm=baseline,internal_taper seed=0,1,2
    """
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
            try:
                _, summary = run_single(composed, overrides=overrides)
            except RunFailed as error:
                errors.stop(str(error), status=1)
    return summary.get("val_loss")


def evaluate(tree: DictConfig) -> None:
    """Evaluate checkpoints: losses with errors, tails and worst documents, samples, folded models, comparisons.

    Examples:
      COMMAND checkpoint=runs/RUN
      COMMAND checkpoint=runs/RUN fold=true save_folded=runs/RUN-folded
      COMMAND checkpoint=runs/RUN dataset=text dataset.valid=other.txt
      COMMAND 'checkpoint=[openai-community/gpt2,runs/RUN]' suite=gpt2
      COMMAND checkpoint=runs/sweeps/NAME baseline=runs/sweeps/NAME/norm-baseline_seed-0
      COMMAND 'checkpoint=[runs/A,runs/B]' 'out=a-and-b.json'
      COMMAND 'checkpoint=runs/*-s0'
    """
    with errors.in_one_line(EvaluateConfig):
        config = _settings(_only_validation(plain(tree)), EvaluateConfig)
        from tapernorm.analysis.evaluate import evaluate_checkpoint

        evaluate_checkpoint(config)


def generate(tree: DictConfig) -> None:
    """Continue a text with a trained model, printed as it is produced.

    Examples:
      COMMAND checkpoint=runs/RUN
      COMMAND checkpoint=runs/RUN prompt='Once upon a time' samples=3 top_p=0.95 seed=7
      COMMAND checkpoint=runs/RUN "prompt='Tim, the cat, said:'"  # with commas: quotes inside quotes
    """
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
    """Measure what norms cost in decoding with a cache, arm by arm, beside transformers' generate().

    Examples:
      COMMAND model=30m
      COMMAND model=1m modes=[eager] dtypes=[float32] batch_sizes=[1]
      COMMAND checkpoint=runs/RUN out=decode.json
    """
    with errors.in_one_line(BenchmarkConfig):
        config = _settings(plain(tree), BenchmarkConfig)
        shape = [item for item in HydraConfig.get().overrides.task if item.startswith("model")]
        if config.checkpoint and shape:
            raise ConfigError(f"{shape[0]}: the checkpoint brings its own shape; leave it out, or checkpoint=...")
        from tapernorm.bench import benchmark  # torch: only once the command line is known to be right

        benchmark.benchmark(config)


def export_hf(tree: DictConfig) -> None:
    """Write a checkpoint as a model that transformers loads: norm-free with its own code, or as GPT-2 or Llama.

    Examples:
      COMMAND checkpoint=runs/RUN out=exported/RUN
      COMMAND checkpoint=runs/RUN out=exported/RUN format=gpt2
    """
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


# What each program of `command.PROGRAMS` does with the composed tree, its keys, and its file in configs/.
PROGRAMS: dict[str, tuple[Callable[[DictConfig], Any], type, str]] = {
    "train": (train, Config, "train"),
    "evaluate": (evaluate, EvaluateConfig, "evaluate"),
    "generate": (generate, GenerateConfig, "generate"),
    "export": (export_hf, ExportConfig, "export_hf"),
    "benchmark": (benchmark, BenchmarkConfig, "benchmark"),
}
