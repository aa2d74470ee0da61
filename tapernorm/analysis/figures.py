"""The two main figures as PNG files, for places that show no HTML."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tapernorm.analysis.charts import DRIFT_CHART, GAP, LOGITS_CHART, drawn
from tapernorm.analysis.compare import Comparison
from tapernorm.analysis.runs import DRIFT
from tapernorm.config.schema import write_text

# Okabe and Ito's colours, for all kinds of colour vision, without the yellow, which paper swallows; grey: baseline.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#A6761D", "#44337A")
GREY = "#555555"
MARKERS = "osD^v<>P"
PANELS = {  # two by file: metric, title, vertical axis
    "chasing.png": (
        (DRIFT, DRIFT_CHART.title, DRIFT_CHART.y),
        ("logits/norm_mean", "Logit norm", LOGITS_CHART.y),
    ),
    "losses.png": (
        ("train/loss", "Training loss and gate", "loss [nats/token]"),
        (GAP, "Validation loss against the same seed's baseline", "gap [%]"),
    ),
}


def write_figures(comparison: Comparison, out: Path) -> list[str]:
    """Write chasing.png and losses.png into `out`; return their names."""
    for name, panels in PANELS.items():
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        for axes, (metric, title, y) in zip(figure.subplots(1, 2), panels, strict=True):
            _draw(comparison, axes, metric)
            axes.set(title=title, ylabel=y)
            if metric in (DRIFT, GAP):
                axes.axhline(0, color="0.6", linewidth=0.8)
            if metric == "train/loss":
                gate = axes.twinx()
                gate.set(ylabel="gate (dotted)", ylim=(-0.03, 1.03))
                _draw(comparison, gate, "gate/g", style=":")
        lines = {str(line.get_label()): line for line in figure.axes[0].get_lines()}
        handles = {label: line for label, line in lines.items() if not label.startswith("_")}  # _: matplotlib's own
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, frameon=False)
        image = io.BytesIO()
        figure.savefig(image, dpi=130, format=name.rpartition(".")[2])
        write_text(out / name, image.getvalue())
    return list(PANELS)


def _draw(comparison: Comparison, axes: Axes, metric: str, style: str = "-") -> None:
    """One line a run, coloured by mode, with a marker by seed; the ends of warmup and taper as vertical lines."""
    seeds = sorted({run.seed for run in comparison.runs if run.seed is not None})
    coloured = [mode for mode in comparison.modes if not mode.is_baseline]
    for mode in comparison.modes:
        colour = GREY if mode.is_baseline else COLOURS[coloured.index(mode) % len(COLOURS)]
        for run in mode.runs:
            points = [(step, value) for step, value in drawn(comparison, run, metric) if value is not None]
            marker = MARKERS[seeds.index(run.seed) % len(MARKERS)] if run.seed in seeds else "o"
            axes.plot(
                [step * run.tokens_per_step / 1e6 for step, _ in points],
                [value for _, value in points],
                color=colour,
                linestyle=style,
                alpha=0.9,
                linewidth=1.4,
                marker=None if metric == "gate/g" else marker,
                markevery=max(1, len(points) // 6),
                markersize=4,
                label=comparison.name(mode),
            )
    ends = {step * run.tokens_per_step / 1e6 for run in comparison.runs for step in (run.k_warmup, run.k_taper) if step}
    for end in ends:
        axes.axvline(end, color="0.75", linewidth=0.8, zorder=0)
    axes.set_xlabel("training tokens, millions")
