"""Evaluated models side by side, on one text or several: one table, and each one's paired difference to the first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapernorm.analysis.losses import Losses, difference
from tapernorm.analysis.table import print_table
from tapernorm.training.checkpoint import run_directory

COLUMNS = (
    "checkpoint",
    "norm",
    "step",
    "loss",
    "T*",
    "loss at T*",
    "median",
    "p99",
    "p99.9",
    "max",
    "bits/byte",
    "difference (95 %)",
    "difference at T*",
)
FORMATS = dict.fromkeys(("T*", "median", "p99", "p99.9", "max"), "{:.4g}") | {"loss at T*": "{:.4f}"}
TEMPERATURE = "; T*: the temperature of all logits at which the loss is smallest"


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


def compare(models: Sequence[Measured], say: Callable[[str], None] = print) -> None:
    """Add `versus_baseline` to every report but the first's, print the table and say what cannot be compared."""
    remarks = _pair(models)
    print_table([_row(model.report) for model in models], COLUMNS, FORMATS, n_left=2)
    for remark in remarks:
        say(remark)
    say(
        "loss in nats/token ± standard error over documents; difference to the first row, paired by document, "
        f"in nats/token unless another unit is named{TEMPERATURE}"
    )


def compare_on(
    texts: Mapping[str, Sequence[Measured]],
    published: Sequence[Mapping[str, Any]],
    say: Callable[[str], None] = print,
) -> None:
    """The same for several texts by name, on each of which the models are the same and in the same order.

    One table with a group of columns for each text; beneath, what others have `published` (see published.rows).
    """
    remarks = {f"{name}: {remark}": None for name, models in texts.items() for remark in _pair(models)}
    several = any(len(models) > 1 for models in texts.values())
    differences = ("difference (95 %)", "difference at T*") if several else ()
    shown = ("loss", "loss at T*", "median", "99.9 %", "max", "tokens", *differences)
    columns = ["checkpoint", "norm", "step", *(f"{name}/{number}" for name in texts for number in shown)]
    # the name of a text stands above the first of its columns
    headings = {
        f"{name}/{number}": f"{name if number == 'loss' else ''}\n{number}" for name in texts for number in shown
    }
    headings |= {column: f"\n{column}" for column in columns[:3]}
    formats = {f"{name}/{number}": "{:.4g}" for name in texts for number in ("median", "99.9 %", "max")}
    formats |= {f"{name}/tokens": "{:,}" for name in texts} | {f"{name}/loss at T*": "{:.4f}" for name in texts}
    rows = []
    for number, model in enumerate(next(iter(texts.values()))):
        row = {column: model.report[{"checkpoint": "label"}.get(column, column)] for column in columns[:3]}
        for name, models in texts.items():
            row |= {f"{name}/{column}": value for column, value in _columns(models[number].report).items()}
        rows.append(row)
    for found in published:
        row = {"checkpoint": f"published: {found['name']}", "norm": found["model"]}
        for name, numbers in found["datasets"].items():
            row |= {f"{name}/loss": f"{numbers['loss']:.4f}", f"{name}/median": numbers["median"]}
        rows.append(row)
    print_table(rows, columns, formats, n_left=2, headings=headings)
    for remark in remarks:
        say(remark)
    say(
        "loss in nats/token ± standard error over documents"
        + ("; difference to the first row, paired by document, in nats/token unless another unit is named" * several)
        + TEMPERATURE
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


def _row(report: dict[str, Any]) -> dict[str, Any]:
    return {
        "checkpoint": report["label"],
        "norm": report["norm"],
        "step": report["step"],
        "loss": plus_minus(report["loss"], report["loss_se"]),
        "T*": report["best_temperature"],
        "loss at T*": report["loss_best_temperature"],
        "median": report["median"],
        "p99": report["p99"],
        "p99.9": report["p99_9"],
        "max": report["max"],
        "bits/byte": plus_minus(report["bits_per_byte"], report["bits_per_byte_se"]),
        "difference (95 %)": _interval(report.get("versus_baseline")),
        "difference at T*": _interval(report.get("versus_baseline", {}).get("at_best_temperature")),
    }


def _columns(report: Mapping[str, Any]) -> dict[str, Any]:
    """What is shown of one of several texts."""
    return {
        "loss": plus_minus(report["loss"], report["loss_se"]),
        "loss at T*": report["loss_best_temperature"],
        "median": report["median"],
        "99.9 %": report["p99_9"],
        "max": report["max"],
        "tokens": report["tokens"],
        "difference (95 %)": _interval(report.get("versus_baseline")),
        "difference at T*": _interval(report.get("versus_baseline", {}).get("at_best_temperature")),
    }


def _interval(found: dict[str, Any] | None) -> str | None:
    """'+0.0123 (+0.0100 to +0.0146)'; the mean alone where there is no error, as of one document."""
    if found is None or "not_compared" in found:
        return None
    unit = "" if found["unit"] == "nats/token" else f" {found['unit']}"
    ends = f" ({found['low']:+.4f} to {found['high']:+.4f})" if math.isfinite(found["se"]) else ""
    return f"{found['mean']:+.4f}{ends}{unit}"
