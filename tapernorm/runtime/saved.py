"""What a run's directory says of it, and which settings may differ between runs that go on or are compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapernorm.config.resolve import build, resolve
from tapernorm.config.schema import ConfigError, leaves, read_yaml, to_dict
from tapernorm.runtime.record import Tree, load_summary

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


def load_run(directory: Path) -> Saved:
    """Read what a run's directory says of it. Raises ConfigError if it holds no run."""
    file = directory / ".hydra" / "config.yaml"
    if not file.exists():
        raise ConfigError(f"{directory} holds no run ({file} is missing)")
    composed = read_yaml(file)
    resolved_file = directory / "config.yaml"
    # Without it the run was interrupted before the vocabulary was known.
    resolved = read_yaml(resolved_file) if resolved_file.exists() else composed
    # Built anew, so that a key which an older version did not have has its default.
    resolved = to_dict(resolve(build(resolved)))
    summary = load_summary(directory)
    return Saved(directory, composed, resolved, summary)


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


def show(value: Any) -> str:
    return "null" if value is None else str(value)
