"""Evaluated models side by side: one table, and each one's paired difference to the first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapernorm.checkpoint import run_directory
from tapernorm.losses import Losses, difference
from tapernorm.table import print_table

COLUMNS = ("checkpoint", "norm", "step", "loss", "median", "p99", "p99.9", "max", "bits/byte", "difference (95 %)")
FORMATS = dict.fromkeys(("median", "p99", "p99.9", "max"), "{:.4g}")


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
    baseline = models[0]
    remarks: dict[str, None] = {}  # a folded model's is that of the unfolded
    for model in models[1:]:
        found = difference(model.losses, baseline.losses)
        if isinstance(found, str):
            remarks[f"{model.report['label']}: not compared with {baseline.report['label']}: {found}"] = None
            found = {"not_compared": found}
        model.report["versus_baseline"] = found
    print_table([_row(model.report) for model in models], COLUMNS, FORMATS, n_left=2)
    for model in models:
        if model.report["nonfinite"]:
            remarks[f"{model.report['label']}: {model.report['nonfinite']:,} losses are not finite"] = None
    for remark in remarks:
        say(remark)
    say(
        "loss in nats/token ± standard error over documents; difference to the first row, paired by document, "
        "in nats/token unless another unit is named"
    )


def plus_minus(value: float, error: float) -> str:
    """'1.2345 ± 0.0012'; without the error where it is not defined."""
    return f"{value:.4f} ± {error:.4f}" if math.isfinite(error) else f"{value:.4f}"


def _row(report: dict[str, Any]) -> dict[str, Any]:
    return {
        "checkpoint": report["label"],
        "norm": report["norm"],
        "step": report["step"],
        "loss": plus_minus(report["loss"], report["loss_se"]),
        "median": report["median"],
        "p99": report["p99"],
        "p99.9": report["p99_9"],
        "max": report["max"],
        "bits/byte": plus_minus(report["bits_per_byte"], report["bits_per_byte_se"]),
        "difference (95 %)": _interval(report.get("versus_baseline")),
    }


def _interval(found: dict[str, Any] | None) -> str | None:
    """'+0.0123 (+0.0100 to +0.0146)'; the mean alone where there is no error, as of one document."""
    if found is None or "not_compared" in found:
        return None
    unit = "" if found["unit"] == "nats/token" else f" {found['unit']}"
    ends = f" ({found['low']:+.4f} to {found['high']:+.4f})" if math.isfinite(found["se"]) else ""
    return f"{found['mean']:+.4f}{ends}{unit}"
