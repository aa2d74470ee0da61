"""A run and its directory: claim it, train, leave a status; or go on with a run that was interrupted.

<run>/.hydra/config.yaml     the composed configuration, derived values still null: what a replay starts from
<run>/.hydra/overrides.yaml  the command line's overrides
<run>/config.yaml            the resolved configuration (written by the trainer)
<run>/run.log                what the run said, and the traceback of a failure
<run>/summary.json           written last: status finished, diverged, failed or interrupted, and the results
<run>/report.html            charts of the run, made from the files above
"""

from __future__ import annotations

import copy
import errno
import json
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import yaml

from tapernorm import git_revision
from tapernorm.cli import errors as faults
from tapernorm.config.options import Config, build, resolve
from tapernorm.config.schema import (
    ConfigError,
    all_keys,
    class_of,
    leaves,
    to_dict,
    unknown_key,
    write_text,
    write_yaml,
)
from tapernorm.runtime import dist
from tapernorm.training.tracking import finite

Tree = dict[str, Any]
Say = Callable[[str], None]

MAY_DIVERGE = ("dyt", "derf", "none")  # a divergence of these is a result to report, not a failure of the run

BEFORE = "summary.json.before"  # the results of a run that is being made longer, until there are new ones
DISK_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
DONE = ("finished", "diverged")  # a run with such a status is not gone on with
# What a command says of its own directories. A run that goes on has its directory already.
OWN = ("sweep", "name", "runs_dir", "run_dir", "resume")
# Where and how a run happens, not what it computes: these may change when a run goes on.
ADJUSTABLE = (
    "tracking",
    "cache_dir",
    "report",
    "trainer.accumulation",
    "trainer.compile",
    "trainer.device",
    "trainer.dynamics_interval",
    "trainer.keep_last",
    "trainer.log_interval",
    "trainer.parallel",
    "trainer.progress",
    "trainer.sample_tokens",
    "trainer.samples",
    "trainer.save_interval",
    "trainer.val_batch_size",
    "trainer.val_interval",
)


# What a run may differ in from the baseline that it is compared with, beside ADJUSTABLE and OWN.
COMPARED = ("norm", "anchor", "gate", "calibration")


class InUse(ConfigError):
    """Another process works in this run's directory."""


class Stopped(KeyboardInterrupt):
    """A signal asked to stop; if the run had begun to train, its state is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


def stop_at_once(number: int, frame: object) -> None:
    raise Stopped(number)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let SIGTERM, SIGUSR1 and SIGUSR2 end the program as Ctrl-C does wherever there is no step to finish and save."""
    taken = []
    for name in ("SIGTERM", "SIGUSR1", "SIGUSR2"):
        number = getattr(signal, name, None)  # Windows has no SIGUSR1 and 2
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            with suppress(ValueError):  # not the main thread
                signal.signal(number, stop_at_once)
                taken.append(number)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@dataclass(frozen=True)
class Start:
    """What a run starts from."""

    config: Config
    composed: Tree
    directory: Path
    checkpoint: Path | None = None
    notes: Sequence[str] = field(default=())
    claimed: bool = False  # by this start, so that a refused run can take its directory away again


@dataclass(frozen=True)
class Saved:
    """A run as its directory tells it."""

    directory: Path
    composed: Tree
    resolved: Tree
    summary: Tree | None

    @property
    def status(self) -> str:
        return self.summary["status"] if self.summary else "interrupted"

    @property
    def worth_keeping(self) -> bool:
        """It has results or checkpoints, so other settings must not take its directory over."""
        return self.done or any(self.directory.glob("checkpoints/step-*"))

    @property
    def done(self) -> bool:
        return self.status in DONE


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


def claim(config: Config) -> Path:
    """Make this run's directory, which no other run has: `run_dir`, or a new one under `runs_dir`.

    The exclusive mkdir decides between runs that start in the same second.
    """
    if config.run_dir is not None:
        directory = Path(config.run_dir)
        if directory.is_dir() and any(directory.iterdir()) and not (directory / ".hydra").exists():
            raise ConfigError(f"run_dir={directory} holds other files; name a new or empty directory")
        if not claim_directory(directory) and (directory / ".hydra" / "config.yaml").exists():
            raise ConfigError(f"run_dir={directory} already holds a run; add resume=auto to go on, or name another")
        return directory  # also where a start was killed before it wrote anything: the log's lock decides
    label = config.name or f"{config.model.name}-{config.norm.name}-{config.anchor.kind}-s{config.seed}"
    stem = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{safe_name(label)}"
    number = 1
    while True:
        directory = Path(config.runs_dir) / (stem if number == 1 else f"{stem}-{number}")
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir()
        except FileExistsError as error:
            if not directory.is_dir():
                raise ConfigError(f"runs_dir={config.runs_dir} is not a directory") from error
            number += 1
        except OSError as error:
            raise ConfigError(f"runs_dir={config.runs_dir} cannot be written: {error.strerror}") from None
        else:
            claim_directory(directory)
            return directory


def claim_directory(directory: Path) -> bool:
    """Make `directory` a run's directory; False if it is one already."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ".hydra").mkdir()
    except FileExistsError:
        if not directory.is_dir():
            raise ConfigError(f"{directory} is not a directory") from None
        return False
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}") from None
    return True


def _unclaim(directory: Path) -> None:
    """Take a directory away again in which only our own configuration files are."""
    ours = {".hydra", "config.yaml", "data.json", "run.log", "summary.json"}
    if {path.name for path in directory.iterdir()} <= ours:
        for path in [*(directory / ".hydra").iterdir(), *directory.iterdir()]:
            if path.is_file():
                path.unlink()
        (directory / ".hydra").rmdir()
        directory.rmdir()
        with suppress(OSError):  # runs_dir, if this was the first run in it
            directory.parent.rmdir()


def safe_name(text: str) -> str:
    """`text` as a file name that needs no quoting in a shell or an override."""
    return re.sub(r"[^\w.+-]", "-", text, flags=re.ASCII).lstrip(".-") or "run"


@contextmanager
def open_log(directory: Path) -> Iterator[Say]:
    """Yield `say`, which prints a line and appends it to run.log.

    The log is locked as long as the run lasts, so that no second process goes on with the same run. The lock goes
    away with its process, also when that is killed.
    """
    try:
        file = (directory / "run.log").open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}") from None
    lost = False
    with closing_quietly(file):
        if not _lock(file.fileno()):
            time.sleep(0.2)  # whoever only asks, in `in_use`, holds the lock for a moment, too
        if not _lock(file.fileno()):
            raise InUse(f"{directory} is in use by another process")

        def say(text: str) -> None:
            nonlocal lost
            try:
                file.write(text + "\n")
                file.flush()
            except OSError as error:  # the log is no part of the results
                if not lost:
                    lost = True
                    say(f"warning: {directory / 'run.log'} cannot be written: {error.strerror}; the run goes on")
            with suppress(OSError):  # whoever read along has gone; the run goes on, and its log
                print(text, flush=True)

        yield say


@contextmanager
def closing_quietly(file: IO[str]) -> Iterator[None]:
    """Close a file at the end; what a full disk did not take is let go."""
    try:
        yield
    finally:
        with suppress(OSError):
            file.close()


def append_log(directory: Path, text: str) -> None:
    """Append to run.log if that is possible: what is told there has been, or will be, told in one line, too."""
    with suppress(OSError), (directory / "run.log").open("a", encoding="utf-8") as file:
        file.write(text.rstrip("\n") + "\n")


def _lock(handle: int) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows: no lock
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def load_summary(directory: Path) -> Tree | None:
    """summary.json, None if there is none. Raises ConfigError, one line, if it is not what was written."""
    file = directory / "summary.json"
    if not file.exists():
        return None
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        summary = None
    if not isinstance(summary, dict) or not isinstance(summary.get("status"), str):
        raise ConfigError(f"{file}: it is damaged; delete it, and the run counts as interrupted")
    return summary


def write_summary(directory: Path, summary: Tree) -> None:
    """Atomically: whoever sees summary.json sees all of it. If it cannot be written, the run counts as interrupted."""
    text = json.dumps(finite(summary), indent=2, allow_nan=False)
    try:
        write_text(directory / "summary.json", text + "\n")
    except OSError as error:
        with suppress(OSError):
            print(f"warning: {directory / 'summary.json'} cannot be written: {error.strerror}", flush=True)


def check_keys(composed: Tree) -> None:
    """Raise ConfigError for a key that is not in the schema and for a missing value; ranges are left to `build`."""
    _refuse_folded(composed, "norm.kind=folded")
    sections = [name for name, value in to_dict(Config()).items() if isinstance(value, dict)]
    for section in sections:
        if not isinstance(composed.get(section, {}), dict):
            raise ConfigError(
                f"{section}={composed[section]}: a configuration that is replayed has no groups to choose from; "
                f"override its keys one by one, as in {section}.name=..."
            )
    known = [key for key, _ in all_keys(Config)]
    for section in ("norm", "dataset"):  # of the chosen kind alone
        known = [key for key in known if not key.startswith(f"{section}.")]
        known += [key for key, _ in all_keys(class_of(Config, section, composed), f"{section}.")]
    for key, value in leaves(composed):
        if key not in known:
            raise ConfigError(unknown_key(key, known))
        if value == "???":
            raise ConfigError(f"{key} is missing: give it a value, as in {key}=...")


def _refuse_folded(tree: Any, what: str) -> None:
    norm = tree.get("norm") if isinstance(tree, dict) else None
    if isinstance(norm, dict) and norm.get("kind") == "folded":
        raise ConfigError(f"{what}: a folded model cannot be trained; resume the run that it was folded from")


# -------------------------------------------------------------------------------------------------------------- resume


def load_run(directory: Path) -> Saved:
    """Read what a run's directory says of it. Raises ConfigError if it holds no run."""
    file = directory / ".hydra" / "config.yaml"
    try:
        composed = _saved_tree(file)
        resolved_file = directory / "config.yaml"
        # Without it the run was interrupted before the vocabulary was known.
        resolved = _saved_tree(resolved_file) if resolved_file.exists() else composed
        # Built anew, so that a key which an older version did not have has its default.
        resolved = to_dict(resolve(build(resolved)))
        summary = load_summary(directory)
    except FileNotFoundError:
        raise ConfigError(f"{directory} holds no run ({file} is missing)") from None
    return Saved(directory, composed, resolved, summary)


def _saved_tree(file: Path) -> Tree:
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: it holds no configuration")
    return tree


def _resume(composed: Tree, overrides: Sequence[str]) -> Start | Saved:
    """Go on with the run or checkpoint that `resume` names; a run that is done comes back as it is."""
    resume, run_dir = str(composed["resume"]), composed.get("run_dir")
    directory, checkpoint = Path(resume), None
    if directory.parent.name == "checkpoints":
        directory, checkpoint = directory.parent.parent, directory
    if not (checkpoint or directory).is_dir():
        raise ConfigError(f"resume={resume}: there is no such directory")
    tree = None
    with suppress(OSError, ConfigError):  # what is unreadable is reported below
        tree = _saved_tree((checkpoint or directory) / "config.yaml")
    _refuse_folded(tree, f"resume={resume}")
    if run_dir and Path(run_dir) != directory:
        raise ConfigError(f"resume={resume} goes on in that directory; leave run_dir={run_dir} out")
    return go_on(load_run(directory), composed, given=given_keys(overrides), checkpoint=checkpoint)


def _resume_auto(config: Config, composed: Tree) -> Start | Saved | None:
    """Go on in run_dir, or with the newest unfinished run of this configuration; None if there is none."""
    if config.run_dir:
        taken = (Path(config.run_dir) / ".hydra" / "config.yaml").exists()
        return go_on(load_run(Path(config.run_dir)), composed) if taken else None
    files = Path(config.runs_dir).glob("*/.hydra/config.yaml")
    for file in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            saved = load_run(file.parent.parent)
            start = None if saved.done or in_use(saved.directory) else go_on(saved, composed)
        except ConfigError:  # another configuration, or no run at all
            continue
        if isinstance(start, Start) and start.checkpoint:
            return start
    print(f"resume=auto: no unfinished run of this configuration in {config.runs_dir}; starting a new one")
    return None


def in_use(directory: Path) -> bool:
    """Whether a process works in this run's directory; creates nothing."""
    try:
        with (directory / "run.log").open("r+") as file:
            return not _lock(file.fileno())
    except OSError:
        return False


def go_on(
    saved: Saved,
    composed: Tree,
    *,
    given: Sequence[str] | None = None,
    checkpoint: Path | None = None,
    longer: bool = True,
) -> Start | Saved:
    """Go on with a saved run, with what the new command changes. Raises ConfigError if that changes the training.

    `given` are the keys and sections that the command line names; None: all of `composed` counts. The base is the
    saved, resolved configuration: values that derive from others keep what they were, so that a longer run does not
    bend its schedules. `longer`: trainer.max_steps may grow. A run that is done and stays as long is returned as it is.
    """
    changed = changes(saved, composed, given, longer=longer)
    grows = any(key == "trainer.max_steps" for key, _, _ in changed)
    if saved.done and not grows and checkpoint is None:
        return saved
    resolved, kept = copy.deepcopy(saved.resolved), copy.deepcopy(saved.composed)
    for key, _, new in changed:
        _put(resolved, key, new)
        _put(kept, key, new)
    if checkpoint is None:
        from tapernorm.training.checkpoint import latest

        checkpoint = latest(saved.directory, print)
    notes = [
        f"going on from {checkpoint}" if checkpoint else "no checkpoint yet: starting again from step 0",
        *(f"{key}: {show(old)} -> {show(new)}" for key, old, new in changed),
    ]
    return Start(resolve(build(resolved)), kept, saved.directory, checkpoint, notes)


def changes(
    saved: Saved, composed: Tree, given: Sequence[str] | None = None, *, longer: bool
) -> list[tuple[str, Any, Any]]:
    """(key, saved value, new value) where the new command differs from the saved run; see `go_on`.

    A value that was left null and then resolved equals both itself and null; otherwise what was resolved counts, as a
    change that was asked for may have been refused since. Raises ConfigError, naming them all, for
    changes of the training.
    """
    new, before, resolved = (dict(leaves(tree)) for tree in (composed, saved.composed, saved.resolved))
    found = []
    for key in dict.fromkeys([*resolved, *new]):
        if within(key, OWN) or (given is not None and not within(key, given)):
            continue
        value = new.get(key)
        derived = value is None and before.get(key) is None
        if value != resolved.get(key) and not derived:
            found.append((key, resolved.get(key), value))
    refused = [change for change in found if not _may_change(*change, longer=longer)]
    if refused:
        listed = "; ".join(f"{key}: {show(old)} -> {show(new)}" for key, old, new in refused)
        raise ConfigError(f"{saved.directory} was trained with other settings ({listed}); use a new run for these")
    return found


def _may_change(key: str, old: Any, new: Any, *, longer: bool) -> bool:
    if key == "trainer.max_steps":
        return longer and isinstance(new, int) and new > old
    return within(key, ADJUSTABLE)


def given_keys(overrides: Sequence[str]) -> list[str] | None:
    """The keys and sections that overrides name; None (all of them) if one, such as experiment=..., reaches further."""
    known = {key for key, _ in all_keys(Config)} | {key.partition(".")[0] for key, _ in all_keys(Config)}
    keys = [override.lstrip("+~").partition("=")[0].partition("@")[0] for override in overrides]
    return keys if all(key in known for key in keys) else None


def match_key(resolved: Tree) -> str:
    """What a run and its baseline share, the seed included: model, data, optimizer, length, ..."""
    free = (*COMPARED, *ADJUSTABLE, *OWN)
    shared = {key: v for key, v in leaves(resolved) if key == "calibration.level" or not within(key, free)}
    return json.dumps(shared, sort_keys=True)


def is_baseline(resolved: Tree) -> bool:
    """Standard norms and no anchor."""
    kinds = [resolved.get(section, {}).get("kind") for section in ("norm", "anchor")]
    return kinds == ["standard", "none"]


def within(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(section + ".") for section in sections)


def _put(tree: Tree, key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[last] = value


def show(value: Any) -> str:
    return "null" if value is None else str(value)
