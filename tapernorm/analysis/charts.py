"""What the page draws: the charts and their captions, and the runs' numbers, thinned out where there are very many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from tapernorm.analysis.compare import Comparison, Mode
from tapernorm.analysis.format import interval, number
from tapernorm.analysis.runs import DRIFT, GROWTH, MISMATCH, Points, Run
from tapernorm.analysis.tables import told

GAP = "gap"
POINTS = 12_000  # drawn per metric over all runs: what keeps a page of 30 runs within a few megabytes
HEAT_COLUMNS = 200
COLOURS = 8  # of the page's palette


@dataclass(frozen=True)
class Line:
    """One metric in a chart. `dash` is how it differs from the chart's other metrics; `axis` 2 is on the right."""

    metric: str
    label: str
    dash: str = "solid"
    axis: int = 1
    shown: bool = True


@dataclass(frozen=True)
class Chart:
    """A chart over tokens or steps."""

    id: str
    title: str
    caption: str
    y: str
    lines: tuple[Line, ...]
    y2: str = ""
    split: bool = False  # axis 2 has a panel of its own below, not the right side
    log: bool = False
    settled: bool = False  # the vertical axis fits what comes after the warmup
    labelled: bool = False  # groups are named at the ends of their lines
    wide: bool = False
    levels: tuple[float, ...] = field(default=())  # horizontal lines


DRIFT_CHART = Chart(
    "drift",
    "Residual scale since k_warmup",
    "scale/drift: ln of scale/final_rms_mean over its value at k_warmup, in e-folds, so that 0 is the level at "
    "k_warmup as measured. A run without a final norm that goes on climbing after k_taper, where the loss pulls "
    "outwards, chases logits. Under a final norm the scale may drift, too, but it has no effect on the logits.",
    "drift [e-folds]",
    (Line(DRIFT, "drift"),),
    labelled=True,
    wide=True,
    levels=(0.0,),
)
LOGITS_CHART = Chart(
    "logits",
    "Logits",
    "logits/norm_mean (top) and logits/abs_max (bottom) on the probe batch. Logits grow in every run; look for "
    "those that leave the baseline's after the gate has closed.",
    "mean norm",
    (Line("logits/norm_mean", "norm"), Line("logits/abs_max", "largest", "dot", 2)),
    "largest |z|",
    split=True,
)
CHARTS = (
    DRIFT_CHART,
    LOGITS_CHART,
    Chart(
        "loss",
        "Loss and gate",
        "train/loss (mean since the previous point) and val/loss, nats per token, with gate/g on the right. A "
        "jolt of the training loss while the gate closes points at the calibration. The vertical axis fits the "
        "steps after k_warmup.",
        "loss [nats/token]",
        (
            Line("train/loss", "training"),
            Line("val/loss", "validation", "dash"),
            Line("gate/g", "gate", "dot", 2),
        ),
        "gate",
        settled=True,
    ),
    Chart(
        "radial",
        "Pull of the loss and restoring force of the anchor",
        "All as slopes by ln s, in nats per e-fold. Top: radial/train_mean below 0 means that cross-entropy would "
        "gain from a larger scale, anchor/force above 0 that the anchor would gain from a smaller one; where the "
        "two are mirror images, they balance. Bottom: radial/mean, the pull on held-out text. It lies on "
        "radial/theory where the final norm is gone and on 0 where it is in place. The vertical axes fit the "
        "steps after k_warmup.",
        "training [nats/e-fold]",
        (
            Line("radial/train_mean", "pull, training batches"),
            Line("anchor/force", "anchor's force", "dash"),
            Line("radial/mean", "pull, probe batch", "solid", 2),
            Line("radial/theory", "theory", "dot", 2),
        ),
        "probe [nats/e-fold]",
        split=True,
        settled=True,
        wide=True,
        levels=(0.0,),
    ),
    Chart(
        "gap",
        "Validation loss against the baseline",
        "val/loss over that of the baseline of the same seed and settings at the same step, per cent. Above 0 the "
        "run is worse. The table below says which gaps the seeds can tell from zero.",
        "gap [%]",
        (Line(GAP, "gap"),),
        settled=True,
        levels=(0.0,),
    ),
    Chart(
        "scale",
        "Residual scale before the final norm",
        "scale/final_rms_mean with scale/target, the level at k_warmup (where an anchor holds it), and "
        "scale/final_rms_p99, the tokens that stick out. The unit is each run's own: compare with the level at "
        "k_warmup, not between runs.",
        "scale",
        (
            Line("scale/final_rms_mean", "mean"),
            Line("scale/target", "level at k_warmup", "dot"),
            Line("scale/final_rms_p99", "p99", "dash", shown=False),
        ),
    ),
    Chart(
        "anchor",
        "Anchor loss",
        "anchor/weighted is what the anchor adds to the objective; it should be small beside the cross-entropy. "
        "anchor/loss is the same without its weight.",
        "weighted [nats]",
        (Line("anchor/weighted", "weighted"), Line("anchor/loss", "without weight", "dot", 2, shown=False)),
        "without weight",
    ),
    Chart(
        "gradient",
        "Gradient before the final norm",
        "grad/final_hidden_norm: mean over tokens of the norm of the loss's gradient by the residual stream, on the "
        "probe batch. Under a final norm it falls as the scale grows; without one, compare an anchored run with its "
        "baseline.",
        "gradient [nats/scale]",
        (Line("grad/final_hidden_norm", "gradient"),),
        settled=True,
    ),
    Chart(
        "bound",
        "Margin bound",
        "radial/bound_ok: share of the probe's rightly predicted tokens whose radial gradient is as negative as their "
        "margin demands. It must be 1 once the final norm is gone, and says nothing while it is there.",
        "share of tokens",
        (Line("radial/bound_ok", "share"),),
        levels=(1.0,),
    ),
    Chart(
        "confidence",
        "Confidence and accuracy",
        "probe/entropy (top) and probe/accuracy (bottom). An entropy that falls without a gain in accuracy: the model "
        "grows confident rather than better.",
        "entropy [nats]",
        (Line("probe/entropy", "entropy"), Line("probe/accuracy", "accuracy", "dot", 2)),
        "accuracy",
        split=True,
    ),
    Chart(
        "health",
        "Gradients and updates",
        "grad/norm before clipping (top) and update/ratio, the weights' relative change per step (bottom). A "
        "ratio that rises while the learning rate falls precedes most blow-ups.",
        "gradient norm",
        (Line("grad/norm", "gradient norm"), Line("update/ratio", "update ratio", "dot", 2)),
        "update ratio",
        split=True,
        log=True,
    ),
    Chart(
        "throughput",
        "Throughput",
        "throughput/tokens_per_s, without probes, validation and saving. Runs that shared a machine are slower "
        "than it is.",
        "tokens/s",
        (Line("throughput/tokens_per_s", "tokens/s"),),
    ),
)
CAPTIONS = {  # of the charts that are not over time
    "layers": "calib/c.<site> at the last probe, in the order of the forward pass: the constant that stands in for "
    "1/scale. It varies over depth; values outside 0.02 to 50 or wild neighbours mean that the warmup was too short. "
    "taper/gain_rms.<site> is the tapered gain's size, which started as the norm's own.",
    "heat": "scale/rms.<site> of one run, over steps and sites. Relative: ln of the scale over its value at k_warmup "
    "as measured; growth that starts at an early site and is carried on by all later ones is a blow-up in the making. "
    "Absolute: log10 of the scale. The relative colours span what comes after k_warmup; the growth before it saturates "
    "them.",
    "mismatch": "calib/mismatch.<site> of one run from k_warmup on: mean over tokens of ln(c · scale). At 0 the "
    "constant c stands in for 1/scale; at +0.5 the tapered branch is 1.65 times as large as the norm's. What is there "
    "at k_taper, where c is all that is left, the model has to make up for. The colours span ±0.5.",
    "tokens": "Radial gradient of single tokens of the probe batch at the end, nats per e-fold: automatic "
    "differentiation against the theory, which needs the logits alone; one run of each mode. Tokens lie on the "
    "diagonal where the final norm is gone and on the horizontal line where it is in place.",
}


def payload(comparison: Comparison) -> dict[str, Any]:
    """The runs, their numbers and the charts as plain data. Equal lists of steps are stored once, in `grids`."""
    grids: dict[tuple[int, ...], int] = {}
    limit = max(100, min(1000, POINTS // max(1, len(comparison.runs))))
    runs = [
        {"mode": place, "size": mode.size} | run_payload(comparison, run, grids, limit)
        for place, mode in enumerate(comparison.modes)
        for run in mode.runs
    ]
    return {
        "modes": [mode_payload(comparison, mode) for mode in comparison.modes],
        "runs": runs,
        "grids": [list(grid) for grid in grids],
        "charts": [asdict(chart) for chart in CHARTS],
        "growth": GROWTH,
        "captions": CAPTIONS,
    }


def mode_payload(comparison: Comparison, mode: Mode) -> dict[str, Any]:
    """A mode and its line in the verdict: estimates as text."""
    logits, gap = mode.estimate(comparison.logit_gap), mode.estimate(comparison.gap)
    first, n, counted = mode.first, len(mode.counted), mode.counted.values()
    others = {
        name: [run.reference_growths[name] for run in counted if name in run.reference_growths]
        for name in ("baseline", "internal_taper")
    }
    against = "reference" if mode.is_baseline else "no baseline"
    return {
        "label": mode.label,
        "size": mode.size,
        "baseline": mode.is_baseline,
        "verdict": mode.verdict,
        "growth": interval(mode.estimate(lambda run: run.growth), "+.2f") or number(first.growth, "+.2f"),
        "references": [f"{name} {number(fmean(values), '+.2f')}" for name, values in others.items() if values],
        "drift": interval(mode.estimate(lambda run: run.drift), "+.2f") or number(first.drift, "+.2f"),
        "logit_norm": number(first.last("logits/norm_mean"), ".1f"),
        "val_loss": number(first.val_loss, ".4f"),
        "logit_gap": against if mode.is_baseline or logits is None else interval(logits, "+.1f", " %", n),
        "gap": against if mode.is_baseline or gap is None else interval(gap, "+.2f", " %", n),
        "told": "" if mode.is_baseline else told(gap),
    }


def run_payload(comparison: Comparison, run: Run, grids: dict[tuple[int, ...], int], limit: int) -> dict[str, Any]:
    """One run. `thinned` names the metrics of which not every point is drawn; `k_taper` is null without a taper."""
    series, thinned = {}, []
    for metric in dict.fromkeys(line.metric for chart in CHARTS for line in chart.lines):
        points = drawn(comparison, run, metric)
        if not any(value is not None for _, value in points):
            continue
        kept = thin(points, limit)
        if len(kept) < len(points):
            thinned.append(metric)
        steps, values = zip(*kept, strict=True)
        series[metric] = [grids.setdefault(steps, len(grids)), [short(value) for value in values]]
    own = ("name", "norm", "anchor", "seed", "status", "verdict", "tokens_per_step", "k_warmup", "k_taper")
    return {key: getattr(run, key) for key in own} | {
        "growth": short(run.growth),
        "series": series,
        "thinned": thinned,
        "derived_force": run.derives_force,
        "layers": layers(run),
        "heat": heat(run, "scale/rms."),
        "mismatch": heat(run, MISMATCH),
        "tokens": run.tokens and {key: [short(v) for v in run.tokens[key]] for key in ("theory", "measured")},
    }


def drawn(comparison: Comparison, run: Run, metric: str) -> Points:
    """The points of a metric. GAP: val/loss over the baseline's at the same step, per cent; none for a baseline."""
    base = comparison.baseline_of(run)
    if metric != GAP:
        return run.points(metric)
    losses = dict(base.points("val/loss")) if base and base is not run else {}
    pairs = ((step, loss, losses.get(step)) for step, loss in run.points("val/loss"))
    return [(step, 100 * (loss / other - 1)) for step, loss, other in pairs if loss is not None and other]


def layers(run: Run) -> dict[str, Any] | None:
    """Calibrated scalar and gain per site at the last probe after the calibration; None without tapered norms."""
    sites = run.sites("calib/c.")
    rows = [row for row in run.rows if sites and f"calib/c.{sites[0]}" in row and row["step"] > (run.k_warmup or 0)]
    if not rows:
        return None
    prefixes = {"c": "calib/c.", "gain": "taper/gain_rms."}
    found = {name: [short(rows[-1].get(prefix + site)) for site in sites] for name, prefix in prefixes.items()}
    return {"sites": sites, **found}


def heat(run: Run, prefix: str) -> dict[str, Any] | None:
    """The metrics <prefix><site>, sites by steps; the step of the calibration is always among them."""
    sites = run.sites(prefix)
    rows = [row for row in run.rows if sites and f"{prefix}{sites[0]}" in row]
    if not rows:
        return None
    every = -(-len(rows) // HEAT_COLUMNS)
    kept = [row for i, row in enumerate(rows) if i % every == 0 or row is rows[-1] or row["step"] == run.k_warmup]
    return {
        "sites": sites,
        "steps": [row["step"] for row in kept],
        "values": [[short(row.get(f"{prefix}{site}")) for row in kept] for site in sites],
        "thinned": len(kept) < len(rows),
    }


def thin(points: Points, limit: int) -> Points:
    """At most about `limit` points: of equal intervals the first, the smallest and the largest; both ends stay.

    The extremes keep the peaks, and a value that is not finite is one, too. The first points are the steps that seeds
    have in common, where the page draws their mean; so that runs of unequal length share them, too, an interval is a
    power of two.
    """
    if len(points) <= limit:
        return points
    size = 1 << (-(-3 * len(points) // limit) - 1).bit_length()
    kept = {*range(0, len(points), size), len(points) - 1}
    for start in range(0, len(points), size):
        bucket = range(start, min(start + size, len(points)))
        finite = [i for i in bucket if points[i][1] is not None]
        kept |= {i for i in bucket if points[i][1] is None}
        if finite:
            kept |= {min(finite, key=lambda i: points[i][1] or 0.0), max(finite, key=lambda i: points[i][1] or 0.0)}
    return [points[i] for i in sorted(kept)]


def short(value: float | None) -> float | None:
    """Five significant digits: finer than a pixel."""
    return None if value is None else float(f"{value:.5g}")


def notes(runs: Sequence[dict[str, Any]]) -> list[str]:
    """What the page must say about the numbers that it draws."""
    said = []
    if len({run["mode"] for run in runs}) > COLOURS:
        said.append(f"There are more than {COLOURS} modes, so colours repeat: hover over a line to see its run.")
    if thinned := [run for run in runs if run["thinned"] or (run["heat"] or {}).get("thinned")]:
        said.append(
            f"Of {len(thinned)} of {len(runs)} runs not every point is drawn: of each short interval the first, "
            "the smallest and the largest (heat maps: every n-th column). metrics.jsonl has them all."
        )
    statuses = {run["status"] for run in runs}
    if "diverged" in statuses and len(statuses) > 1:
        said.append(
            "Vertical axes fit the runs that did not diverge; the autoscale button of a chart shows all of them."
        )
    if any(run["derived_force"] for run in runs):
        said.append(
            "Runs without a logged anchor/force: it is computed here from the mean scale on the probe batch, which "
            "leaves out the spread of the tokens."
        )
    return said
