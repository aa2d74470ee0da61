"""What every configuration here is made of: fields with a meaning, one check, one line per fault.

A configuration is a frozen dataclass of pydantic's: see options.py and programs.py.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import json
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

SCHEMA = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # what torch takes, with room for what is added
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(gt=0, lt=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")]
DEVICES = "auto, cpu, cuda, cuda:1, mps"
Schema = TypeVar("Schema")


class ConfigError(ValueError):
    """A configuration that cannot run. The message is one line that names the key and what to do."""


def meaning(text: str, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field with its one-line meaning (shown by `--help`) and, optionally, a default."""
    return dataclasses.field(default=default, metadata={"meaning": text})


def validate(tree: Mapping[str, Any], schema: type[Schema]) -> Schema:
    """Check a plain nested mapping against a configuration dataclass and return its frozen instance.

    Raises ConfigError, one line: what `check_known` refuses, 'None' for null, else every wrong type and range.
    """
    check_known(tree, schema)
    words = [(key, value) for key, value in leaves(tree) if value in ("None", "NULL")]
    meant = copy.deepcopy(dict(tree))
    for *sections, last in (key.split(".") for key, _ in words):
        functools.reduce(lambda node, name: node[name], sections, meant)[last] = None
    try:
        # JSON is the strict mode that still takes lists for tuples and mappings for dataclasses.
        found = TypeAdapter(schema).validate_json(json.dumps(meant))
    except ValidationError as error:
        # Of a list whose items are wrong, pydantic says that it is too short as well.
        wrong = {item["loc"][:-1] for item in error.errors()}
        told = [item for item in error.errors() if item["type"] != "too_short" or item["loc"] not in wrong]
        raise ConfigError("; ".join(dict.fromkeys(_explain(item, meant) for item in told))) from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the configuration holds a value that is no plain data: {error}") from None
    if words:
        raise ConfigError("; ".join(f"{key}='{value}' is a string; write {key}=null" for key, value in words))
    return found


def check_known(tree: Mapping[str, Any], schema: type) -> None:
    """Raise ConfigError, one line, for keys that the schema lacks, with the nearest valid one, and missing values."""
    known, faults = dict(all_keys(schema, tree=tree)), []
    for key, value in leaves(tree):
        is_section = any(name.startswith(f"{key}.") for name in known)
        if value == "???":
            faults.append(_missing(key))
        elif is_section and value is not None:
            only_keys = f"override its keys one by one, as in {key}.name=..."
            faults.append(f"{key}={value}: a configuration that is replayed has no groups to choose from; {only_keys}")
        elif key not in known and not is_section:
            faults.append(unknown_key(key, list(known)))
    if faults:
        raise ConfigError("; ".join(dict.fromkeys(faults)))


def _missing(key: str) -> str:
    return f"{key} is missing: give it a value, as in {key}=..."


def to_dict(config: Any) -> dict[str, Any]:
    """A plain nested dict (lists, numbers, strings) of a configuration dataclass; `build` reads it back."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def write_yaml(path: Path, data: Any) -> None:
    """Plain data as YAML, keys in their order; the directory is made if it is missing."""
    path.parent.mkdir(exist_ok=True)
    write_text(path, yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


def read_yaml(path: Path) -> dict[str, Any]:
    """A mapping from a YAML file, plain data. Raises ConfigError, one line, if the file holds none."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: it holds no configuration")
    return tree


def write_text(path: Path, text: str | bytes) -> None:
    """Atomically: a kill or a full disk leaves the file that was there before, or none, but never half of one.

    No link is followed, as a directory from somebody else may hold: a new file takes the place of what has the name.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            file.write(text if isinstance(text, bytes) else text.encode())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def no_link(path: str, flags: int) -> int:
    """An `opener` for files that are appended to, which a link in a foreign directory must not lead astray."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ('optim.lr', value) for every leaf of a nested mapping; lists count as leaves."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _explain(item: Any, tree: Mapping[str, Any]) -> str:
    """One pydantic error as 'key=value: what is wrong'."""
    path = [str(part) for part in item["loc"]]
    node: Any = tree
    keys = []
    for part in path:  # pydantic adds the tags of unions to the path; the tree does not have them
        if isinstance(node, Mapping) and part in node:
            keys.append(part)
            node = node[part]
        elif isinstance(node, list) and part.isdigit():
            keys[-1] += f"[{part}]"
            node = node[int(part)]
    key = ".".join(keys)
    message = item["msg"][0].lower() + item["msg"][1:]
    match item["type"]:
        case "missing":
            return _missing(".".join([*keys, path[-1]]))
        case "union_tag_not_found":
            return f"{key}.kind is missing: choose a {key} group, as in {key}=<name>"
        case "union_tag_invalid":
            return f"{key}.kind={node.get('kind')!r}: choose one of {item['ctx']['expected_tags']}"
        case "too_short" | "too_long":
            message = f"should have {item['ctx'].get('min_length') or item['ctx']['max_length']} items"
        case "tuple_type":
            message = f"should be a list, as in {key}=[{node}]"
        case "string_pattern_mismatch":  # the only one with a pattern is `Device`
            message = f"should be one of {DEVICES}"
    return f"{key}={'null' if node is None else repr(node)}: {message}"


# What other projects call the keys of training.
ALIASES = {
    "learning_rate": "optim.lr",
    "n_embd": "model.d_model",
    "hidden_size": "model.d_model",
    "n_layers": "model.n_layer",
    "block_size": "model.n_ctx",
    "max_iters": "trainer.max_steps",
    "epochs": "trainer.max_steps",
}


def unknown_key(key: str, valid: Sequence[str]) -> str:
    """'unknown key ...' with the nearest of the valid keys, or with the keys that its section has."""
    section, _, last = key.rpartition(".")
    if section and not any(name.startswith(f"{section}.") for name in valid):
        return unknown_key(section, valid)
    names = [*dict.fromkeys(name.partition(".")[0] for name in valid), *valid]
    same_section = [name for name in dict.fromkeys(names) if name.rpartition(".")[0] == section]
    by_last = {alias: name for alias, name in ALIASES.items() if name in valid}
    by_last.update({name.rpartition(".")[2]: name for name in [*names, *same_section]})  # the same section wins
    near = difflib.get_close_matches(last, by_last, n=1, cutoff=0.6)
    listed = ", ".join(name.rpartition(".")[2] for name in same_section)
    hint = f"did you mean '{by_last[near[0]]}'?" if near else f"{section or 'the top level'} has {listed}"
    return f"unknown key '{key}'; {hint}"


def wrong_key(key: str, schema: type) -> str:
    """Why a composed tree lacks a key: nobody knows it, or the kind of norm or data set that was chosen has others."""
    valid = [name for name, _ in all_keys(schema)]
    section, _, name = key.partition(".")
    if suite := re.match(r"suite\.[^.]+", key):  # its data sets have the keys of `dataset`
        valid += [suite[0] + other.removeprefix("dataset") for other in valid if other.startswith("dataset.")]
    if key not in valid:
        return unknown_key(key, valid)
    if suite:
        return f"the chosen suite has no key '{key}'; --cfg job shows those that it has"
    kinds = [defaults(cls) for cls in _dataclasses(_types(schema)[section])]
    having = ", ".join(values["kind"] for values in kinds if name.partition(".")[0] in values)
    return f"the chosen {section} has no key '{key}'; the kinds {having} have it"


def fields_of(schema: type) -> list[tuple[str, str]]:
    """(field, meaning) of the top level."""
    return [(field.name, field.metadata.get("meaning", "")) for field in dataclasses.fields(schema)]


def all_keys(schema: type, prefix: str = "", tree: Any = None) -> list[tuple[str, str]]:
    """(dotted key, meaning) of every leaf of the schema; of norms and data sets the kind in `tree`, else all kinds."""
    found: dict[str, str] = {}
    for name, text in fields_of(schema):
        node = tree.get(name) if isinstance(tree, Mapping) else None
        sections = list(_sections(f"{prefix}{name}", _types(schema)[name], node))
        for key, cls, inner in sections:
            found.update(all_keys(cls, f"{key}.", inner))
        if not sections:
            found[f"{prefix}{name}"] = text
    return list(found.items())


def defaults(schema: type) -> dict[str, Any]:
    """The default of every field, as plain data; '???' for one that must be given."""
    values = {field.name: field.default for field in dataclasses.fields(schema)}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {name: "???" if value is dataclasses.MISSING else value for name, value in plain.items()}


def _sections(key: str, hint: Any, node: Any) -> Iterator[tuple[str, type, Any]]:
    """(key, dataclass, node) of the sections that a field may hold: of the node's `kind`, else of all."""
    tree = node if isinstance(node, Mapping) else {}
    for member in _members(hint):
        if typing.get_origin(member) is dict:
            for name, inner in tree.items():
                yield from _sections(f"{key}.{name}", typing.get_args(member)[1], inner)
    kinds = _dataclasses(hint)
    chosen = [cls for cls in kinds if tree.get("kind") in typing.get_args(_types(cls).get("kind"))]
    for cls in chosen or kinds:
        yield key, cls, tree


@cache
def _types(schema: type) -> dict[str, Any]:
    """Type by name of a dataclass's fields."""
    hints = typing.get_type_hints(schema)
    return {field.name: hints[field.name] for field in dataclasses.fields(schema)}


def _dataclasses(hint: Any) -> list[type]:
    return [kind for kind in _members(hint) if isinstance(kind, type) and dataclasses.is_dataclass(kind)]


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
