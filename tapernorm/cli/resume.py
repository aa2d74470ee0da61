"""Where a run starts: in a new directory, which it claims, or from a saved run and what a command may change of it."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tapernorm.config.options import Config
from tapernorm.config.resolve import build, resolve
from tapernorm.config.schema import ConfigError, all_keys, check_known, leaves, read_yaml
from tapernorm.runtime import dist
from tapernorm.runtime.log import LOCK_FILE, in_use
from tapernorm.runtime.record import METRICS_FILE, Tree
from tapernorm.runtime.saved import ADJUSTABLE, OWN, Saved, load_run, show, within


@dataclass(frozen=True)
class Start:
    """What a run starts from."""

    config: Config
    composed: Tree
    directory: Path
    checkpoint: Path | None = None
    notes: Sequence[str] = field(default=())
    claimed: bool = False  # by this start, so that a refused run can take its directory away again


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
            (directory / ".hydra").mkdir()
            return directory
        except FileExistsError as error:
            if not directory.is_dir():
                raise ConfigError(f"runs_dir={config.runs_dir} is not a directory") from error
            number += 1
        except OSError as error:
            raise ConfigError(f"runs_dir={config.runs_dir} cannot be written: {error.strerror}") from None


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


def unclaim(directory: Path) -> None:
    """Take a directory away again in which only our own configuration files are."""
    ours = {".hydra", "config.yaml", "data.json", METRICS_FILE, "run.log", LOCK_FILE, "summary.json"}
    if {path.name for path in directory.iterdir()} <= ours:
        shutil.rmtree(directory)
        with suppress(OSError):  # runs_dir, if this was the first run in it
            directory.parent.rmdir()


def safe_name(text: str) -> str:
    """`text` as a file name that needs no quoting in a shell or an override."""
    return re.sub(r"[^\w.+-]", "-", text, flags=re.ASCII).lstrip(".-") or "run"


def check_keys(composed: Tree) -> None:
    """Raise ConfigError for a key that is not in the schema and for a missing value; ranges are left to `build`."""
    _refuse_folded(composed, "norm.kind=folded")
    check_known(composed, Config)


def _refuse_folded(tree: Any, what: str) -> None:
    norm = tree.get("norm") if isinstance(tree, dict) else None
    if isinstance(norm, dict) and norm.get("kind") == "folded":
        raise ConfigError(f"{what}: a folded model cannot be trained; resume the run that it was folded from")


def find_start(composed: Tree, overrides: Sequence[str]) -> Start | Saved:
    """Check the configuration, then find the run to go on with or claim a directory; a run that is done comes back."""
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


def _resume(composed: Tree, overrides: Sequence[str]) -> Start | Saved:
    """Go on with the run or checkpoint that `resume` names."""
    resume, run_dir = str(composed["resume"]), composed.get("run_dir")
    directory, checkpoint = Path(resume), None
    if directory.parent.name == "checkpoints":
        directory, checkpoint = directory.parent.parent, directory
    if not (checkpoint or directory).is_dir():
        raise ConfigError(f"resume={resume}: there is no such directory")
    tree = None
    with suppress(ConfigError):  # what is unreadable is reported below
        tree = read_yaml((checkpoint or directory) / "config.yaml")
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
        put(resolved, key, new)
        put(kept, key, new)
    if checkpoint is None:
        from tapernorm.training.checkpoint import latest

        checkpoint = latest(saved.directory)
    notes = [
        f"going on from {checkpoint}" if checkpoint else "no checkpoint yet: starting again from step 0",
        *(f"{key}: {show(old)} -> {show(new)}" for key, old, new in changed),
    ]
    config = resolve(build(resolved))
    if grows:
        notes += _of_the_rate(config)
    return Start(config, kept, saved.directory, checkpoint, notes)


def _of_the_rate(config: Config) -> list[str]:
    """What a longer run should know of its learning rate. Raises ConfigError where that would be 0."""
    optim, steps = config.optim, config.trainer.max_steps
    assert optim.lr is not None and optim.decay_steps is not None
    if optim.decay_steps >= steps:
        return []
    low, remedy = optim.min_lr_ratio * optim.lr, f"optim.decay_steps={steps} lets it fall until the new end"
    told = f"the learning rate is {low:.3g} from step {optim.decay_steps} on; {remedy}"
    if low == 0:
        raise ConfigError(f"trainer.max_steps={steps}: {told}")
    return [told]


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
    if key == "optim.decay_steps":  # of a run that is made longer
        return longer and isinstance(new, int) and isinstance(old, int) and new > old
    return within(key, ADJUSTABLE)


def given_keys(overrides: Sequence[str]) -> list[str] | None:
    """The keys and sections that overrides name; None (all of them) if one, such as experiment=..., reaches further."""
    known = {key for key, _ in all_keys(Config)} | {key.partition(".")[0] for key, _ in all_keys(Config)}
    keys = [override.lstrip("+~").partition("=")[0].partition("@")[0] for override in overrides]
    return keys if all(key in known for key in keys) else None


def put(tree: Tree, key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[last] = value
