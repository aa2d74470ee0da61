"""Errors of the command line, of configurations and of runs, told in one line."""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from tapernorm.config.options import Config
from tapernorm.config.schema import ConfigError, wrong_key
from tapernorm.runtime import dist, typed
from tapernorm.runtime.typed import word_of_shell

COMPOSITION_ERRORS = (ConfigError, HydraException, OmegaConfBaseException)
PACKAGE = Path(__file__).resolve().parents[1]
# Beside the package in a checkout, inside it where it is installed.
CONFIGS = next(filter(Path.is_dir, (PACKAGE.parent / "configs" / "norm", PACKAGE / "configs" / "norm"))).parent
EXTRAS = {"joblib": "joblib", "submitit_local": "slurm", "submitit_slurm": "slurm"}  # of pyproject.toml, by launcher
DISK_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
WANTS_TRACEBACKS = os.environ.get("HYDRA_FULL_ERROR") == "1"


@contextmanager
def in_one_line(schema: type = Config) -> Iterator[None]:
    """End the program with one line and status 2 on an error of composition or configuration raised inside, or a file
    that may not be read or written.

    Other exceptions pass, and all of them with HYDRA_FULL_ERROR=1. `schema`: see `explain`.
    """
    try:
        yield
    except Exception as error:
        told = isinstance(error, COMPOSITION_ERRORS) or _raised_by_hydra(error) or _not_allowed(error)
        if WANTS_TRACEBACKS or not told:
            raise
        stop(explain(error, schema))


def _raised_by_hydra(error: Exception) -> bool:
    """Hydra refuses some command lines with a plain ValueError."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError) and Path(frames[-1].filename).is_relative_to(Path(hydra.__file__).parent)


def _not_allowed(error: Exception) -> bool:
    """A file of somebody else, a read-only file system."""
    if not isinstance(error, OSError) or error.filename is None:
        return False
    return error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)


def stop(text: str, status: int = 2) -> NoReturn:
    """End the program with one line on stderr. 2: nothing ran; 1: a run failed. One of several processes says it."""
    if dist.blame(text, after_you=True)[1]:
        print("error: " + " ".join(text.split()), file=sys.stderr, flush=True)
    raise SystemExit(status)


def in_words(error: BaseException) -> str:
    """One line for an error; the type is named unless the text was written to be read alone."""
    text = " ".join(str(error).split())
    if isinstance(error, ConfigError):
        return text
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        return f"{text}; make room, then go on from the last checkpoint" if error.errno in DISK_FULL else text
    return f"{type(error).__name__}: {text}"


def explain(error: Exception, schema: type = Config) -> str:
    """One line for an error of composition: the key or choice at fault and the nearest valid one.

    `schema` is the dataclass whose keys are valid.
    """
    text = str(error)
    if isinstance(error, ConfigError):
        return text
    if _not_allowed(error):
        return in_words(error)
    if isinstance(error, MissingConfigException) and error.options:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        return _unknown_choice(group, choice, error.options)
    if found := re.match(r"Could not override '([^']+)'", text):
        return wrong_key(found[1], schema)
    if found := re.match(r"(?s)Ambiguous value for argument '([^=]+)=(.+?)'", text):
        key, value = found.groups()
        sweep = "add --multirun for a sweep, " if schema is Config else ""
        quoted = word_of_shell(f"{key}={typed.quoted(value)}")
        return f"{key}={value} lists several values; {sweep}write {key}=[{value}] for a list, or {quoted} for a text"
    if isinstance(error, OverrideParseException):
        key, is_, value = str(error.override).partition("=")
        hint = (
            word_of_shell(f"{key}={typed.quoted(value)}") if is_ and re.fullmatch(r"[\w.+~/@]+", key) else "key=value"
        )
        return f"cannot read '{error.override}'; write {hint}"
    if "Config group override must be a string" in text:
        empty = [word for word in sys.argv if re.fullmatch(r"[\w/]+=(null|true|false|[\d.]+)", word)]
        groups = [word for word in empty if (CONFIGS / word.partition("=")[0]).is_dir()]
        for word in groups[:1]:
            group = word.partition("=")[0]
            return f"{word}: {group} has {', '.join(choices(CONFIGS / group))}"
    if error.__cause__ is not None and str(error.__cause__) not in text:
        text = f"{text}: {error.__cause__}"
    text = re.sub(r"See https?://\S+ for details\.?", "", text)
    text = re.sub(r"\n\s*(full_key|object_type|reference_type): ?.*", "", text)
    return " ".join(text.replace("^", " ").split()) or type(error).__name__


def choices(group: Path) -> list[str]:
    """The choices of a group of configs/, those in folders of it as 'folder/name'."""
    return sorted(path.relative_to(group).with_suffix("").as_posix() for path in group.rglob("*.yaml"))


def _unknown_choice(group: str, choice: str, options: Iterable[str]) -> str:
    group, *folders = group.split("/") if (CONFIGS / group.partition("/")[0]).is_dir() else [group]
    choice = "/".join([*folders, choice])
    names = sorted({*([] if folders else options), *choices(CONFIGS / group)})
    near = difflib.get_close_matches(choice, names, n=1)
    hint = f"did you mean {group}={near[0]}? " if near else ""
    if group == "hydra/launcher" and choice in EXTRAS:
        hint = f"it is an extra: pip install -c constraints.txt -e '.[{EXTRAS[choice]}]'; "
    return f"unknown choice {group}={choice}; {hint}{group} has {', '.join(names)}"
