"""What the entry points share: Hydra's registration, help, one-line errors, paths, exit codes.

Hydra composes, our code owns directories: Hydra is told to write nothing, and every check comes before the first
directory. docs/running.md has the table of exit codes.
"""

from __future__ import annotations

import io
import os
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf, RunDir, SweepDir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from tapernorm.cli import errors as faults
from tapernorm.cli import run, sweep
from tapernorm.config.options import Config, DatasetConfig, NormConfig
from tapernorm.config.paths import DATASET, absolute_paths
from tapernorm.config.programs import BenchmarkConfig, EvaluateConfig, ExportConfig, GenerateConfig
from tapernorm.config.schema import ConfigError, all_keys, defaults, fields_of, leaves, to_dict, validate
from tapernorm.runtime import dist
from tapernorm.runtime.signals import stopped_by_signals

CONFIGS = faults.CONFIGS

HELP_KEYS = (
    "model.n_layer",
    "model.d_model",
    "model.n_ctx",
    "norm.sites",
    "anchor.weight",
    "gate.k_taper_share",
    "dataset.train",
    "optim.lr",
    "trainer.max_steps",
    "trainer.batch_size",
    "trainer.device",
    "tracking.wandb",
    "report",
    "seed",
    "runs_dir",
    "run_dir",
    "resume",
    "sweep.name",
    "sweep.fail_fast",
    "sweep.dry_run",
)


def launch(
    main: Callable[[], Any],
    *,
    description: str | None,
    schema: type = Config,
    shown: Sequence[str] = HELP_KEYS,
) -> None:
    """Run a function decorated by `hydra.main`; faults of composition become one line and exit status 2.

    `description` is the head of --help, `schema` what the composed tree is checked against, `shown` the keys that
    --help lists.
    """
    for stream in (sys.stdout, sys.stderr):  # one that lacks a character gets a question mark, not an error
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(help_text(description or "", schema, shown))
        return
    register()
    multirun = {"--multirun", "-m"}
    if multirun & set(sys.argv[1:]):  # first: Hydra's parser does not take it between overrides
        rest = [sweep.left_to_jobs(argument) for argument in sys.argv[1:] if argument not in multirun]
        sys.argv[1:] = ["--multirun", *rest]
    status = 0
    with faults.in_one_line(schema):
        check_replayed(sys.argv)
    try:
        # With HYDRA_FULL_ERROR Hydra hands its exceptions over instead of printing them.
        with (
            faults.in_one_line(schema),
            env_override({"HYDRA_FULL_ERROR": "1"}),
            stopped_by_signals(),
        ):
            if schema is Config:
                dist.start()
                if dist.size() > 1 and "--multirun" in sys.argv:
                    raise ConfigError("--multirun: the jobs of a sweep are single processes; start it without torchrun")
            elif os.environ.get("WORLD_SIZE", "1") != "1":
                name = Path(sys.argv[0]).name
                raise ConfigError(
                    f"{name} is one process (WORLD_SIZE={os.environ['WORLD_SIZE']}); start it without torchrun"
                )
            main()
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        if isinstance(error, OSError) and error.errno in run.DISK_FULL and not faults.WANTS_TRACEBACKS:
            faults.stop(run.in_words(error), status=1)
        # A job's own failure never comes here: this is a worker that was killed, a scheduler that refused.
        if sweep.started is None or faults.WANTS_TRACEBACKS:
            raise
        text = textwrap.shorten(run.in_words(error), 300)  # submitit's has the job's whole console in it
        faults.stop(f"the launcher failed: {text}", status=1)
    finally:
        try:
            failed = sweep.report()
        except KeyboardInterrupt:  # a second Ctrl-C: the table can be had again by the same command
            failed, status = True, 130
        _let_go_of_closed_streams()
    if status or failed:
        raise SystemExit(status or 1)


def check_replayed(argv: Sequence[str]) -> None:
    """Refuse a configuration from elsewhere (--config-path) that could do more than set this program's keys.

    Hydra imports and calls what `hydra.callbacks`, `hydra.launcher` or logging settings name, sets the environment by
    `hydra.job.env_set`, and interpolations such as ${oc.env:...} copy what is secret into a run's files. A saved
    .hydra/config.yaml holds none of these and no defaults list, so a run directory from somebody else is only data. The
    command line and --config-dir are the user's own. Raises ConfigError, one line, before Hydra reads anything.
    """
    given = get_args_parser().parse_args(argv[1:])
    if given.experimental_rerun is not None:
        raise ConfigError("--experimental-rerun opens a pickle, which can execute code; use --config-path RUN/.hydra")
    directory = CONFIGS if given.config_path is None else Path(argv[0]).parent.resolve() / given.config_path
    if not directory.is_dir():  # Hydra would also look into packages, and import them
        raise ConfigError(f"--config-path {given.config_path}: no such directory ({directory})")
    name = given.config_name
    files = [directory / f"{name.removesuffix('.yaml')}.yaml"] if name else sorted(directory.glob("*.yaml"))
    if directory.resolve() == CONFIGS and all(file.resolve().is_relative_to(CONFIGS) for file in files):
        return
    groups = {"hydra"} | {re.split("[@=]", override.lstrip("+~"))[0].strip("/") for override in given.overrides}
    if found := sorted(name for name in groups if name and (directory / name).is_dir()):
        raise ConfigError(f"{directory / found[0]}: a configuration that is replayed has no groups; see --config-dir")
    for file in files:
        _check_saved(file)
    ours = {"train.yaml", "config.yaml"} & {file.name for file in files}
    if name is None and Path(argv[0]).stem == "train" and ours == {"config.yaml"}:
        raise ConfigError(f"--config-path {given.config_path}: add --config-name config, which is the file in it")


def _check_saved(file: Path) -> None:
    try:
        text = file.read_text(encoding="utf-8")
        tree = yaml.safe_load(text)
    except FileNotFoundError:
        return  # Hydra has the words for it
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
    for what in ("hydra", "defaults"):
        if isinstance(tree, dict) and what in tree:
            raise ConfigError(f"{file} has a section '{what}', which can start programs; a saved one has none")
    # Keys and values as they are read, the doubled ones too: in the text an escape such as \x24 would hide a '$'.
    scalars = [token.value for token in yaml.scan(text) if isinstance(token, yaml.ScalarToken)]
    for what in ("@package", "${"):
        if any(what in string for string in (text, *scalars)):
            raise ConfigError(f"{file} contains '{what}', which a saved configuration does not; take it out")


def _let_go_of_closed_streams() -> None:
    """Where whoever read along has gone, as `head` does: else Python, when it ends, would make that the exit status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def train(tree: DictConfig) -> float | None:
    """The task of train.py: one run, or one job of a sweep. Returns the final validation loss."""
    settings = HydraConfig.get()
    overrides = sweep.as_typed(settings.overrides.task)
    with faults.in_one_line():
        composed = absolute_paths(plain(tree), Path(settings.runtime.cwd))
        if settings.mode == RunMode.MULTIRUN:
            summary = sweep.run_job(composed, overrides=overrides, number=int(settings.job.num))
        elif composed.get("sweep", {}).get("dry_run"):
            raise ConfigError("sweep.dry_run=true lists the jobs of a sweep: add --multirun")
        else:
            summary = run.run_single(composed, overrides=overrides)
    return summary.get("val_loss")


def evaluate(tree: DictConfig) -> None:
    """The task of evaluate.py."""
    with faults.in_one_line(EvaluateConfig):
        composed = _only_validation(plain(tree))
        config = validate(absolute_paths(composed, Path(HydraConfig.get().runtime.cwd)), EvaluateConfig)
        from tapernorm.analysis.evaluate import (
            evaluate_checkpoint,  # torch: only once the command line is known to be right
        )

        evaluate_checkpoint(config)


def _only_validation(tree: dict[str, Any]) -> dict[str, Any]:
    """Evaluation reads no training text: of `dataset=text` it needs dataset.valid, or held_out of dataset.train.

    Of a filter's reference it needs dataset.reference.train, however.
    """

    def walk(node: dict[str, Any], key: str) -> dict[str, Any]:
        if re.fullmatch(DATASET, key) and not key.endswith(".reference") and node.get("train") == "???":
            if node["valid"] is None:
                raise ConfigError(f"{key}.valid is missing: name the text to evaluate on, as in {key}.valid=...")
            return {**node, "train": node["valid"]}
        return {
            name: walk(value, f"{key}.{name}".lstrip(".")) if isinstance(value, dict) else value
            for name, value in node.items()
        }

    return walk(tree, "")


def generate(tree: DictConfig) -> None:
    """The task of scripts/generate.py: text on standard output, remarks on standard error."""
    with faults.in_one_line(GenerateConfig):
        config = validate(absolute_paths(plain(tree), Path(HydraConfig.get().runtime.cwd)), GenerateConfig)
        from tapernorm.cli import continuation  # torch: only once the command line is known to be right
        from tapernorm.model.generate import NotFinite

        try:
            continuation.continue_text(config)
        except NotFinite as error:
            faults.stop(f"checkpoint {config.checkpoint}: {error}", status=1)
        except BrokenPipeError:  # whoever reads, such as `head`, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def benchmark(tree: DictConfig) -> None:
    """The task of scripts/benchmark_decode.py."""
    with faults.in_one_line(BenchmarkConfig):
        settings = HydraConfig.get()
        config = validate(absolute_paths(plain(tree), Path(settings.runtime.cwd)), BenchmarkConfig)
        if config.checkpoint and (shape := [item for item in settings.overrides.task if item.startswith("model")]):
            raise ConfigError(f"{shape[0]}: the checkpoint brings its own shape; leave it out, or checkpoint=...")
        from tapernorm.bench import benchmark  # torch: only once the command line is known to be right

        benchmark.benchmark(config)


def export_hf(tree: DictConfig) -> None:
    """The task of scripts/export_hf.py."""
    with faults.in_one_line(ExportConfig):
        config = validate(absolute_paths(plain(tree), Path(HydraConfig.get().runtime.cwd)), ExportConfig)
        from tapernorm.interop import export  # torch: only once the command line is known to be right

        export.export(config)


def plain(tree: DictConfig) -> dict[str, Any]:
    """The composed tree as plain data, interpolations resolved; '???' stays, for `build` to name."""
    return typing.cast(dict[str, Any], OmegaConf.to_container(tree, resolve=True))


# --------------------------------------------------------------------------------------------------------- registration


def register() -> None:
    """Give Hydra the schema's defaults, and this project's settings of Hydra itself.

    The defaults stay in the dataclasses: `schema` is the tree of all of them, on which the YAML groups are laid, so
    that each key can be overridden without a '+'. Norms and data sets differ in their keys by kind, so these two come
    as `schema/norm/<kind>` and `schema/dataset/<kind>`, one of which each YAML starts from.
    """
    store = ConfigStore.instance()
    tree = to_dict(Config())
    for section, variants in {"norm": NormConfig, "dataset": DatasetConfig}.items():
        tree[section] = {}
        for cls in typing.get_args(variants):
            node = defaults(cls)
            store.store(group=f"schema/{section}", name=node["kind"], node=node, provider="tapernorm")
    store.store(name="schema", node=tree, provider="tapernorm")
    store.store(name="schema_evaluate", node=defaults(EvaluateConfig), provider="tapernorm")
    store.store(name="schema_generate", node=defaults(GenerateConfig), provider="tapernorm")
    store.store(name="schema_export_hf", node=defaults(ExportConfig), provider="tapernorm")
    store.store(name="schema_benchmark", node=to_dict(BenchmarkConfig()), provider="tapernorm")
    store.store(group="hydra", name="config", node=_hydra_settings(), provider="tapernorm")


def _hydra_settings() -> HydraConf:
    """Hydra makes no directory and no log of its own; a sweep's directory holds its multirun.yaml and our jobs."""
    groups = {"job_logging": "none", "hydra_logging": "none"}
    settings = HydraConf(
        run=RunDir(dir="."),
        sweep=SweepDir(dir="${runs_dir}/sweeps/${sweep.name}", subdir="."),
        output_subdir=None,
        callbacks={"sweep": {"_target_": "tapernorm.cli.sweep.CheckJobs"}},
    )
    settings.defaults = [{name: groups.get(name, choice) for name, choice in row.items()} for row in settings.defaults]
    return settings


# ----------------------------------------------------------------------------------------------------------------- help


def help_text(description: str, schema: type, shown: Iterable[str]) -> str:
    """The page of --help: description, groups with their choices, keys with default and meaning."""
    fields = dict(fields_of(schema))
    rows = dict(all_keys(schema)) | fields
    values = dict(leaves(to_dict(Config()) if schema is Config else defaults(schema)))
    lines = [description.strip()]
    folders = [path for path in CONFIGS.iterdir() if path.is_dir() and (schema is Config or path.name in fields)]
    if folders:
        lines += ["", "Groups (group=choice):"]
        for folder in sorted(folders):
            lines.append(f"  {folder.name:<12} {', '.join(faults.choices(folder))}")
    lines += ["", "Keys (key=value), with their defaults:"]
    for key in shown:
        default = values.get(key, "???")
        value = (
            "null"
            if default is None
            else f"[{','.join(map(str, default))}]"
            if isinstance(default, list)
            else str(default)
        )
        lines.append(f"  {key + '=' + value:<30} {rows[key]}")
    sweeps = "  Sweeps: --multirun and a=1,2." if schema is Config else ""
    lines += ["", f"All keys: --cfg job.{sweeps}  Hydra's own options: --hydra-help"]
    return "\n".join(lines)
