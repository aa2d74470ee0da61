"""Checkpoints: a directory that is complete or absent, holds plain data, and stands on its own.

<run>/checkpoints/step-00000300/
    model.safetensors   the model's state, its names free of wrappers' prefixes
    training.pt         optimizer, averages, counters: plain types, loads with weights_only
    config.yaml         the resolved configuration
    tokenizer.*         so that the text can be read and written
    certificate.json    of a folded model, instead of training.pt: how exactly it equals the one it comes from
    meta.json           format version, step, gate, metrics, library versions, a checksum of every file
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tapernorm.config.options import Config
from tapernorm.config.resolve import build, resolve
from tapernorm.config.schema import ConfigError, read_yaml, to_dict, write_yaml
from tapernorm.method.gate import GateSchedule
from tapernorm.model.decoder import Decoder
from tapernorm.runtime.revision import git_revision

if TYPE_CHECKING:
    from tapernorm.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FORMAT = 1
# What readers of meta.json rely on; the rest of it is for people.
FIELDS = {"step": int, "gate": int | float, "tokens": int, "data": str, "files": dict}


def path_at(run_dir: Path, step: int) -> Path:
    """Where a run keeps its checkpoint of a step."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def write(
    final: Path,
    step: int,
    *,
    model: Mapping[str, Tensor],
    training: Mapping[str, Any] | None,
    config: Config,
    tokenizer: Tokenizer,
    meta: Mapping[str, Any],
    reports: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint as the directory `final`, which exists afterwards as a whole or not at all; returns it.

    A folded model has no training state (`training` None). `reports` are further JSON files by name.
    """
    with as_a_whole(final) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in model.items()}, temporary / "model.safetensors")
        if training is not None:
            torch.save(dict(training), temporary / "training.pt")
        for name, report in (reports or {}).items():
            (temporary / name).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        write_yaml(temporary / "config.yaml", to_dict(config))
        tokenizer.save(temporary)
        meta = {
            "format": FORMAT,
            "step": step,
            **meta,
            "git_revision": git_revision(),
            "versions": {name: version(name) for name in ("torch", "safetensors", "tiktoken")},
            "files": {path.name: checksum(path) for path in sorted(temporary.iterdir())},
        }
        (temporary / "meta.json").write_text(json.dumps(meta, indent=1))
    return final


@contextmanager
def as_a_whole(final: Path) -> Iterator[Path]:
    """A new directory under a temporary name, to be filled inside: synced to disk and renamed to `final` at the end."""
    root = final.parent
    temporary = root / f".writing-{final.name}-{os.getpid()}"
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in temporary.iterdir():
            if path.is_file():  # safetensors makes its own readable by nobody else; all get what the umask allows
                path.chmod(temporary.stat().st_mode & 0o666)
            sync(path)
        sync(temporary)
        if final.exists():  # unusable, or the run would have gone on from it
            set_aside(final)
        temporary.rename(final)
    except BaseException as error:
        cause = _of_the_disk(error, temporary)
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk is not to be filled further
        if cause is not None:
            raise OSError(cause.errno, cause.strerror, str(final)) from error
        raise
    sync(root)


def _of_the_disk(error: BaseException, temporary: Path) -> OSError | None:
    """The OSError that made a write fail; None if it was something else.

    torch and safetensors tell a full disk by errors of their own, so writing once more, while what they wrote still
    fills it, finds out.
    """
    if isinstance(error, Exception) and not isinstance(error, OSError):
        try:
            (temporary / "probe").write_bytes(bytes(1 << 20))
        except OSError as cause:
            error = cause
    return error if isinstance(error, OSError) and error.errno else None


def retain(run_dir: Path, keep_last: int, best_step: int | None) -> None:
    """Delete all but the newest `keep_last` checkpoints and the one at `best_step`."""
    for path in list_checkpoints(run_dir)[:-keep_last]:
        if step_of(path) != best_step:
            delete(path)


def delete(path: Path) -> None:
    """Remove a checkpoint; renamed first, so that a kill in the midst leaves nothing that looks like a damaged one."""
    doomed = path.with_name(f".deleting-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    with suppress(OSError):  # it has gone already, or may not be touched: no reason to stop a run
        path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def expected_size(model: torch.nn.Module) -> int:
    """Bytes of one checkpoint, about: the weights, and AdamW's two moments of each of them in the same type."""
    return 3 * sum(parameter.nbytes for parameter in model.parameters())


def clear_after(run_dir: Path, step: int) -> None:
    """Before a run goes on from `step`: delete its later checkpoints, which are about to be made again.

    Damaged ones are set aside instead, for whoever wants to look at them. What killed processes left behind goes too.
    """
    for pattern in (".writing-*", ".deleting-*"):
        for leftover in (run_dir / "checkpoints").glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)
    for path in list_checkpoints(run_dir):
        if step_of(path) > step:
            if fault(path):
                set_aside(path)
            else:
                delete(path)


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint so that nothing looks at it again."""
    aside = path.with_name(f"{path.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The run's checkpoint directories, oldest first, valid or not."""
    return sorted(path for path in (run_dir / "checkpoints").glob("step-*") if path.name[5:].isdigit())


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def fault(path: Path) -> str | None:
    """What is wrong with a checkpoint directory, None if it is complete and undamaged.

    Raises ConfigError for one of a newer format, and PermissionError for one that may not be read: these are not to be
    taken for damaged ones.
    """
    try:
        meta = read_meta(path)
    except (ConfigError, PermissionError):
        raise
    except (OSError, ValueError, KeyError, TypeError):
        return "meta.json is missing or unreadable"
    for key, kind in FIELDS.items():
        if not isinstance(meta.get(key), kind):
            return f"meta.json has no usable '{key}'"
    for name in ("config.yaml", "model.safetensors"):
        if name not in meta["files"]:
            return f"meta.json has no checksum of {name}"
    for name, expected in meta["files"].items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if checksum(path / name) != expected:
            return f"{name} is damaged (its checksum differs)"
    return None


def latest(run_dir: Path) -> Path | None:
    """The newest valid checkpoint of a run, None if there never was one; damaged ones are named and passed over.

    Raises ConfigError where all are damaged: to begin again would overwrite what may be mended.
    """
    problem, found = None, list_checkpoints(run_dir)
    for path in reversed(found):
        if (problem := fault(path)) is None:
            return path
        if path != found[0]:
            log.warning(f"checkpoint {path}: {problem}; using the one before")
    if problem:
        raise ConfigError(f"checkpoint {found[0]}: {problem}, and no other is left; mend it, or name another run_dir")
    return None


def find(path: Path) -> Path:
    """The checkpoint meant by a run or checkpoint directory. Raises ConfigError, one line, if there is none."""
    if not path.is_dir():
        a_file = "a file, not a directory; name the run or checkpoint that it lies in"
        raise ConfigError(f"checkpoint {path}: {a_file if path.exists() else 'no such directory'}")
    if (path / "meta.json").is_file() or path.name.startswith("step-"):
        if problem := fault(path):
            raise ConfigError(f"checkpoint {path}: {problem}; choose another one in {path.parent}")
        return path
    if found := latest(path):
        return found
    raise ConfigError(f"checkpoint {path}: neither a checkpoint nor a run with a valid one in checkpoints/")


def find_all(path: Path) -> list[Path]:
    """The checkpoints meant by a directory of a run, of a checkpoint or of many of them, or by a pattern; each once.

    A sweep's directory, like any that is neither run nor checkpoint but holds such, means all it holds, in the order
    of their names. What a directory or pattern holds beyond valid checkpoints is named and left out. Raises
    ConfigError, one line, if none is left.
    """
    members = _members(path)
    if members is None:
        return [find(path)]
    usable: dict[Path, None] = {}
    for member in members:
        try:
            usable[find(member)] = None
        except ConfigError as problem:
            log.info(f"left out: {problem}")
    if not usable:
        raise ConfigError(f"checkpoint {path}: no run or checkpoint that can be evaluated")
    return list(usable)


def _members(path: Path) -> list[Path] | None:
    """The directories that a pattern or a directory of runs or checkpoints means; None if `path` is one itself."""
    if not path.exists() and glob.has_magic(str(path)):
        matches = sorted(Path(name) for name in glob.glob(str(path)) if Path(name).is_dir())  # noqa: PTH207
        return [member for match in matches for member in _members(match) or [match]]
    if _is_one(path) or not path.is_dir():
        return None
    children = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    return children if any(map(_is_one, children)) else None


def _is_one(path: Path) -> bool:
    """Whether this is the directory of a run or of a checkpoint, valid or not."""
    return path.name.startswith("step-") or (path / "checkpoints").is_dir() or (path / "meta.json").is_file()


def run_directory(path: Path) -> Path:
    """The run that a checkpoint belongs to; one that stands alone is its own."""
    return path.parent.parent if path.parent.name == "checkpoints" else path


def read_meta(path: Path) -> dict[str, Any]:
    """meta.json of a checkpoint. Raises ConfigError if a newer version of the format wrote it."""
    meta = json.loads((path / "meta.json").read_text())
    if meta["format"] > FORMAT:
        raise ConfigError(f"checkpoint {path}: format {meta['format']} is newer than {FORMAT}; update tapernorm")
    return meta


def read_config(path: Path) -> Config:
    """The resolved configuration in a run's or checkpoint's directory."""
    return build(read_yaml(path / "config.yaml"))


def read_training(path: Path) -> dict[str, Any]:
    """Optimizer state, averages and counters; never executes code. Raises ConfigError for a folded checkpoint."""
    if not (path / "training.pt").is_file():
        raise ConfigError(f"checkpoint {path}: it is folded and has no training state; resume the run it comes from")
    try:
        return torch.load(path / "training.pt", map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason, *_ = str(error).splitlines() or [""]
        where = f"checkpoint {path}: training.pt"
        raise ConfigError(f"{where} is not what was saved, so it is not opened: {reason}") from None


def read_weights(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path / "model.safetensors")
    except SafetensorError as error:
        raise ConfigError(f"checkpoint {path}: model.safetensors cannot be read ({error})") from None


def check_shapes(config: Config, path: Path) -> None:
    """Raise ConfigError if config.yaml tells of other tensors than the file's header, before any memory is taken."""
    try:
        with safe_open(path / "model.safetensors", "pt") as file:
            there = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"checkpoint {path}: model.safetensors cannot be read ({error})") from None
    with torch.device("meta"):
        here = {name: tuple(value.shape) for name, value in Decoder(config.model, config.norm).state_dict().items()}
    odd = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    if odd:
        raise ConfigError(
            f"checkpoint {path}: model.safetensors is not of the model in config.yaml: size mismatch for {odd[0]}"
        )


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Fill the model with a checkpoint's weights. Raises ConfigError if these are of another model."""
    try:
        model.load_state_dict(read_weights(path), strict=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        where = f"checkpoint {path}: model.safetensors"
        raise ConfigError(f"{where} is not of the model in config.yaml: {reason}") from None


def load_model(path: Path, device: torch.device | str = "cpu") -> tuple[Decoder, Config, Tokenizer]:
    """The model of a checkpoint directory with the gate of its step, its configuration and tokenizer."""
    from tapernorm.data.tokenizer import Tokenizer  # here, because a training step needs none

    meta, config = read_meta(path), resolve(read_config(path))
    check_shapes(config, path)
    model = Decoder(config.model, config.norm)
    load_weights(model, path)
    schedule = GateSchedule.from_config(config)
    model.set_gate(schedule.value(meta["step"]), schedule.phase(meta["step"]))
    return model.to(device), config, Tokenizer.load(path)


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def sync(path: Path) -> None:
    """Force a file's or directory's content to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
