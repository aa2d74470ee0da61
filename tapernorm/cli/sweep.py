"""Sweeps: check every job before the first one starts, run each in its own directory, print one table.

The same command again goes on where the last one stopped: finished jobs are skipped, interrupted and failed ones go on
from their last checkpoint, and a job whose training settings changed is refused before anything starts.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import signal
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from tapernorm.cli import errors as faults
from tapernorm.cli import run
from tapernorm.cli.resume import Start, changes, check_keys, claim_directory, go_on, safe_name
from tapernorm.config.paths import absolute_paths
from tapernorm.config.resolve import build, resolve
from tapernorm.config.schema import ConfigError
from tapernorm.runtime.log import InUse, append_log, in_use
from tapernorm.runtime.progress import clock
from tapernorm.runtime.record import Tree, load_summary, write_summary
from tapernorm.runtime.saved import DONE, OWN, Saved, load_run, within
from tapernorm.runtime.signals import Stopped, stop_at_once

LONGEST_NAME = 100
FAILED = ".failed"  # in a sweep's directory: a job has failed, and with sweep.fail_fast no other one starts
# Not part of a job's identity: they say where and how it runs.
UNNAMED = (*OWN, "tracking", "cache_dir", "report", "trainer.device", "trainer.progress")


@dataclass(frozen=True)
class Sweep:
    """A sweep that has been checked and started."""

    directory: Path
    jobs: list[str]  # names of the jobs' directories; empty if a sweeper picks them as it goes
    report: bool = False  # whether to write the report of all jobs at the end
    took: list[float] = field(default_factory=list)  # seconds of each job that has run in this process


started: Sweep | None = None  # set by the callback in the launching process, read when Hydra returns


# -------------------------------------------------------------------------------------------------------------- naming


def as_typed(overrides: Sequence[str]) -> list[str]:
    """Hydra's list of overrides, where ${seed} is still ${seed}: each job has its own, the launching process none."""
    return cast(list[str], OmegaConf.to_container(overrides, resolve=False))


def identity(overrides: Sequence[str]) -> list[str]:
    """The overrides that tell one job from another."""
    return [item for item in overrides if not within(_key(item), UNNAMED)]


def job_name(overrides: Sequence[str], swept: Collection[str] = ()) -> str:
    """A directory name from a job's overrides: `norm-dyt_seed-1`; needs no quoting anywhere.

    Where that is too long, the `swept` keys have to do. A hash is added where the name alone would not be unique: where
    a character was replaced or something left out.
    """
    items = identity(overrides)
    if not items:
        return "job"
    name = _joined(items)
    exact = all(re.fullmatch(r"[A-Za-z][\w.]*=[\w.]+", item, flags=re.ASCII) for item in items)
    if exact and len(name) <= LONGEST_NAME:
        return name
    room = LONGEST_NAME - 9
    if len(name) > room:
        name = _joined([item for item in items if _key(item) in swept] or items)
    return f"{name[:room].rstrip('.-_')}-{_hash(items)}"


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _joined(items: Sequence[str]) -> str:
    return safe_name("_".join(item.replace("=", "-", 1) for item in items))


def sweep_name(overrides: Sequence[str]) -> str:
    return _hash(identity(overrides))


def _hash(items: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(items).encode()).hexdigest()[:8]


# ------------------------------------------------------------------------------------------------------------ checking


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
        global started
        try:
            started = start(config)
        except faults.COMPOSITION_ERRORS as error:
            faults.stop(faults.explain(error))
        except Exception as error:  # a sweep that has not been checked must not start
            traceback.print_exc()
            raise SystemExit(1) from error


def start(config: DictConfig) -> Sweep:
    """Name the sweep, so that every job knows it, and check all its jobs. Raises on the first fault."""
    if "sweep" not in config:
        raise ConfigError("this program takes no --multirun")
    for key in ("resume", "run_dir"):
        if config[key] not in (None, "auto"):
            raise ConfigError(f"{key}={config[key]} is for a single run; a sweep goes on when its command is repeated")
    basic = str(config.hydra.sweeper.get("_target_", "")).endswith(".BasicSweeper")
    params = config.hydra.sweeper.get("params") or {}
    arguments = [*(f"{key}={value}" for key, value in params.items()), *as_typed(config.hydra.overrides.task)]
    name = str(config.sweep.name or sweep_name(arguments))
    if safe_name(name) != name:
        raise ConfigError(f"sweep.name={name}: use letters, digits and . _ + - alone")
    swept = _swept(arguments)
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
    jobs = check(config, arguments, directory) if basic else []
    (directory / FAILED).unlink(missing_ok=True)
    _say(f"sweep {name}: {len(jobs) or 'some'} jobs in {directory}")
    return Sweep(directory, jobs, bool(config.report))


def check(config: DictConfig, arguments: Sequence[str], directory: Path) -> list[str]:
    """Compose every job and return the jobs' names. Raises ConfigError for the first one that must not start."""
    names: dict[str, int] = {}
    for number, overrides in enumerate(_split(arguments)):
        try:
            name, _ = _compose(config, overrides, directory, names)
        except faults.COMPOSITION_ERRORS as error:
            raise ConfigError(f"job {number} ({' '.join(identity(overrides))}): {faults.explain(error)}") from error
        names[name] = number
    return list(names)


def list_jobs(config: DictConfig, arguments: Sequence[str], directory: Path) -> bool:
    """Print every job with its state, without a trace on the disk; True if one would be refused."""
    names: dict[str, int] = {}
    rows: list[tuple[str, str]] = []
    for number, overrides in enumerate(_split(arguments)):
        try:
            name, composed = _compose(config, overrides, directory, names)
        except faults.COMPOSITION_ERRORS as error:
            rows.append((job_name(overrides, config.sweep.swept), f"refused: {faults.explain(error)}"))
        else:
            names[name] = number
            rows.append((name, state(directory / name, composed)))
    _say(f"sweep {config.sweep.name}: {len(rows)} jobs in {directory}; a dry run, which starts nothing")
    width = max(len(name) for name, _ in rows)
    for number, (name, text) in enumerate(rows):
        _say(f"[job {number}] {name:<{width}}  {text}")
    return len(names) < len(rows)


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

    checkpoint = latest(directory, _say)
    return step_of(checkpoint) if checkpoint else 0


def _swept(arguments: Sequence[str]) -> list[str]:
    """The keys that the jobs differ in; a choice of one, as `left_to_jobs` makes them, is none of these."""
    parsed = OverridesParser.create().parse_overrides(list(arguments))
    return [
        _key(override.input_line or "") for override in parsed if override.is_sweep_override() and not _single(override)
    ]


def _single(override: Override) -> bool:
    value = override.value()
    return isinstance(value, ChoiceSweep) and len(value.list) == 1


def _split(arguments: Sequence[str]) -> list[list[str]]:
    """The overrides of every job."""
    loader = GlobalHydra.instance().config_loader()
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(arguments))
    return BasicSweeper.split_arguments(parsed, None)[0]


def _compose(
    config: DictConfig, overrides: Sequence[str], directory: Path, names: Mapping[str, int]
) -> tuple[str, Tree]:
    """Name and configuration of a job. `names` are those of the jobs before it, with their numbers.

    Raises one of faults.COMPOSITION_ERRORS for faults of composition, unknown keys, missing values and changed
    settings. A value out of its range is left to its job to report, so that the others run.
    """
    from tapernorm.cli.main import plain

    tree = GlobalHydra.instance().config_loader().load_sweep_config(config, list(overrides))
    with read_write(tree), open_dict(tree):
        del tree["hydra"]
    composed = absolute_paths(plain(tree), Path.cwd())
    check_keys(composed)
    name = job_name(overrides, config.sweep.swept)
    if name in names:
        raise ConfigError(f"the same settings as job {names[name]}")
    if saved := _saved(directory / name):
        changes(saved, composed, longer=False)  # refuses changed settings
    return name, composed


def _saved(directory: Path) -> Saved | None:
    """The job that an earlier start left in its directory, if it left more than a failure to begin."""
    if not (directory / ".hydra" / "config.yaml").exists():
        return None
    saved = load_run(directory)
    return saved if saved.worth_keeping else None


# ------------------------------------------------------------------------------------------------------------- running


def run_job(composed: Tree, *, overrides: Sequence[str], number: int) -> Tree:
    """One job of a sweep. Its status goes to its files: whatever fails in it must not stop the launcher."""
    name = job_name(overrides, composed["sweep"]["swept"])
    sweep = Path(composed["runs_dir"]) / "sweeps" / str(composed["sweep"]["name"])
    directory, fail_fast = sweep / name, composed["sweep"].get("fail_fast")
    if fail_fast and (sweep / FAILED).exists():
        _say(f"[job {number}] {name}: not started, as another job has failed")
        return {}
    _say(f"[job {number}] {name}{_outlook(number)}")
    if isinstance(composed.get("tracking"), dict) and composed["tracking"].get("group") is None:
        composed["tracking"]["group"] = composed["sweep"]["name"]
    composed = {**composed, "run_dir": None, "resume": None}
    try:
        job = _start(composed, directory)
        if isinstance(job, Saved):
            _say(f"[job {number}] {job.status} before; skipped")
            return job.summary or {}
        began = time.monotonic()
        with _labelled(number) if started is None else nullcontext():
            summary = run.execute(job, overrides=overrides)
        if started is not None:
            started.took.append(time.monotonic() - began)
    except InUse as error:
        _say(f"[job {number}] {error}; skipped")
        return {}
    except Stopped as stop:
        _hand_over(stop.signal)
        raise
    except Exception as error:  # a value out of its range, data that cannot be prepared, a full disk
        with suppress(ConfigError):  # where nothing can be written, the line below has to do
            claim_directory(directory)
        append_log(directory, f"{traceback.format_exc()}error: {run.in_words(error)}")
        summary = run.failed_summary(composed, error)
        if _saved(directory) is None:  # results that are there stay
            write_summary(directory, summary)
    if summary["status"] != "finished":
        _say(f"[job {number}] {summary['status']}: {summary['error']}")
    if fail_fast and is_failure(summary, composed["norm"].get("kind")):
        with suppress(OSError):
            (sweep / FAILED).touch()
    return summary


def _outlook(number: int) -> str:
    """How much is left from this job on, for jobs that run one after the other, once one of them has shown its time."""
    if started is None or not started.took:
        return ""
    names = started.jobs[number:]
    left = sum(_summary(started.directory / name)["status"] not in DONE for name in names)
    return f"  ({left} of {len(started.jobs)} left, about {clock(left * sum(started.took) / len(started.took))})"


class _Labelled(io.TextIOBase):
    """A stream whose lines all begin with a label; no terminal, as a bar could not share its line with another one."""

    def __init__(self, stream: TextIO, label: str) -> None:
        self.stream, self.label, self.fresh = stream, label, True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self.stream.write(self.label + line if self.fresh else line)
            self.fresh = line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()


@contextmanager
def _labelled(number: int) -> Iterator[None]:
    """Whose line is it, where several jobs write at the same time."""
    label = f"[job {number}] "
    with redirect_stdout(_Labelled(sys.stdout, label)), redirect_stderr(_Labelled(sys.stderr, label)):
        yield


def _say(text: str) -> None:
    with suppress(OSError):  # whoever read along has gone; the sweep goes on
        print(text, flush=True)


def _hand_over(number: int) -> None:
    """Now that the job is saved, let the handler that was there before act: submitit's has the scheduler requeue it."""
    handler = signal.getsignal(number)
    if callable(handler) and handler not in (signal.default_int_handler, stop_at_once):
        signal.raise_signal(number)


def _start(composed: Tree, directory: Path) -> Start | Saved:
    config = resolve(build(composed))
    if saved := _saved(directory):
        return go_on(saved, composed, longer=False)
    claim_directory(directory)
    return Start(config, composed, directory)


def is_failure(summary: Tree, kind: str | None) -> bool:
    status = summary["status"]
    return status not in ("finished", "diverged") or (status == "diverged" and kind not in run.MAY_DIVERGE)


# --------------------------------------------------------------------------------------------------------------- table
# T*: at the best temperature; drift: ln of the final residual scale over the one at k_warmup; mismatch: the worst
# |ln(c r)| of all sites, at the first step with gate 0 and at the end


def report() -> bool:
    """Print the table of the sweep that this process started, if it did; True if a job failed or did not run.

    It is built from the files, as the jobs may have run in other processes.
    """
    from tapernorm.analysis.format import number, print_table

    global started
    if started is None:
        return False
    sweep, started = started, None
    rows = rows_of(sweep)
    incomplete = [row for row in rows if row["failed"]]
    stopped = [row for row in incomplete if row["status"] in ("interrupted", "running", "not run")]
    texts = [[number(row[column], form) for column, (_, form) in COLUMNS.items()] for row in rows]
    with suppress(OSError):
        print_table(list(COLUMNS), texts, n_left=4)
    for row in incomplete:
        if row not in stopped:
            _say(f"{row['status']}: {row['job']}: {row['error']} ({sweep.directory / row['job'] / 'run.log'})")
    if stopped:
        _say(f"{len(stopped)} of {len(rows)} jobs are not done; the same command goes on with them")
    if sweep.report and len(stopped) < len(rows):
        write_report(sweep.directory)
    return bool(incomplete)


def write_report(directory: Path) -> None:
    """The report of all jobs, in the sweep's directory. Whatever goes wrong with it is said in one line."""
    try:
        from tapernorm.analysis import report  # here, as only this needs it

        _say(f"report: {report.write_report([directory], directory)}")
    except Exception as error:
        _say(f"warning: no report ({type(error).__name__}: {' '.join(str(error).split())})")


COLUMNS = {  # with what stands in them, and how it is written
    "job": ("run", ""), "status": ("status", ""), "norm": ("norm", ""), "anchor": ("anchor", ""), "seed": ("seed", ""),
    "val loss": ("val_loss", ".4f"), "gap %": ("gap_percent", "+.2f"), "loss T*": ("val_loss_best_temperature", ".4f"),
    "drift": ("drift", "+.2f"), "mismatch": ("mismatch_gate_0", ".2f"), "at end": ("mismatch_end", ".2f"),
    "steps": ("steps", ""), "seconds": ("seconds", ".1f"),
}  # fmt: skip


def rows_of(sweep: Sweep) -> list[Tree]:
    """One row per job. The gap is to the baseline without an anchor that shares every other setting and the seed."""
    from tapernorm.analysis.compare import compare_runs
    from tapernorm.analysis.runs import read

    folders = sorted(path.parent.parent.name for path in sweep.directory.glob("*/.hydra/config.yaml"))
    names = list(dict.fromkeys([*sweep.jobs, *folders]))
    comparison = compare_runs([read(sweep.directory / name) for name in names])
    known = {run.name: (mode, run) for mode in comparison.modes for run in mode.runs}
    rows: list[Tree] = []
    for mode, job in (known[name] for name in names):
        summary, found = _summary(job.directory), comparison.row(mode, job)
        values = found | {key: summary.get(key) for key in ("status", "norm", "anchor", "seed", "steps")}
        if not job.finished:  # of a diverged run, numbers that mean nothing beside the others
            values |= {"val_loss": None, "val_loss_best_temperature": None}
        failed = job.name in (sweep.jobs or folders) and is_failure(summary, job.setting("norm", "kind"))
        row = {column: values[key] for column, (key, _) in COLUMNS.items()}
        rows.append(row | {"error": summary.get("error"), "failed": failed})
    return rows


def _summary(directory: Path) -> Tree:
    """summary.json of a job's directory, or what else can be told of it."""
    try:
        saved = load_run(directory)
    except ConfigError:  # never started, or its configuration could not be built
        file = directory / "summary.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"status": "not run"}
    settings = saved.resolved
    return saved.summary or {  # it runs, or was killed
        "status": "running" if in_use(directory) else "interrupted",
        "norm": settings["norm"]["name"],
        "anchor": settings["anchor"]["kind"],
        "seed": settings["seed"],
    }
