"""The report of one run or many: report.html to look at, and for many also report.md, report.csv and figures."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tapernorm.analysis.report.compare import BEST_LOSS, Comparison, compare_runs, outlying
from tapernorm.analysis.report.page import markdown, render
from tapernorm.analysis.report.runs import VERDICTS, discover, read
from tapernorm.config.schema import write_text
from tapernorm.runtime.record import METRICS_FILE, REPORT_FILE

__all__ = ["last_change", "verdict", "write_page", "write_report"]


def write_page(directory: Path, summary: dict[str, Any] | None = None) -> Path:
    """report.html of one run, in its directory; with a summary that summary.json does not hold yet."""
    file = directory / REPORT_FILE
    write_text(file, render(compare_runs([read(directory, summary)]), directory.name, datetime.now()))
    return file


def verdict(directory: Path, summary: dict[str, Any] | None = None) -> str:
    """What the page of the run alone says of it, in words."""
    return VERDICTS[read(directory, summary).verdict]


def write_report(directories: Sequence[Path], out: Path) -> Path:
    """report.html, report.md, report.csv, chasing.png and losses.png of all runs in `directories`, into `out`.

    Returns the page. Raises ConfigError for a directory that holds no run.
    """
    from tapernorm.analysis.report.figures import write_figures  # matplotlib takes a second

    comparison = compare_runs([read(directory) for directory in discover(directories)])
    title = " + ".join(dict.fromkeys(directory.resolve().name for directory in directories))
    now = datetime.now()
    out.mkdir(parents=True, exist_ok=True)
    images = write_figures(comparison, out)
    write_text(out / "report.csv", table_of_runs(comparison))
    write_text(out / "report.md", markdown(comparison, title, now, images))
    write_text(out / REPORT_FILE, render(comparison, title, now))
    return out / REPORT_FILE


def last_change(directories: Sequence[Path]) -> float:
    """When any of the runs last wrote metrics or a summary (seconds since the epoch; 0 if none ever did)."""
    files = (folder / name for folder in discover(directories) for name in (METRICS_FILE, "summary.json"))
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def table_of_runs(comparison: Comparison) -> str:
    """CSV, one row a run. Units: nats per token (losses), per cent (gaps), e-folds (growth, drift, mismatch), nats per
    e-fold (pull)."""
    rows = []
    for mode in comparison.modes:
        marks = outlying(comparison, mode)
        for run in mode.runs:
            base = comparison.baseline_of(run)
            rows.append(
                {
                    "run": run.name,
                    "directory": str(run.directory),
                    "status": run.status,
                    "counted": run in mode.counted.values(),
                    "size": mode.size,
                    "mode": mode.label,
                    "norm": run.norm,
                    "anchor": run.anchor,
                    "seed": run.seed,
                    "step": run.last_step,
                    "tokens": run.summary.get("tokens"),
                    "val_loss": run.val_loss,
                    "val_loss_best_temperature": run.last(BEST_LOSS),
                    "best_temperature": run.last("val/best_temperature"),
                    "gap_percent": comparison.gap(run),
                    "gap_best_temperature_percent": comparison.best_gap(run),
                    "baseline": base.name if base else None,
                    "outlier": marks.get(run.seed) if run.seed is not None else None,
                    "growth": run.growth,
                    **{f"growth_{name}": run.reference_growths.get(name) for name in ("baseline", "internal_taper")},
                    "drift": run.drift,
                    "level_at_k_warmup": run.last("scale/target"),
                    **dict(zip(("mismatch_gate_0", "mismatch_end"), run.mismatches, strict=True)),
                    "logit_norm": run.last("logits/norm_mean"),
                    "logit_norm_gap_percent": comparison.logit_gap(run),
                    "logit_max": run.last("logits/abs_max"),
                    "lever": run.lever,
                    "pull": run.pull,
                    "verdict": VERDICTS[run.verdict],
                    "tokens_per_s": run.last("throughput/tokens_per_s"),
                    "seconds": run.summary.get("seconds"),
                    "parameters": run.summary.get("parameters"),
                    "error": run.error,
                }
            )
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
