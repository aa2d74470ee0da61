"""The two main figures as PNG files, for places that show no HTML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tapernorm.analysis.report.charts import DRIFT_CHART, GAP, LOGITS_CHART, gap_points
from tapernorm.analysis.report.compare import Comparison
from tapernorm.analysis.report.runs import DRIFT, Run

# Okabe and Ito's colours, for all kinds of colour vision, without the yellow, which paper swallows; grey: baseline.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#A6761D", "#44337A")
GREY = "#555555"
MARKERS = "osD^v<>P"


def write_figures(comparison: Comparison, out: Path) -> list[str]:
    """Write chasing.png and losses.png into `out`; return their names."""
    chasing = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = chasing.subplots(1, 2)
    _draw(comparison, left, DRIFT)
    _draw(comparison, right, "logits/norm_mean")
    left.axhline(0, color="0.6", linewidth=0.8)
    left.set(title=DRIFT_CHART.title, ylabel=DRIFT_CHART.y)
    right.set(title="Logit norm", ylabel=LOGITS_CHART.y)

    losses = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = losses.subplots(1, 2)
    _draw(comparison, left, "train/loss")
    left.set(title="Training loss and gate", ylabel="loss [nats/token]")
    gate = left.twinx()
    gate.set(ylabel="gate (dotted)", ylim=(-0.03, 1.03))
    _draw(comparison, gate, "gate/g", style=":")
    _draw(comparison, right, GAP)
    right.axhline(0, color="0.6", linewidth=0.8)
    right.set(title="Validation loss against the same seed's baseline", ylabel="gap [%]")
    names = []
    for name, figure in (("chasing.png", chasing), ("losses.png", losses)):
        lines = {str(line.get_label()): line for line in figure.axes[0].get_lines()}
        handles = {label: line for label, line in lines.items() if not label.startswith("_")}  # _: matplotlib's own
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(out / name, dpi=130)
        names.append(name)
    return names


def _draw(comparison: Comparison, axes: Axes, metric: str, style: str = "-") -> None:
    """One line a run, coloured by mode, with a marker by seed; the ends of warmup and taper as vertical lines."""
    seeds = sorted({run.seed for run in comparison.runs if run.seed is not None})
    coloured = [mode for mode in comparison.modes if not mode.is_baseline]
    for mode in comparison.modes:
        colour = GREY if mode.is_baseline else COLOURS[coloured.index(mode) % len(COLOURS)]
        label = mode.label if len(comparison.sizes) == 1 else f"{mode.label} ({mode.size})"
        for run in mode.runs:
            found = gap_points(comparison, run) if metric == GAP else run.points(metric)
            points = [(step, value) for step, value in found if value is not None]
            marker = MARKERS[seeds.index(run.seed) % len(MARKERS)] if run.seed in seeds else "o"
            axes.plot(
                [_millions(run, step) for step, _ in points],
                [value for _, value in points],
                color=colour,
                linestyle=style,
                alpha=0.9,
                linewidth=1.4,
                marker=None if metric == "gate/g" else marker,
                markevery=max(1, len(points) // 6),
                markersize=4,
                label=label,
            )
    for step in _marks(comparison.runs):
        axes.axvline(step, color="0.75", linewidth=0.8, zorder=0)
    axes.set_xlabel("training tokens, millions")


def _marks(runs: Sequence[Run]) -> set[float]:
    steps = ((run, step) for run in runs for step in (run.k_warmup, run.k_taper) if step)
    return {_millions(run, step) for run, step in steps}


def _millions(run: Run, step: int) -> float:
    return step * (run.tokens_per_step or 1) / 1e6
