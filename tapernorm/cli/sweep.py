"""A sweep before it starts: its name, and the check of every job before the first one runs.

The same command again goes on where the last one stopped: finished jobs are skipped, interrupted and failed ones go on
from their last checkpoint, and a job whose training settings changed is refused before anything starts.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from tapernorm.cli import jobs
from tapernorm.cli.composition import plain
from tapernorm.cli.errors import COMPOSITION_ERRORS, explain, stop
from tapernorm.cli.jobs import FAILED, Sweep, identity, job_name, key_of, saved, sweep_name
from tapernorm.cli.resume import changes, check_keys, safe_name
from tapernorm.config.paths import absolute_paths
from tapernorm.config.resolve import build, resolve
from tapernorm.config.schema import ConfigError
from tapernorm.runtime.log import in_use
from tapernorm.runtime.record import Tree, load_summary
from tapernorm.runtime.saved import DONE

log = logging.getLogger(__name__)


def as_typed(overrides: Sequence[str]) -> list[str]:
    """Hydra's list of overrides, where ${seed} is still ${seed}: each job has its own, the launching process none."""
    return cast(list[str], OmegaConf.to_container(overrides, resolve=False))


def left_to_jobs(argument: str) -> str:
    """`norm.alpha=0.1` as `norm.alpha=choice(0.1)`, the same for the jobs.

    Hydra composes a sweep once without its swept choices: in `norm=dyt,derf norm.alpha=0.1` it would miss alpha in the
    default norm. It leaves out swept keys there, so that keys of a group with kinds are made such.
    """
    found = re.fullmatch(r"((?:norm|dataset)\.[\w.]+)=(.+)", argument, flags=re.DOTALL)
    if found is None:
        return argument
    try:
        swept = OverridesParser.create().parse_override(argument).is_sweep_override()
    except HydraException:  # Hydra will say so
        return argument
    return argument if swept else f"{found[1]}=choice({found[2]})"


class CheckJobs(Callback):
    """Hydra's callback: names and checks the sweep. It ends the program itself, as Hydra swallows exceptions."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            jobs.started = start(config)
        except COMPOSITION_ERRORS as error:
            stop(explain(error))
        except Exception as error:  # a sweep that has not been checked must not start
            traceback.print_exc()
            raise SystemExit(1) from error


def start(config: DictConfig) -> Sweep:
    """Name the sweep, so that every job knows it, and check all its jobs. Raises on the first error."""
    if "sweep" not in config:
        raise ConfigError("this program takes no --multirun")
    for key in ("resume", "run_dir"):
        if config[key] not in (None, "auto"):
            raise ConfigError(f"{key}={config[key]} is for a single run; a sweep goes on when its command is repeated")
    basic = str(config.hydra.sweeper.get("_target_", "")).endswith(".BasicSweeper")
    params = config.hydra.sweeper.get("params") or {}
    arguments = [*(f"{key}={value}" for key, value in params.items()), *as_typed(config.hydra.overrides.task)]
    if isinstance(config.sweep.name, float | bool):  # what was typed is lost: 12e4 is 120000.0 now
        raise ConfigError(f"sweep.name={config.sweep.name} is no text; write \"sweep.name='...'\"")
    name = str(config.sweep.name or sweep_name(arguments))
    if safe_name(name) != name:
        raise ConfigError(f"sweep.name={name}: use letters, digits and . _ + - alone")
    swept = [key_of(override.input_line or "") for override in _parsed(arguments) if _differs(override)]
    # ++, as a configuration that an older version saved, and that is swept over now, lacks the key.
    told = [f"sweep.name='{name}'", f"++sweep.swept={json.dumps(swept)}"]
    with read_write(config), open_dict(config):
        config.sweep.name, config.sweep.swept = name, swept
        config.hydra.overrides.task.extend(told)
    arguments.extend(told)
    directory = Path(config.runs_dir).expanduser().absolute() / "sweeps" / name
    if config.sweep.dry_run:
        if not basic:
            raise ConfigError("sweep.dry_run: this sweeper chooses its jobs as it goes; it has no list of them")
        raise SystemExit(2 if list_jobs(config, arguments, directory) else 0)
    names = check(config, arguments, directory) if basic else []
    (directory / FAILED).unlink(missing_ok=True)
    log.info(f"sweep {name}: {len(names) or 'some'} jobs in {directory}")
    return Sweep(directory, names, bool(config.report))


def check(config: DictConfig, arguments: Sequence[str], directory: Path) -> list[str]:
    """Compose every job and return the jobs' names. Raises ConfigError for the first one that must not start."""
    names = []
    for number, (overrides, name, found) in enumerate(_composed(config, arguments, directory)):
        if isinstance(found, Exception):
            raise ConfigError(f"job {number} ({' '.join(identity(overrides))}): {explain(found)}") from found
        names.append(name)
    return names


def list_jobs(config: DictConfig, arguments: Sequence[str], directory: Path) -> bool:
    """Print every job with its state, and what is new will cost; leaves no trace. True if one would be refused."""
    rows, new = [], []
    for _, name, found in _composed(config, arguments, directory):
        text = f"refused: {explain(found)}" if isinstance(found, Exception) else state(directory / name, found)
        rows.append((name, text))
        if text == "new" and not isinstance(found, Exception):
            new.append(build(found))
    log.info(f"sweep {config.sweep.name}: {len(rows)} jobs in {directory}; a dry run, which starts nothing")
    width = max(len(name) for name, _ in rows)
    for number, (name, text) in enumerate(rows):
        log.info(f"[job {number}] {name:<{width}}  {text}")
    if new:
        from tapernorm.cli import cost  # torch: once the list is printed

        for line in cost.describe(new):
            log.info(line)
    return any(text.startswith("refused: ") for _, text in rows)


def state(directory: Path, composed: Tree) -> str:
    """What a job's directory tells of it: new, running, finished, interrupted or failed at step k of n."""
    if not (directory / ".hydra").exists():
        try:
            resolve(build(composed))
        except ConfigError as error:
            return f"new, but will fail: {error}"
        return "new"
    if in_use(directory):
        return "running"
    summary = load_summary(directory) or {"status": "interrupted"}
    if summary["status"] in DONE:
        return summary["status"]
    text = f"{summary['status']} at step {_last_saved(directory)} of {composed['trainer']['max_steps']}"
    return f"{text}: {summary['error']}" if summary.get("error") else text


def _last_saved(directory: Path) -> int:
    """The step that the job would go on from."""
    if not (directory / "checkpoints").is_dir():
        return 0
    from tapernorm.training.checkpoint import latest, step_of  # torch: only where there is something to go on from

    checkpoint = latest(directory)
    return step_of(checkpoint) if checkpoint else 0


def _parsed(arguments: Sequence[str]) -> list[Override]:
    loader = GlobalHydra.instance().config_loader()
    return OverridesParser.create(config_loader=loader).parse_overrides(list(arguments))


def _differs(override: Override) -> bool:
    """Whether the jobs differ in this key; a choice of one, as `left_to_jobs` makes them, is no difference."""
    value = override.value()
    return override.is_sweep_override() and not (isinstance(value, ChoiceSweep) and len(value.list) == 1)


def _split(arguments: Sequence[str]) -> list[list[str]]:
    """The overrides of every job, in the order of Hydra's basic sweeper."""
    values = {}
    for override in _parsed(arguments):
        key = override.get_key_element()
        if not override.is_sweep_override():
            values[key] = [f"{key}={override.get_value_element_as_str()}"]
        elif override.is_discrete_sweep():
            values[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            raise ConfigError(f"{override.input_line}: a sweep takes lists, choice(...), range(...) and glob(...)")
    return [list(job) for job in itertools.product(*values.values())]


def _composed(
    config: DictConfig, arguments: Sequence[str], directory: Path
) -> Iterator[tuple[list[str], str, Tree | Exception]]:
    """(overrides, name, configuration) of every job, or an error of COMPOSITION_ERRORS in the configuration's place:
    of composition, unknown keys, missing values, changed settings.

    A value out of its range is left to its job to report, so that the others run.
    """
    loader = GlobalHydra.instance().config_loader()
    numbers: dict[str, int] = {}
    for number, overrides in enumerate(_split(arguments)):
        name = job_name(overrides, config.sweep.swept)
        try:
            tree = loader.load_sweep_config(config, list(overrides))
            with read_write(tree), open_dict(tree):
                del tree["hydra"]
            composed = absolute_paths(plain(tree), Path.cwd())
            check_keys(composed)
            if name in numbers:
                raise ConfigError(f"the same settings as job {numbers[name]}")
            if found := saved(directory / name):
                changes(found, composed, longer=False)  # refuses changed settings
        except COMPOSITION_ERRORS as error:
            yield overrides, name, error
        else:
            numbers[name] = number
            yield overrides, name, composed
