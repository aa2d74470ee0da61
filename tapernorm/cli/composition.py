"""What Hydra composes: the schema's defaults, this project's settings of Hydra itself, and the page of --help.

Hydra composes, our code owns directories: Hydra is told to write nothing, and every check comes before the first
directory.
"""

from __future__ import annotations

import json
import typing
from typing import Any

from hydra.conf import HydraConf, RunDir, SweepDir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from tapernorm.cli.errors import CONFIGS, choices
from tapernorm.config.options import Config, DatasetConfig, NormConfig
from tapernorm.config.programs import BenchmarkConfig, EvaluateConfig, ExportConfig, GenerateConfig
from tapernorm.config.schema import all_keys, defaults, fields_of, leaves, to_dict

HELP_KEYS = (
    "model.n_layer", "model.d_model", "model.n_ctx", "norm.sites", "anchor.weight", "gate.k_taper_share",
    "dataset.train", "optim.lr", "trainer.max_steps", "trainer.batch_size", "trainer.device", "tracking.wandb",
    "report", "seed", "runs_dir", "run_dir", "resume", "sweep.name", "sweep.fail_fast", "sweep.dry_run",
)  # fmt: skip


def register() -> None:
    """Give Hydra the schema's defaults, and this project's settings of Hydra itself.

    The defaults stay in the dataclasses: `schema` is the tree of all of them, on which the YAML groups are laid, so
    that each key can be overridden without a '+'. Norms and data sets differ in their keys by kind, so these two come
    as `schema/norm/<kind>` and `schema/dataset/<kind>`, one of which each YAML starts from.
    """
    store = ConfigStore.instance()
    tree = to_dict(Config())
    for section, variants in {"norm": NormConfig, "dataset": DatasetConfig}.items():
        tree[section] = {}
        for cls in typing.get_args(variants):
            node = defaults(cls)
            store.store(group=f"schema/{section}", name=node["kind"], node=node)
    store.store(name="schema", node=tree)
    for name, program in {"evaluate": EvaluateConfig, "generate": GenerateConfig, "export_hf": ExportConfig}.items():
        store.store(name=f"schema_{name}", node=defaults(program))
    store.store(name="schema_benchmark", node=to_dict(BenchmarkConfig()))
    store.store(group="hydra", name="config", node=_hydra_settings())


def _hydra_settings() -> HydraConf:
    """Hydra makes no directory and no log of its own; a sweep's directory holds its multirun.yaml and our jobs."""
    groups = {"job_logging": "none", "hydra_logging": "none"}
    settings = HydraConf(
        run=RunDir(dir="."),
        sweep=SweepDir(dir="${runs_dir}/sweeps/${sweep.name}", subdir="."),
        output_subdir=None,
        callbacks={"sweep": {"_target_": "tapernorm.cli.sweep.CheckJobs"}},
    )
    settings.defaults = [{name: groups.get(name, choice) for name, choice in row.items()} for row in settings.defaults]
    return settings


def plain(tree: DictConfig) -> dict[str, Any]:
    """The composed tree as plain data, interpolations resolved; '???' stays, for `build` to name."""
    return typing.cast(dict[str, Any], OmegaConf.to_container(tree, resolve=True))


def help_text(description: str, schema: type) -> str:
    """The page of --help: description, groups with their choices, keys with default and meaning."""
    training, fields = schema is Config, dict(fields_of(schema))
    meanings = dict(all_keys(schema)) | fields
    values = dict(leaves(to_dict(Config()) if training else defaults(schema)))
    lines = [description.strip()]
    groups = [
        path
        for path in sorted(CONFIGS.iterdir())
        if path.is_dir() and ((training and path.name != "suite") or path.name in fields)
    ]
    if groups:
        lines += ["", "Groups (group=choice):", *(f"  {path.name:<12} {', '.join(choices(path))}" for path in groups)]
    lines += ["", "Keys (key=value), with their defaults:"]
    for key in HELP_KEYS if training else [name for name in fields if name != "model"]:
        default = json.dumps(values.get(key, "???"), separators=(",", ":")).replace('"', "")
        lines.append(f"  {f'{key}={default}':<30} {meanings[key]}")
    sweeps = "  Sweeps: --multirun and a=1,2." if training else ""
    lines += ["", f"All keys: --cfg job.{sweeps}  Hydra's own options: --hydra-help"]
    return "\n".join(lines)
