"""Which keys are files and directories, and where these lie."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

DATASET = r"(dataset|suite\.[^.]+)(\.source|\.reference)?"  # where the configuration of one may stand
PATHS = rf"{DATASET}\.(train|valid)|tokenizer\.ranks|runs_dir|run_dir|cache_dir|resume|save_folded|out"
PATHS_OR_HUB_IDS = rf"{DATASET}\.path|model\.init"
CHECKPOINTS = r"checkpoint|baseline"
WORDS = {"model.init": "random", "resume": "auto"}


def absolute_paths(tree: dict[str, Any], launch_dir: Path, prefix: str = "") -> dict[str, Any]:
    """Input and output paths relative to the directory of the launch, whatever directory Hydra changes to."""
    return {
        name: absolute_paths(value, launch_dir, f"{prefix}{name}.")
        if isinstance(value, dict)
        else _absolute(f"{prefix}{name}", value, launch_dir)
        for name, value in tree.items()
    }


def _absolute(key: str, value: Any, launch_dir: Path) -> Any:
    if isinstance(value, list):
        return [_absolute(key, item, launch_dir) for item in value]
    if not isinstance(value, str) or value in ("", "???", "None", "NULL", WORDS.get(key)):
        return value
    path = launch_dir / Path(value).expanduser()
    is_path = (
        re.fullmatch(PATHS, key)
        or (re.fullmatch(PATHS_OR_HUB_IDS, key) and path.exists())
        or (re.fullmatch(CHECKPOINTS, key) and not _is_hub_id(value, launch_dir))
    )
    return os.path.abspath(path) if is_path else value  # noqa: PTH100  (resolve() follows links)


def _is_hub_id(value: str, launch_dir: Path) -> bool:
    """Whether an 'owner/name' is meant for the hub: there is no such directory here, nor one of the owner's name."""
    owner, slash, name = value.partition("/")
    named = slash and all(re.fullmatch(r"[\w-][\w.-]*", part, flags=re.ASCII) for part in (owner, name))
    return bool(named) and not (launch_dir / owner).exists()
