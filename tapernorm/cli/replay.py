"""Configurations from elsewhere (--config-path): a run directory from somebody else is only data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

import yaml

# Private, and here alone: only Hydra's own parser tells what Hydra will read, abbreviated options included.
# tests/test_security.py fails if it moves, or if a file that is read is not one that was checked.
from hydra._internal.utils import get_args_parser

from tapernorm.cli.errors import CONFIGS
from tapernorm.config.schema import ConfigError


def check_replayed(argv: list[str]) -> None:
    """Refuse a configuration from elsewhere (--config-path) that could do more than set this program's keys.

    Hydra imports and calls what `hydra.callbacks`, `hydra.launcher` or logging settings name, sets the environment by
    `hydra.job.env_set`, and interpolations such as ${oc.env:...} copy what is secret into a run's files. A saved
    .hydra/config.yaml holds none of these and no defaults list. The command line and --config-dir are the user's own.
    Raises ConfigError, one line, before Hydra reads anything.
    """
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]  # which prints its usage otherwise
    given = parser.parse_args(argv[1:])
    if given.experimental_rerun is not None:
        raise ConfigError("--experimental-rerun opens a pickle, which can execute code; use --config-path RUN/.hydra")
    directory = CONFIGS
    if given.config_path is not None:  # from here, or as Hydra has it from the program's folder
        beside = Path(argv[0]).parent.resolve() / given.config_path
        directory = here if (here := Path(given.config_path).absolute()).is_dir() else beside
        argv.append(f"--config-path={directory}")  # the last one counts: what is checked is what Hydra reads
    if not directory.is_dir():  # Hydra would also look into packages, and import them
        raise ConfigError(f"--config-path {given.config_path}: no such directory ({directory})")
    name = given.config_name
    files = [directory / f"{name.removesuffix('.yaml')}.yaml"] if name else sorted(directory.glob("*.yaml"))
    if directory.resolve() == CONFIGS and all(file.resolve().is_relative_to(CONFIGS) for file in files):
        return
    groups = {"hydra"} | {re.split("[@=]", override.lstrip("+~"))[0].strip("/") for override in given.overrides}
    if found := sorted(name for name in groups if name and (directory / name).is_dir()):
        raise ConfigError(f"{directory / found[0]}: a configuration that is replayed has no groups; see --config-dir")
    for file in files:
        _check_saved(file)
    ours = {"train.yaml", "config.yaml"} & {file.name for file in files}
    if name is None and Path(argv[0]).stem == "train" and ours == {"config.yaml"}:
        raise ConfigError(f"--config-path {given.config_path}: add --config-name config, which is the file in it")


def _refuse(message: str) -> NoReturn:
    key = re.search(r"--?([\w.]+=\S*)", message)
    raise ConfigError(
        f"{message}; write {key[1]}, without dashes" if key else f"{message}; see --help and --hydra-help"
    )


def _check_saved(file: Path) -> None:
    try:
        text = file.read_text(encoding="utf-8")
        tree = yaml.safe_load(text)
    except FileNotFoundError:
        return  # Hydra has the words for it
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
    for what in ("hydra", "defaults"):
        if isinstance(tree, dict) and what in tree:
            raise ConfigError(f"{file} has a section '{what}', which can start programs; a saved one has none")
    # Keys and values as they are read, the doubled ones too: in the text an escape such as \x24 would hide a '$'.
    scalars = [token.value for token in yaml.scan(text) if isinstance(token, yaml.ScalarToken)]
    for what in ("@package", "${"):
        if any(what in string for string in (text, *scalars)):
            raise ConfigError(f"{file} contains '{what}', which a saved configuration does not; take it out")
