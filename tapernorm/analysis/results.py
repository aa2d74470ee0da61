"""Evaluated models side by side, on one text or several: one table, and each one's paired difference to the first."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapernorm.analysis.format import interval, number, print_table
from tapernorm.analysis.intervals import Estimate
from tapernorm.analysis.losses import Losses, difference
from tapernorm.training.checkpoint import run_directory

log = logging.getLogger(__name__)

COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "loss": lambda report: plus_minus(report["loss"], report["loss_se"]),
    "T*": lambda report: number(report["best_temperature"], ".4g"),
    "loss at T*": lambda report: number(report["loss_best_temperature"], ".4f"),
    "median": lambda report: number(report["median"], ".4g"),
    "99 %": lambda report: number(report["p99"], ".4g"),
    "99.9 %": lambda report: number(report["p99_9"], ".4g"),
    "max": lambda report: number(report["max"], ".4g"),
    "bits/byte": lambda report: plus_minus(report["bits_per_byte"], report["bits_per_byte_se"]),
    "tokens": lambda report: number(report["tokens"], ","),
    "difference (95 %)": lambda report: _interval(report.get("versus_baseline")),
    "difference at T*": lambda report: _interval(report.get("versus_baseline", {}).get("at_best_temperature")),
}
NOT_ALONE = {"tokens"}  # columns that a table of one text does without,
NOT_IN_A_SUITE = {"T*", "99 %", "bits/byte"}  # and those that one of several does without
DIFFERENCES = {"difference (95 %)", "difference at T*"}


@dataclass(frozen=True)
class Measured:
    """A model and a text: the losses of its tokens, and what is reported of it (`report` is written to)."""

    losses: Losses
    report: dict[str, Any]


def labels(paths: Sequence[Path]) -> list[str]:
    """A short name for each checkpoint: its run's, with its own where a run has several, else its whole path."""
    runs = [run_directory(path).name for path in paths]
    steps = [run if path.name == run else f"{run}/{path.name}" for run, path in zip(runs, paths, strict=True)]
    return [
        run if Counter(runs)[run] == 1 else step if Counter(steps)[step] == 1 else str(path)
        for run, step, path in zip(runs, steps, paths, strict=True)
    ]


def compare(
    texts: Mapping[str, Sequence[Measured]],
    published: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Add `versus_baseline` to every report but the first's, print the table and say what cannot be compared.

    On each of the texts by name the models are the same and in the same order. Each has a group of columns, which its
    name stands above; beneath is what others have `published` (see published.rows). A single text may be named ''.
    """
    remarks = {f"{name}: {remark}" if name else remark: None for name in texts for remark in _pair(texts[name])}
    several = "" in texts or any(len(models) > 1 for models in texts.values())
    left_out = (NOT_ALONE if "" in texts else NOT_IN_A_SUITE) | (set() if several else DIFFERENCES)
    shown = [column for column in COLUMNS if column not in left_out]
    above = "" if "" in texts else "\n"
    columns = [f"{above}{column}" for column in ("checkpoint", "norm", "step")]
    columns += [f"{name if column == 'loss' else ''}{above}{column}" for name in texts for column in shown]
    rows = [
        [number(models[0].report[key]) for key in ("label", "norm", "step")]
        + [COLUMNS[column](model.report) for model in models for column in shown]
        for models in zip(*texts.values(), strict=True)
    ]
    for found in published:
        row = [f"published: {found['name']}", found["model"], ""]
        for name in texts:
            numbers = {"loss": ".4f", "median": ".4g"}
            known = found["datasets"].get(name, {})
            row += [number(known.get(column), numbers.get(column, "")) for column in shown]
        rows.append(row)
    print_table(columns, rows, n_left=2)
    for remark in remarks:
        log.info(remark)
    log.info(
        "loss in nats/token ± standard error over documents"
        + ("; difference to the first row, paired by document, in nats/token unless another unit is named" * several)
        + "; T*: the temperature of all logits at which the loss is smallest"
    )


def _pair(models: Sequence[Measured]) -> list[str]:
    """Add `versus_baseline` to every report but the first's; returns what cannot be compared or is not finite."""
    baseline = models[0]
    remarks: dict[str, None] = {}  # a folded model's is that of the unfolded
    for model in models[1:]:
        found = difference(model.losses, baseline.losses)
        if isinstance(found, str):
            remarks[f"{model.report['label']}: not compared with {baseline.report['label']}: {found}"] = None
            found = {"not_compared": found}
        else:
            best, base = model.losses.at_best, baseline.losses.at_best
            found["at_best_temperature"] = difference(best, base) if best and base else None
        model.report["versus_baseline"] = found
    for model in models:
        if model.report["nonfinite"]:
            remarks[f"{model.report['label']}: {model.report['nonfinite']:,} losses are not finite"] = None
    return list(remarks)


def plus_minus(value: float, error: float) -> str:
    """'1.2345 ± 0.0012'; without the error where it is not defined."""
    return f"{value:.4f} ± {error:.4f}" if math.isfinite(error) else f"{value:.4f}"


def _interval(found: Mapping[str, Any] | None) -> str:
    if found is None or "not_compared" in found:
        return ""
    ends = (found["low"], found["high"]) if math.isfinite(found["se"]) else (None, None)
    unit = "" if found["unit"] == "nats/token" else f" {found['unit']}"
    return interval(Estimate(found["documents"], found["mean"], found["se"], *ends), "+.4f", unit)
