"""What every configuration here is made of: fields with a meaning, one check, one line per fault.

A configuration is a frozen dataclass of pydantic's; config.py and commands.py hold them. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

SCHEMA = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # what torch takes, with room for what is added
DEVICE_PATTERN = r"^(auto|cpu|mps|cuda(:\d+)?)$"
Schema = TypeVar("Schema")
Share = Annotated[float, Field(gt=0, lt=1)]


class ConfigError(ValueError):
    """A configuration that cannot run. The message is one line that names the key and what to do."""


def meaning(text: str, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field with its one-line meaning (shown by `--help`) and, optionally, a default."""
    if default is dataclasses.MISSING:
        return Field(description=text)
    return Field(default=default, description=text)


def validate(tree: Mapping[str, Any], schema: type[Schema]) -> Schema:
    """Check a plain nested mapping against a configuration dataclass and return its frozen instance.

    Raises ConfigError, one line: unknown keys with the nearest valid one, wrong types and ranges, missing values
    (`???`), and 'None' where null was meant. Every fault is reported, joined by '; '.
    """
    faults = [fault for key, value in leaves(tree) if (fault := _string_fault(key, value))]
    if faults:
        raise ConfigError("; ".join(faults))
    try:
        # JSON is the strict mode that still takes lists for tuples and mappings for dataclasses.
        return TypeAdapter(schema).validate_json(json.dumps(tree))
    except (TypeError, ValueError) as error:
        if not isinstance(error, ValidationError):
            raise ConfigError(f"the configuration holds a value that is no plain data: {error}") from None
        # Of a list whose items are wrong, pydantic says that it is too short as well.
        wrong = {item["loc"][:-1] for item in error.errors()}
        told = [item for item in error.errors() if item["type"] != "too_short" or item["loc"] not in wrong]
        lines = [_explain(item, tree, schema) for item in told]
        raise ConfigError("; ".join(dict.fromkeys(lines))) from None


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


def write_text(path: Path, text: str) -> None:
    """Atomically: a kill or a full disk leaves the file that was there before, or none, but never half of one."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ('optim.lr', value) for every leaf of a nested mapping; lists count as leaves."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _string_fault(key: str, value: Any) -> str | None:
    if value == "???":
        return f"{key} is missing: give it a value, as in {key}=..."
    if value in ("None", "NULL"):
        return f"{key}='{value}' is a string; write {key}=null"
    return None


def _explain(item: Any, tree: Mapping[str, Any], schema: type) -> str:
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
    match item["type"]:
        case "unexpected_keyword_argument":
            section = ".".join(keys[:-1])
            valid = [name for name, _ in fields_of(schema, section, tree)]
            return unknown_key(key, [f"{section}.{name}" if section else name for name in valid])
        case "missing":
            full = ".".join([*keys, path[-1]])
            return f"{full} is missing: give it a value, as in {full}=..."
        case "union_tag_not_found":
            return f"{key}.kind is missing: choose a {key} group, as in {key}=<name>"
        case "union_tag_invalid":
            return f"{key}.kind={node.get('kind')!r}: choose one of {item['ctx']['expected_tags']}"
        case "too_short" | "too_long":
            return f"{key}={node!r}: should have {item['ctx'].get('min_length') or item['ctx']['max_length']} items"
        case "tuple_type":
            return f"{key}={node!r}: should be a list, as in {key}=[{node}]"
        case "string_pattern_mismatch":
            section = ".".join(keys[:-1])
            choices = dict(fields_of(schema, section, tree))[keys[-1]]
            return f"{key}={node!r}: should be one of {choices}"
    shown = "null" if node is None else repr(node)
    return f"{key}={shown}: {item['msg'][0].lower()}{item['msg'][1:]}"


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


def unknown_key(key: str, valid: list[str]) -> str:
    """'unknown key ...' with the nearest of the valid keys, or with the keys that its section has."""
    section, _, last = key.rpartition(".")
    same_section = [name for name in valid if name.rpartition(".")[0] == section]
    by_last = {alias: name for alias, name in ALIASES.items() if name in valid}
    by_last.update({name.rpartition(".")[2]: name for name in [*valid, *same_section]})  # the same section wins
    near = difflib.get_close_matches(last, by_last, n=1, cutoff=0.6)
    if near:
        return f"unknown key '{key}'; did you mean '{by_last[near[0]]}'?"
    listed = ", ".join(name.rpartition(".")[2] for name in same_section)
    return f"unknown key '{key}'; " + (f"{section or 'the top level'} has {listed}" if listed else "see --help")


def fields_of(schema: type, section: str = "", tree: Mapping[str, Any] | None = None) -> list[tuple[str, str]]:
    """(field, meaning) of a section such as 'optim' ('' for the root); a union is decided by the tree's `kind`."""
    return [(name, text) for name, text, _ in _fields(class_of(schema, section, tree))]


def all_keys(schema: type, prefix: str = "") -> list[tuple[str, str]]:
    """(dotted key, meaning) of every leaf of the schema, all variants of the unions included."""
    found: dict[str, str] = {}
    for name, text, kinds in _fields(schema):
        for kind in kinds:
            found.update(all_keys(kind, f"{prefix}{name}."))
        if not kinds:
            found[f"{prefix}{name}"] = text
    return list(found.items())


def class_of(schema: type, section: str, tree: Mapping[str, Any] | None = None) -> type:
    """The dataclass of a section such as 'optim' or 'dataset.source'; a union is decided by the tree's `kind`."""
    hint: Any = schema
    node: Any = tree
    for part in filter(None, section.split(".")):
        of_names = [typing.get_args(kind)[1] for kind in _members(hint) if typing.get_origin(kind) is dict]
        hint = of_names[0] if of_names else typing.get_type_hints(_of_kind(hint, node))[part]
        node = node.get(part) if isinstance(node, Mapping) else None
    return _of_kind(hint, node)


def _of_kind(hint: Any, node: Any) -> type:
    """The dataclass of a hint that `kind` in the node means; the hint's first one if it means none."""
    wanted = node.get("kind") if isinstance(node, Mapping) else None
    kinds = _dataclasses(hint)
    return next((kind for kind in kinds if wanted in _tags(kind)), kinds[0])


def _fields(cls: Any) -> list[tuple[str, str, list[type]]]:
    """(field, meaning, dataclasses that it may hold) of a dataclass."""
    hints = typing.get_type_hints(cls)
    return [(name, info.description or "", _dataclasses(hints[name])) for name, info in cls.__pydantic_fields__.items()]


def _dataclasses(hint: Any) -> list[type]:
    return [kind for kind in _members(hint) if hasattr(kind, "__dataclass_fields__")]


def _members(hint: Any) -> list[Any]:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return list(typing.get_args(hint))
    return [hint]


def _tags(cls: Any) -> tuple[str, ...]:
    """The values of `kind` that mean this dataclass."""
    field = cls.__pydantic_fields__.get("kind")
    return typing.get_args(field.annotation) if field else ()
