"""Finished and unfinished runs, read from their directories, and what each of them says about logit chasing."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from tapernorm.config.options import GATED, HOLDING
from tapernorm.config.schema import ConfigError, read_yaml
from tapernorm.runtime.record import METRICS_FILE, Tree, load_summary, read_metrics
from tapernorm.runtime.saved import is_baseline, load_run, match_key

Points = list[tuple[int, float | None]]  # (step, value); None where the value was not finite or not defined

# docs/metrics.md, "How to see logit chasing", with numbers to the words. Both are in the report's text.
GROWTH = 0.1  # e-folds (11 %) by which the residual scale may leave its level at the first step with gate 0
LEVER = 0.5  # share of the theoretical radial gradient that must be there for the scale to act on the logits

SCALE, DRIFT, MISMATCH, FORCE = "scale/final_rms_mean", "scale/drift", "calib/mismatch.", "anchor/force"

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


@dataclass(frozen=True, eq=False)
class Run:
    """One run as its directory tells it. `resolved` is {} where the configuration could not be built.

    references: runs of the same seed under a final norm, whose growth the loss cannot have caused.
    """

    directory: Path
    status: str
    error: str | None = None
    summary: Tree = field(default_factory=dict)
    composed: Tree = field(default_factory=dict)
    resolved: Tree = field(default_factory=dict)
    rows: Sequence[Tree] = ()
    tokens: Tree | None = None  # radial gradient of single tokens: theory and measured
    references: Sequence[Run] = ()

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def finished(self) -> bool:
        """It ran to its end with a finite loss: only such runs enter the statistics."""
        return self.status == "finished" and self.val_loss is not None

    def setting(self, section: str, key: str) -> Any:
        """A resolved value, or as it was asked for where the run never got so far; None if neither is there."""
        nodes = [tree.get(section) for tree in (self.resolved, self.composed)]
        found = [node[key] for node in nodes if isinstance(node, dict) and node.get(key) is not None]
        return found[0] if found else None

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
        return is_baseline(self.resolved)

    @cached_property
    def match(self) -> str:
        return match_key(self.resolved)

    @property
    def tokens_per_step(self) -> int:
        """1 where it is not known."""
        return (self.setting("trainer", "batch_size") or 1) * (self.setting("model", "n_ctx") or 1)

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
        """(step, value) wherever it was measured; drift and force are derived where they were not logged."""
        found = [(row["step"], row[metric]) for row in self.rows if metric in row]
        derived = {DRIFT: self._derived_drift, FORCE: self._derived_force}
        return found or (derived[metric]() if metric in derived else [])

    def last(self, metric: str) -> float | None:
        return next((value for _, value in reversed(self.points(metric)) if value is not None), None)

    @property
    def last_step(self) -> int:
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def val_loss(self) -> float | None:
        return self.summary["val_loss"] if self.summary.get("val_loss") is not None else self.last("val/loss")

    @property
    def best_loss(self) -> float | None:
        """Validation loss at the best temperature, which leaves out what a scale of all logits could mend."""
        logged = self.last("val/loss_best_temperature")
        return self.summary.get("val_loss_best_temperature") if logged is None else logged

    @property
    def drift(self) -> float | None:
        """ln of the level at the end over the one at k_warmup, in e-folds."""
        logged = self.last(DRIFT)
        if logged is None and "mismatch" in self.summary:  # older summaries, which have none, have another zero
            return self.summary.get("drift")
        return logged

    def _derived_drift(self) -> Points:
        scales = [(step, s) for step, s in self.points(SCALE) if step >= (self.k_warmup or 0)]
        if not scales or scales[0][0] != self.k_warmup or not (start := scales[0][1]):
            return []
        return [(step, math.log(s / start) if s else None) for step, s in scales]

    @property
    def mismatches(self) -> tuple[float | None, float | None]:
        """Worst |ln(c r)| over the sites, at the first step with gate 0 and at the last probe."""
        worst = {
            row["step"]: max(found)
            for row in self.rows
            if (found := [abs(v) for key, v in row.items() if key.startswith(MISMATCH) and v is not None])
        }
        told = self.summary.get("mismatch") or {}
        return worst.get(self.closed, told.get("gate_0")), next(reversed(worst.values()), told.get("end"))

    @property
    def derives_force(self) -> bool:
        return not any(FORCE in row for row in self.rows) and bool(self._derived_force())

    def _derived_force(self) -> Points:
        """From the mean scale alone, for runs that did not log it."""
        target, strength = self.last("scale/target"), self.last("anchor/lambda")
        if self.anchor not in HOLDING or not target or strength is None or self.k_warmup is None:
            return []
        from tapernorm.method.anchor import force_at  # torch: only for such a run

        scales = [(step, s) for step, s in self.points(SCALE) if step > self.k_warmup]
        return [(step, force_at(self.anchor, strength, s, target) if s else None) for step, s in scales]

    def sites(self, prefix: str) -> list[str]:
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

    @cached_property
    def closed(self) -> int | None:
        """First step with gate 0; of a run that does not taper, the k_taper that it shares with those that do."""
        return next((row["step"] for row in self.rows if row.get("gate/g") == 0), self.setting("gate", "k_taper"))

    def _settled(self, *metrics: str) -> list[list[float]]:
        """The metrics' values in the rows after the first step with gate 0 that have them all."""
        rows = [] if self.closed is None else [row for row in self.rows if row["step"] > self.closed]
        found = [[row.get(metric) for metric in metrics] for row in rows]
        return [[v for v in values if v is not None] for values in found if None not in values]

    def growth_between(self, start: int | None, end: int) -> float | None:
        """ln of the last level over the first within these steps, in e-folds."""
        levels = [] if start is None else [s for step, s in self.points(SCALE) if s and start <= step <= end]
        return math.log(levels[-1] / levels[0]) if len(levels) > 1 else None

    @property
    def growth(self) -> float | None:
        """ln of the level at the end over the one at the first step with gate 0."""
        return self.growth_between(self.closed, self.last_step)

    @property
    def reference_growths(self) -> dict[str, float]:
        """Growth of the references over the same steps."""
        names = {True: "baseline", False: "internal_taper"}
        found = {names[run.is_baseline]: run.growth_between(self.closed, self.last_step) for run in self.references}
        return {name: growth for name, growth in found.items() if growth is not None}

    @property
    def lever(self) -> float | None:
        """sum |radial/mean| / sum |radial/theory| after the taper: 1 if the scale of h_L acts on the logits, else 0."""
        pairs = [pair for pair in self._settled("radial/mean", "radial/theory") if pair[1]]
        return sum(abs(mean) for mean, _ in pairs) / sum(abs(theory) for _, theory in pairs) if pairs else None

    @property
    def pull(self) -> float | None:
        """Mean of radial/train_mean after the taper, nats per e-fold: negative pulls the scale up."""
        values = [value for (value,) in self._settled("radial/train_mean")]
        return fmean(values) if values else None

    @cached_property
    def verdict(self) -> str:
        """One of VERDICTS. What an anchor lets rise to the level that it holds does not chase."""
        if self.status in ("diverged", "failed"):
            return self.status
        if self.final_norm:
            return "normed"
        lever, growth, pull = self.lever, self.growth, self.pull
        if lever is None or growth is None or pull is None:
            return "early"
        if lever < LEVER:
            return "inert"
        if abs(growth) <= GROWTH:
            return "held"
        if growth < 0:
            return "shrinking"
        above = self.anchor not in HOLDING or (self.drift or 0.0) > GROWTH
        beyond = all(growth > other for other in self.reference_growths.values())
        return "chasing" if pull < 0 and above and beyond else "growing"


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
    error, composed, resolved, rows = None, {}, {}, []
    try:
        saved = load_run(directory)
        composed, resolved, summary = saved.composed, saved.resolved, summary or saved.summary
    except ConfigError as fault:  # never started, or its configuration could not be built
        error = str(fault)
        with suppress(ConfigError):
            composed = read_yaml(directory / ".hydra" / "config.yaml")
        with suppress(ConfigError):
            summary = summary or load_summary(directory)
    if (directory / METRICS_FILE).exists():
        try:
            rows = read_metrics(directory)
        except ConfigError as fault:
            error = str(fault)
    summary = summary or {}
    status = summary.get("status") or ("failed" if error else "unfinished")
    tokens = _tokens(directory / "probe_tokens.json")
    return Run(directory, status, summary.get("error") or error, summary, composed, resolved, rows, tokens)


def _tokens(file: Path) -> Tree | None:
    """{"step": k, "theory": [...], "measured": [...]}, None if there is no such file or it is damaged."""
    keys = ("theory", "measured")
    with suppress(OSError, ValueError, KeyError, TypeError):
        tree = json.loads(file.read_text(encoding="utf-8"))
        return {"step": int(tree["step"]), **{key: [v if v is None else float(v) for v in tree[key]] for key in keys}}
    return None


def silence(directory: Path) -> float | None:
    """Seconds since a run last wrote a metric."""
    file = directory / METRICS_FILE
    return max(0.0, time.time() - file.stat().st_mtime) if file.exists() else None
