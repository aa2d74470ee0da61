"""A run and its directory: claim it, train, leave a status; or go on with a run that was interrupted.

<run>/.hydra/config.yaml     the composed configuration, derived values still null: what a replay starts from
<run>/.hydra/overrides.yaml  the command line's overrides
<run>/config.yaml            the resolved configuration (written by the trainer)
<run>/run.log                what the run said, and the traceback of a failure
<run>/summary.json           written last: status finished, diverged, failed or interrupted, and the results
<run>/report.html            charts of the run, made from the files above
"""

from __future__ import annotations

import errno
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tapernorm import git_revision
from tapernorm.cli import errors as faults
from tapernorm.cli.resume import Start, _resume, _resume_auto, _unclaim, check_keys, claim
from tapernorm.config.options import Config
from tapernorm.config.resolve import build, resolve
from tapernorm.config.schema import (
    ConfigError,
    write_yaml,
)
from tapernorm.runtime import dist
from tapernorm.runtime.log import InUse, Say, append_log, open_log
from tapernorm.runtime.record import Tree, load_summary, write_summary
from tapernorm.runtime.saved import Saved
from tapernorm.runtime.signals import Stopped

MAY_DIVERGE = ("dyt", "derf", "none")  # a divergence of these is a result to report, not a failure of the run

BEFORE = "summary.json.before"  # the results of a run that is being made longer, until there are new ones
DISK_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


# ------------------------------------------------------------------------------------------------------------- running


def run_single(composed: Tree, *, overrides: Sequence[str]) -> Tree:
    """One run outside a sweep. Raises ConfigError before anything is written, SystemExit(1) if the run failed."""
    start = dist.decide(lambda: _begin(composed, overrides))
    if isinstance(start, Saved):
        print(f"{start.directory} has {start.status}; nothing to do (a larger trainer.max_steps goes on)")
        return start.summary or {}
    try:
        summary = execute(start, overrides=overrides) if dist.leads() else follow(start)
    except InUse:  # another start took the directory between our claim and our lock
        raise
    except ConfigError:
        if start.claimed and dist.leads():
            _unclaim(start.directory)
        raise
    except KeyboardInterrupt:
        print(f"interrupted; to go on: python train.py resume={start.directory}", flush=True)
        raise
    log = start.directory / "run.log"
    if summary["status"] == "failed":
        where = f" (traceback in {log})" if log.exists() else ""
        faults.stop(f"{summary['error']}{where}", status=1)
    if summary["status"] == "diverged" and start.config.norm.kind not in MAY_DIVERGE:
        faults.stop(f"{summary['error']} (log in {log})", status=1)
    if summary["status"] == "diverged":
        print(f"diverged, which is this norm's result: {summary['error']}", flush=True)
    return summary


def _begin(composed: Tree, overrides: Sequence[str]) -> Start | Saved:
    """Check the configuration, then find the run to go on with or claim a directory."""
    check_keys(composed)
    if composed.get("resume") in (None, "auto"):
        config = resolve(build(composed))
        dist.check(config.trainer)
        found = _resume_auto(config, composed) if config.resume else None
        return found or Start(config, composed, claim(config), claimed=True)
    # The base is the saved configuration; this command's defaults need not fit together.
    found = _resume(composed, overrides)
    if isinstance(found, Start):
        dist.check(found.config.trainer)
    return found


def execute(start: Start, *, overrides: Sequence[str]) -> Tree:
    """Train, and write summary.json whatever happens; return the summary.

    Failures of the training become the status 'failed', with the traceback in run.log. ConfigError (data that cannot
    be prepared) and interruptions are raised again.
    """
    config, directory = start.config, start.directory
    began = time.monotonic()
    with open_log(directory) as say:
        before = load_summary(directory)
        replay = {**start.composed, "run_dir": None, "resume": None}  # a replay is a new run
        try:
            write_yaml(directory / ".hydra" / "config.yaml", replay)
            write_yaml(directory / ".hydra" / "overrides.yaml", list(overrides))
            if before:  # renamed, so that a full disk cannot keep it from coming back
                (directory / "summary.json").replace(directory / BEFORE)
        except OSError as error:
            raise ConfigError(f"{directory} cannot be written: {error.strerror}") from None
        for note in start.notes:
            say(note)
        outcome: Tree = {"status": "interrupted", "error": None}
        try:
            outcome = _outcome(start, say)
            if outcome["status"] == "interrupted":
                raise Stopped(outcome.pop("signal"))
        except ConfigError as error:
            outcome = {"status": "failed", "error": str(error)}
            raise
        except Exception as error:
            outcome = {"status": "failed", "error": _log_fault(directory, error)}
        finally:
            summary = _summary(config, outcome, time.monotonic() - began)
            kept = summary
            if outcome["status"] == "failed" and before and before["status"] == "finished":
                kept = before  # a finished run that could not be made longer keeps its results
                with suppress(OSError):
                    (directory / BEFORE).replace(directory / "summary.json")
            else:
                write_summary(directory, kept)
                with suppress(OSError):
                    (directory / BEFORE).unlink(missing_ok=True)
        if config.report and outcome["status"] == "failed":
            write_page(directory, kept, say)
    return summary


def follow(start: Start) -> Tree:
    """What `execute` is in the other processes of a run: the same steps, without a word and without a file."""
    from tapernorm.training import loop

    quiet = replace(start.config, trainer=replace(start.config.trainer, progress="none"))
    try:
        result = loop.train(quiet, start.directory, checkpoint=start.checkpoint)
    except ConfigError:
        raise
    except loop.Interrupted as stop:
        raise Stopped(stop.signal) from None
    except loop.Divergence as fault:
        return {"status": "diverged", "error": str(fault)}
    except Exception as error:
        return {"status": "failed", "error": _log_fault(start.directory, error)}
    return {**result, "status": "finished"}


def _log_fault(directory: Path, error: Exception) -> str:
    """The fault that ended the run in one line; its traceback goes to run.log, from the process that it happened in."""
    text, own = dist.blame(in_words(error))
    if own:
        append_log(directory, traceback.format_exc())
    return text


def write_page(directory: Path, summary: Tree, say: Say) -> Tree:
    """report.html of the run; returns its verdict, for the summary.

    Whatever goes wrong with it is said in one line: a result never depends on it.
    """
    try:
        from tapernorm.analysis import report  # here, as only this needs it

        report.write_page(directory, summary)
        return {"verdict": report.verdict(directory, summary)}
    except Exception as error:
        say(f"warning: no report.html ({type(error).__name__}: {' '.join(str(error).split())})")
        return {}


def _outcome(start: Start, say: Say) -> Tree:
    from tapernorm.training import loop  # here, so that faults of the configuration are told before torch is imported

    config, directory, began = start.config, start.directory, time.monotonic()

    def at_end(outcome: Tree) -> Tree:
        summary = _summary(config, outcome, time.monotonic() - began)
        return write_page(directory, summary, say) if config.report else {}

    try:
        result = loop.train(config, directory, checkpoint=start.checkpoint, say=say, at_end=at_end)
    except loop.Interrupted as stop:
        say(str(stop))
        return {**stop.summary, "status": "interrupted", "error": None, "signal": stop.signal}
    except loop.Divergence as fault:
        append_log(directory, str(fault))
        return {**(fault.summary or {}), "status": "diverged", "error": str(fault)}
    return {**result, "status": "finished", "error": None}


def _summary(config: Config, outcome: Tree, seconds: float) -> Tree:
    keys = ("val_loss", "best", "steps", "tokens", "gate", "parameters")
    return {
        "status": outcome["status"],
        **dict.fromkeys(keys),
        "norm": config.norm.name,
        "anchor": config.anchor.kind,
        "seed": config.seed,
        "seconds": round(seconds, 2),
        "git_revision": git_revision(),
        **outcome,
    }


def failed_summary(composed: Tree, error: BaseException) -> Tree:
    """The summary of a run whose configuration could not even be built."""
    sections = {key: value if isinstance(value, dict) else {} for key, value in composed.items()}
    return {
        "status": "failed",
        "val_loss": None,
        "norm": sections.get("norm", {}).get("name"),
        "anchor": sections.get("anchor", {}).get("kind"),
        "seed": composed.get("seed"),
        "git_revision": git_revision(),
        "error": in_words(error),
    }


def in_words(error: BaseException) -> str:
    """One line for an error; the type is named unless the text was written to be read alone."""
    text = " ".join(str(error).split())
    if isinstance(error, ConfigError):
        return text
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        return f"{text}; make room, then go on from the last checkpoint" if error.errno in DISK_FULL else text
    return f"{type(error).__name__}: {text}"


# --------------------------------------------------------------------------------------------------------- directories


# -------------------------------------------------------------------------------------------------------------- resume
