"""A run: claim its directory, train, leave a status; or go on with a run that was interrupted.

<run>/.hydra/config.yaml     the composed configuration, derived values still null: what a replay starts from
<run>/.hydra/overrides.yaml  the command line's overrides
<run>/config.yaml            the resolved configuration (written by the trainer)
<run>/run.log                what the run said, and the traceback of a failure
<run>/summary.json           written last: status finished, diverged, failed or interrupted, and the results
<run>/report.html            charts of the run, made from the files above
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tapernorm.cli.errors import in_words
from tapernorm.cli.resume import Start, find_start, unclaim
from tapernorm.config.schema import ConfigError, to_dict, write_yaml
from tapernorm.runtime import dist
from tapernorm.runtime.log import InUse, append_log, open_log, quiet
from tapernorm.runtime.record import Tree, load_summary, write_summary
from tapernorm.runtime.revision import git_revision
from tapernorm.runtime.saved import Saved
from tapernorm.runtime.signals import Stopped
from tapernorm.runtime.typed import line

log = logging.getLogger(__name__)

MAY_DIVERGE = ("dyt", "derf", "none")  # a divergence of these is a result to report, not a failure of the run
BEFORE = "summary.json.before"  # the results of a run that is being made longer, until there are new ones


class RunFailed(Exception):
    """A run that began has failed, or has diverged with norms that should not; the reason, and where more of it is."""


def run_single(composed: Tree, *, overrides: Sequence[str]) -> tuple[Path, Tree]:
    """One run outside a sweep: its directory and its summary.

    Raises ConfigError before anything is written, RunFailed afterwards.
    """
    start = dist.decide(lambda: find_start(composed, overrides))
    if isinstance(start, Saved):
        log.info(f"{start.directory} has {start.status}; nothing to do (a larger trainer.max_steps goes on)")
        return start.directory, start.summary or {}
    try:
        summary = execute(start, overrides=overrides) if dist.leads() else follow(start)
    except InUse:  # another start took the directory between our claim and our lock
        raise
    except ConfigError:
        if start.claimed and dist.leads():
            unclaim(start.directory)
        raise
    except KeyboardInterrupt:
        log.info(f"interrupted; to go on: {line('train', resume=start.directory)}")
        raise
    file = start.directory / "run.log"
    if summary["status"] == "failed":
        where = f" (traceback in {file})" if file.exists() else ""
        raise RunFailed(f"{summary['error']}{where}")
    if summary["status"] == "diverged":
        if start.config.norm.kind not in MAY_DIVERGE:
            raise RunFailed(f"{summary['error']} (log in {file})")
        log.info(f"diverged, which is this norm's result: {summary['error']}")
    return start.directory, summary


def execute(start: Start, *, overrides: Sequence[str]) -> Tree:
    """Train, and write summary.json whatever happens; return the summary.

    Failures of the training become the status 'failed', with the traceback in run.log. ConfigError (data that cannot
    be prepared) and interruptions are raised again.
    """
    directory, began = start.directory, time.monotonic()
    with open_log(directory):
        before = load_summary(directory)
        try:
            write_yaml(directory / ".hydra" / "config.yaml", {**start.composed, "run_dir": None, "resume": None})
            write_yaml(directory / ".hydra" / "overrides.yaml", list(overrides))
            if before:  # renamed, so that a full disk cannot keep it from coming back
                (directory / "summary.json").replace(directory / BEFORE)
        except OSError as error:
            raise ConfigError(f"{directory} cannot be written: {error.strerror}") from None
        for note in start.notes:
            log.info(note)
        outcome: Tree = {"status": "interrupted"}
        try:
            outcome = _outcome(start)
            if outcome["status"] == "interrupted":
                raise Stopped(outcome.pop("signal"))
        except ConfigError as error:
            outcome = {"status": "failed", "error": str(error)}
            raise
        except (Exception, SystemExit) as error:  # an exit in code of others is no end of ours
            outcome = {"status": "failed", "error": _log_error(directory, error)}
        finally:
            summary = summarize(to_dict(start.config), outcome, time.monotonic() - began)
            kept = summary
            if outcome["status"] == "failed" and before and before["status"] == "finished":
                kept = before  # a finished run that could not be made longer keeps its results
                with suppress(OSError):
                    (directory / BEFORE).replace(directory / "summary.json")
            else:
                write_summary(directory, kept)
                with suppress(OSError):
                    (directory / BEFORE).unlink(missing_ok=True)
        if start.config.report and outcome["status"] == "failed":
            write_page(directory, kept)
    return summary


def follow(start: Start) -> Tree:
    """What `execute` is in the other processes of a run: the same steps, without a word and without a file."""
    config = replace(start.config, trainer=replace(start.config.trainer, progress="none"))
    try:
        with quiet():
            outcome = _outcome(replace(start, config=config))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        return {"status": "failed", "error": _log_error(start.directory, error)}
    if outcome["status"] == "interrupted":
        raise Stopped(outcome["signal"])
    return outcome


def _outcome(start: Start) -> Tree:
    """Train; status, error and results."""
    from tapernorm.training import loop  # here, so that errors of the configuration are told before torch is imported

    directory, began = start.directory, time.monotonic()

    def at_end(outcome: Tree) -> Tree:
        summary = summarize(to_dict(start.config), outcome, time.monotonic() - began)
        return write_page(directory, summary) if start.config.report and dist.leads() else {}

    try:
        result = loop.train(start.config, directory, checkpoint=start.checkpoint, at_end=at_end)
    except loop.Interrupted as stopped:
        log.info(str(stopped))
        return {**stopped.summary, "status": "interrupted", "signal": stopped.signal}
    except loop.Divergence as error:
        if dist.leads():
            append_log(directory, str(error))
        return {**(error.summary or {}), "status": "diverged", "error": str(error)}
    return {**result, "status": "finished"}


def _log_error(directory: Path, error: BaseException) -> str:
    """The error that ended the run in one line; its traceback goes to run.log, from the process that it happened in."""
    text, own = dist.blame(in_words(error))
    if own:
        append_log(directory, traceback.format_exc())
    return text


def write_page(directory: Path, summary: Tree) -> Tree:
    """report.html of the run; returns its verdict, for the summary.

    Whatever goes wrong with it is said in one line: a result never depends on it.
    """
    try:
        from tapernorm.analysis import report  # here, as only this needs it

        report.write_page(directory, summary)
        return {"verdict": report.verdict(directory, summary)}
    except Exception as error:
        log.warning(f"no report.html ({in_words(error)})")
        return {}


def summarize(config: Tree, outcome: Tree, seconds: float = 0.0) -> Tree:
    """What summary.json says; also of a configuration that could not be built."""
    norm, anchor = (found if isinstance(found := config.get(name), dict) else {} for name in ("norm", "anchor"))
    keys = ("error", "val_loss", "best", "steps", "tokens", "gate", "parameters")
    return {
        "status": outcome["status"],
        **dict.fromkeys(keys),
        "norm": norm.get("name"),
        "anchor": anchor.get("kind"),
        "seed": config.get("seed"),
        "seconds": round(seconds, 2),
        "git_revision": git_revision(),
        **outcome,
    }
