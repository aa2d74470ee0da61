"""The report of one run or many: report.html to look at, and for many also report.md, report.csv and figures."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from tapernorm.analysis.compare import Comparison, compare_runs
from tapernorm.analysis.page import markdown, render
from tapernorm.analysis.runs import VERDICTS, discover, read
from tapernorm.config.schema import write_text
from tapernorm.runtime.record import METRICS_FILE, REPORT_FILE, Tree


def write_page(directory: Path, summary: Tree | None = None) -> Path:
    """report.html of one run, in its directory; with a summary that summary.json does not hold yet."""
    file = directory / REPORT_FILE
    write_text(file, render(compare_runs([read(directory, summary)]), directory.name, datetime.now()))
    return file


def verdict(directory: Path, summary: Tree | None = None) -> str:
    """What the page of the run alone says of it, in words."""
    return VERDICTS[read(directory, summary).verdict]


def write_report(directories: Sequence[Path], out: Path) -> Path:
    """report.html, report.md, report.csv, chasing.png and losses.png of all runs in `directories`, into `out`.

    Returns the page. Raises ConfigError for a directory that holds no run.
    """
    from tapernorm.analysis.figures import write_figures  # matplotlib takes a second

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
    """CSV, one row a run (see Comparison.row)."""
    rows = [comparison.row(mode, run) for mode in comparison.modes for run in mode.runs]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
