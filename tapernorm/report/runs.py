"""Finished and unfinished runs, read from their directories, and what each of them says about logit chasing."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from tapernorm import run as saved_runs
from tapernorm.config import GATED
from tapernorm.schema import ConfigError
from tapernorm.tracking import METRICS_FILE, read_metrics

Tree = dict[str, Any]
Points = list[tuple[int, float | None]]  # (step, value); None where the value was not finite or not defined

# docs/metrics.md, "How to see logit chasing", with numbers to the words. Both are in the report's text.
CHASING_DRIFT = 0.25  # e-folds (28 %) that the residual scale may leave its level at calibration
LEVER = 0.5  # share of the theoretical radial gradient that must be there for the scale to act on the logits

FORCES = {  # the anchors' restoring force from means alone, for runs that did not log it
    "fixed_target": lambda weight, scale, target: 2 * weight * scale * (scale - target),
    "log_target": lambda weight, scale, target: 2 * weight * math.log(scale / target),
    "mean_log": lambda weight, scale, target: 2 * weight * math.log(scale / target),
}


@dataclass(frozen=True, eq=False)
class Run:
    """One run as its directory tells it. `resolved` is {} where the configuration could not be built."""

    directory: Path
    status: str
    error: str | None = None
    summary: Tree = field(default_factory=dict)
    composed: Tree = field(default_factory=dict)
    resolved: Tree = field(default_factory=dict)
    rows: Sequence[Tree] = ()

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def finished(self) -> bool:
        """It ran to its end with a finite loss: only such runs enter the statistics."""
        return self.status == "finished" and self.val_loss is not None

    def setting(self, section: str, key: str) -> Any:
        """A resolved value, or as it was asked for where the run never got so far; None if neither is there."""
        for tree in (self.resolved, self.composed):
            node = tree.get(section)
            if isinstance(node, dict) and node.get(key) is not None:
                return node[key]
        return None

    @property
    def norm(self) -> str:
        return str(self.setting("norm", "name") or self.summary.get("norm") or "?")

    @property
    def anchor(self) -> str:
        return str(self.setting("anchor", "kind") or self.summary.get("anchor") or "?")

    @property
    def seed(self) -> int | None:
        return self.resolved.get("seed", self.composed.get("seed", self.summary.get("seed")))

    @property
    def is_baseline(self) -> bool:
        return saved_runs.is_baseline(self.resolved)

    @cached_property
    def match(self) -> str:
        return saved_runs.match_key(self.resolved)

    @property
    def tokens_per_step(self) -> int | None:
        batch, length = self.setting("trainer", "batch_size"), self.setting("model", "n_ctx")
        return batch * length if batch and length else None

    @property
    def k_warmup(self) -> int | None:
        return self.setting("gate", "k_warmup")

    @property
    def k_taper(self) -> int | None:
        """First step with gate 0, of runs that taper."""
        tapers = self.setting("norm", "kind") in GATED and self.setting("gate", "shape") != "constant"
        return self.setting("gate", "k_taper") if tapers else None

    # ------------------------------------------------------------------------------------------------------ its numbers

    def points(self, metric: str) -> Points:
        """(step, value) of a metric wherever it was measured; `drift` and a missing `anchor/force` are derived."""
        if metric == DRIFT:
            return self.drifts
        found = [(row["step"], row[metric]) for row in self.rows if metric in row]
        return self._derived_force() if metric == "anchor/force" and not found else found

    def last(self, metric: str) -> float | None:
        return next((value for _, value in reversed(self.points(metric)) if value is not None), None)

    @property
    def last_step(self) -> int:
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def val_loss(self) -> float | None:
        return self.summary["val_loss"] if self.summary.get("val_loss") is not None else self.last("val/loss")

    @cached_property
    def drifts(self) -> Points:
        """ln(scale/final_rms_mean / scale/target) from step k_warmup on, in e-folds."""
        target = self.last("scale/target")
        if not target or self.k_warmup is None:
            return []
        scales = [(step, s) for step, s in self.points("scale/final_rms_mean") if step >= self.k_warmup]
        return [(step, math.log(s / target) if s else None) for step, s in scales]

    @property
    def drift(self) -> float | None:
        return self.last(DRIFT)

    @property
    def derives_force(self) -> bool:
        return not any("anchor/force" in row for row in self.rows) and bool(self._derived_force())

    def _derived_force(self) -> Points:
        force, target, weight = FORCES.get(self.anchor), self.last("scale/target"), self.last("anchor/lambda")
        if force is None or not target or weight is None or self.k_warmup is None:
            return []
        scales = [(step, s) for step, s in self.points("scale/final_rms_mean") if step > self.k_warmup]
        return [(step, force(weight, s, target) if s else None) for step, s in scales]

    def sites(self, prefix: str = "scale/rms.") -> list[str]:
        """Sites that have a metric `<prefix><site>`, in the order of the forward pass."""
        return list(
            dict.fromkeys(key.removeprefix(prefix) for row in self.rows for key in row if key.startswith(prefix))
        )

    # -------------------------------------------------------------------------------------------------- logit chasing

    @property
    def final_norm(self) -> bool:
        """Whether a standard norm reads h_L to the end, so that its scale has no effect on the logits."""
        kind, sites = self.setting("norm", "kind"), self.setting("norm", "sites") or ()
        open_gate = kind in GATED and self.setting("gate", "shape") == "constant"
        return kind == "standard" or open_gate or (kind is not None and "final" not in sites)

    @property
    def settled(self) -> list[Tree]:
        """Rows after the taper; of a run that does not taper, those after the same step."""
        start = self.setting("gate", "k_taper")
        return [] if start is None else [row for row in self.rows if row["step"] > start]

    @property
    def lever(self) -> float | None:
        """sum |radial/mean| / sum |radial/theory| after the taper: 1 if the scale of h_L acts on the logits, else 0."""
        rows = [row for row in self.settled if row.get("radial/mean") is not None and row.get("radial/theory")]
        theory = math.fsum(abs(row["radial/theory"]) for row in rows)
        return math.fsum(abs(row["radial/mean"]) for row in rows) / theory if theory else None

    @property
    def pull(self) -> float | None:
        """Mean of radial/train_mean after the taper, nats per e-fold: negative pulls the scale up."""
        values = [row["radial/train_mean"] for row in self.settled if row.get("radial/train_mean") is not None]
        return math.fsum(values) / len(values) if values else None

    @property
    def verdict(self) -> str:
        """One of VERDICTS."""
        if self.status in ("diverged", "failed"):
            return self.status
        if self.final_norm:
            return "normed"
        lever, drift, pull = self.lever, self.drift, self.pull
        if lever is None or drift is None or pull is None:
            return "early"
        if lever < LEVER:
            return "inert"
        if drift < -CHASING_DRIFT:
            return "shrinking"
        if drift <= CHASING_DRIFT:
            return "held"
        return "chasing" if pull < 0 else "growing"


DRIFT = "drift"
VERDICTS = {  # the words of the badges; the report's text explains them
    "chasing": "chases logits",
    "growing": "scale grows",
    "shrinking": "scale shrinks",
    "held": "scale held",
    "inert": "scale has no effect",
    "normed": "final norm in place",
    "early": "too early to tell",
    "diverged": "diverged",
    "failed": "failed",
}


def discover(directories: Iterable[Path]) -> list[Path]:
    """Run directories that are, or lie up to three levels below, the given ones. Raises ConfigError for one without."""
    found: dict[Path, None] = {}
    for directory in directories:
        if not directory.is_dir():
            raise ConfigError(f"{directory}: there is no such directory")
        patterns = (".hydra", "*/.hydra", "*/*/.hydra", "*/*/*/.hydra")
        folders = sorted(path.parent for pattern in patterns for path in directory.glob(pattern) if path.is_dir())
        if not folders:
            raise ConfigError(f"{directory} holds no run")
        found.update(dict.fromkeys(path.resolve() for path in folders))
    return list(found)


def read(directory: Path, summary: Tree | None = None) -> Run:
    """Everything that a run's directory holds so far; what is damaged becomes the run's error, never an exception.

    summary: instead of summary.json.
    """
    error = None
    try:
        saved = saved_runs.load_run(directory)
        composed, resolved, summary = saved.composed, saved.resolved, summary or saved.summary or {}
    except ConfigError as fault:  # never started, or its configuration could not be built
        error, composed, resolved = str(fault), _yaml(directory / ".hydra" / "config.yaml"), {}
        try:
            summary = summary or saved_runs.load_summary(directory) or {}
        except ValueError:
            summary = {}
    rows: list[Tree] = []
    if (directory / METRICS_FILE).exists():
        try:
            rows = read_metrics(directory)
        except ConfigError as fault:
            error = str(fault)
    status = summary.get("status") or ("failed" if error else "unfinished")
    return Run(directory, status, summary.get("error") or error, summary, composed, resolved, rows)


def _yaml(file: Path) -> Tree:
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) else {}


def silence(directory: Path) -> float | None:
    """Seconds since a run last wrote a metric."""
    file = directory / METRICS_FILE
    return max(0.0, time.time() - file.stat().st_mtime) if file.exists() else None
