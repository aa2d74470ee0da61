"""The jobs of a sweep: each one's name and directory, its run, and the table of all of them at the end."""

from __future__ import annotations

import hashlib
import io
import logging
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tapernorm.cli import run
from tapernorm.cli.errors import in_words
from tapernorm.cli.resume import Start, claim_directory, go_on, safe_name
from tapernorm.config.resolve import build, resolve
from tapernorm.config.schema import ConfigError
from tapernorm.runtime.log import InUse, append_log, in_use
from tapernorm.runtime.progress import clock
from tapernorm.runtime.record import Tree, load_summary, write_summary
from tapernorm.runtime.saved import DONE, OWN, Saved, load_run, within
from tapernorm.runtime.signals import Stopped, stop_at_once

if TYPE_CHECKING:
    from tapernorm.analysis.runs import Run

log = logging.getLogger(__name__)

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


started: Sweep | None = None  # set in the launching process before the first job, read when Hydra returns


# -------------------------------------------------------------------------------------------------------------- naming


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
        name = _joined([item for item in items if key_of(item) in swept] or items)
    return f"{name[:room].rstrip('.-_')}-{_hash(items)}"


def sweep_name(overrides: Sequence[str]) -> str:
    return _hash(identity(overrides))


def identity(overrides: Sequence[str]) -> list[str]:
    """The overrides that tell one job from another."""
    return [item for item in overrides if not within(key_of(item), UNNAMED)]


def key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _joined(items: Sequence[str]) -> str:
    return safe_name("_".join(item.replace("=", "-", 1) for item in items))


def _hash(items: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(items).encode()).hexdigest()[:8]


# ------------------------------------------------------------------------------------------------------------- running


def run_job(composed: Tree, *, overrides: Sequence[str], number: int) -> Tree:
    """One job of a sweep. Its status goes to its files: whatever fails in it must not stop the launcher."""
    sweep = Path(composed["runs_dir"]) / "sweeps" / str(composed["sweep"]["name"])
    name = job_name(overrides, composed["sweep"]["swept"])
    directory, fail_fast = sweep / name, composed["sweep"].get("fail_fast")
    if fail_fast and (sweep / FAILED).exists():
        log.info(f"[job {number}] {name}: not started, as another job has failed")
        return {}
    log.info(f"[job {number}] {name}{_outlook(number)}")
    if isinstance(composed.get("tracking"), dict) and composed["tracking"].get("group") is None:
        composed["tracking"]["group"] = composed["sweep"]["name"]
    composed = {**composed, "run_dir": None, "resume": None}
    try:
        with _labelled(number) if started is None else nullcontext():
            job = _start(composed, directory)
        if isinstance(job, Saved):
            log.info(f"[job {number}] {job.status} before; skipped")
            return job.summary or {}
        began = time.monotonic()
        with _labelled(number) if started is None else nullcontext():
            summary = run.execute(job, overrides=overrides)
        if started is not None:
            started.took.append(time.monotonic() - began)
    except InUse as error:
        log.info(f"[job {number}] {error}; skipped")
        return {}
    except Stopped as stop:
        _hand_over(stop.signal)
        raise
    except (Exception, SystemExit) as error:  # a value out of its range, a full disk, an exit in code of others
        with suppress(ConfigError):  # where nothing can be written, the line below has to do
            claim_directory(directory)
        append_log(directory, f"{traceback.format_exc()}error: {in_words(error)}")
        summary = run.summarize(composed, {"status": "failed", "error": in_words(error)})
        if saved(directory) is None:  # results that are there stay
            write_summary(directory, summary)
    if summary["status"] != "finished":
        log.info(f"[job {number}] {summary['status']}: {summary['error']}")
    if fail_fast and is_failure(summary["status"], composed["norm"].get("kind")):
        with suppress(OSError):
            (sweep / FAILED).touch()
    return summary


def _outlook(number: int) -> str:
    """How much is left from this job on, for jobs that run one after the other, once one of them has shown its time."""
    if started is None or not started.took:
        return ""
    summaries = [load_summary(started.directory / name) or {} for name in started.jobs[number:]]
    left = sum(summary.get("status") not in DONE for summary in summaries)
    return f"  ({left} of {len(started.jobs)} left, about {clock(left * sum(started.took) / len(started.took))})"


def _start(composed: Tree, directory: Path) -> Start | Saved:
    config = resolve(build(composed))
    if found := saved(directory):
        return go_on(found, composed, longer=False)
    claim_directory(directory)
    return Start(config, composed, directory)


def saved(directory: Path) -> Saved | None:
    """The job that an earlier start left in its directory, if it left more than a failure to begin."""
    if not (directory / ".hydra" / "config.yaml").exists():
        return None
    found = load_run(directory)
    return found if found.worth_keeping else None


def _hand_over(number: int) -> None:
    """Now that the job is saved, let the handler that was there before act: submitit's has the scheduler requeue it."""
    handler = signal.getsignal(number)
    if callable(handler) and handler not in (signal.default_int_handler, stop_at_once):
        signal.raise_signal(number)


def is_failure(status: str, kind: str | None) -> bool:
    return status not in DONE or (status == "diverged" and kind not in run.MAY_DIVERGE)


class Labelled(io.TextIOBase):
    """A stream whose lines all begin with a label; no terminal, as a bar could not share its line with another one.

    Only whole lines are written on, each at once, as several threads may print.
    """

    def __init__(self, stream: TextIO, label: str) -> None:
        self.stream, self.label, self.begun = stream, label, threading.local()

    def write(self, text: str) -> int:
        *lines, self.begun.line = (getattr(self.begun, "line", "") + text).split("\n")
        if lines:
            self.stream.write("".join(f"{self.label}{line}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()


@contextmanager
def _labelled(number: int) -> Iterator[None]:
    """Whose line is it, where several jobs write at the same time."""
    label = f"[job {number}] "
    with redirect_stdout(Labelled(sys.stdout, label)), redirect_stderr(Labelled(sys.stderr, label)):
        yield


# --------------------------------------------------------------------------------------------------------------- table
# T*: at the best temperature; drift: ln of the final residual scale over the one at k_warmup; mismatch: the worst
# |ln(c r)| of all sites, at the first step with gate 0 and at the end

COLUMNS = {  # with what stands in them, and how it is written
    "job": ("run", ""), "status": ("status", ""), "norm": ("norm", ""), "anchor": ("anchor", ""), "seed": ("seed", ""),
    "val loss": ("val_loss", ".4f"), "gap %": ("gap_percent", "+.2f"), "loss T*": ("val_loss_best_temperature", ".4f"),
    "drift": ("drift", "+.2f"), "mismatch": ("mismatch_gate_0", ".2f"), "at end": ("mismatch_end", ".2f"),
    "steps": ("steps", ""), "seconds": ("seconds", ".1f"),
}  # fmt: skip


def report() -> bool:
    """Print the table of the sweep that this process started, if it did; True if a job failed or did not run.

    It is built from the files, as the jobs may have run in other processes.
    """
    global started
    if started is None:
        return False
    from tapernorm.analysis.format import print_table

    sweep, started = started, None
    rows = rows_of(sweep)
    incomplete = [row for row in rows if row["failed"]]
    stopped = [row for row in incomplete if row["status"] in ("interrupted", "running", "not run")]
    written = {column: f"{{:{form}}}".format for column, (_, form) in COLUMNS.items()}
    texts = [["" if row[column] is None else written[column](row[column]) for column in COLUMNS] for row in rows]
    with suppress(OSError):
        print_table(list(COLUMNS), texts, n_left=4)
    for row in incomplete:
        if row not in stopped:
            log.info(f"{row['status']}: {row['job']}: {row['error']} ({sweep.directory / row['job'] / 'run.log'})")
    if stopped:
        log.info(f"{len(stopped)} of {len(rows)} jobs are not done; the same command goes on with them")
    if sweep.report and len(stopped) < len(rows):
        write_report(sweep.directory)
    return bool(incomplete)


def write_report(directory: Path) -> None:
    """The report of all jobs, in the sweep's directory. Whatever goes wrong with it is said in one line."""
    try:
        from tapernorm.analysis import report  # here, as only this needs it

        log.info(f"report: {report.write_report([directory], directory)}")
    except Exception as error:
        log.warning(f"no report ({type(error).__name__}: {' '.join(str(error).split())})")


def rows_of(sweep: Sweep) -> list[Tree]:
    """One row per job. The gap is to the baseline without an anchor that shares every other setting and the seed."""
    from tapernorm.analysis.compare import compare_runs
    from tapernorm.analysis.runs import read

    folders = sorted(path.parent.parent.name for path in sweep.directory.glob("*/.hydra/config.yaml"))
    names = list(dict.fromkeys([*sweep.jobs, *folders]))
    comparison = compare_runs([read(sweep.directory / name) for name in names])
    rows = {}
    for mode in comparison.modes:
        for job in mode.runs:
            values = comparison.row(mode, job) | {"status": _status(job), "steps": job.summary.get("steps")}
            if not job.finished:  # of a diverged run, numbers that mean nothing beside the others
                values |= {"val_loss": None, "val_loss_best_temperature": None}
            failed = job.name in (sweep.jobs or folders) and is_failure(_status(job), job.setting("norm", "kind"))
            row = {column: values[key] for column, (key, _) in COLUMNS.items()}
            rows[job.name] = {**row, "error": job.error, "failed": failed}
    return [rows[name] for name in names]


def _status(job: Run) -> str:
    if job.summary:
        return job.status
    running = "running" if in_use(job.directory) else "interrupted"  # or killed
    return running if job.composed else "not run"
