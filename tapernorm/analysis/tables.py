"""What a comparison of runs says, in a sentence and in tables of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tapernorm.analysis.compare import UNDECIDED, Comparison, outlying, pairs
from tapernorm.analysis.format import interval, number
from tapernorm.analysis.intervals import OUTLIER_MIN, OUTLIER_Z, Estimate
from tapernorm.analysis.runs import GROWTH, LEVER
from tapernorm.config.schema import leaves
from tapernorm.runtime.saved import OWN, show, within

LISTED = 3  # modes that a headline names

RULE = (
    "Where a standard norm reads the residual stream last, its scale has no effect on the logits: no chasing. "
    "Elsewhere, over the steps after the gate has closed: the scale has an effect if the radial gradient on the probe "
    f"batch is at least {LEVER:g} of its theory. Then a growth (ln of the level at the end over the one at the first "
    f"step with gate 0) above +{GROWTH:g} e-folds ({100 * (math.exp(GROWTH) - 1):.0f} %) is chasing if the loss pulls "
    "outwards on the training batches and the same seed's baseline and internal taper, where they are here, grow less "
    "over the same steps; with an anchor that holds a level, only if the scale ends as far above the one at k_warmup, "
    f"too. Within ±{GROWTH:g} the scale is held. Drift is relative to the level at k_warmup as measured, everywhere "
    "on this page."
)


def headline(comparison: Comparison) -> str:
    """One sentence: which modes chase logits."""
    runs, modes = comparison.runs, comparison.modes
    chasing = [mode for mode in modes if mode.verdict[0] == "chasing"]
    judged = [mode for mode in modes if any(run.verdict not in ("early", "failed") for run in mode.runs)]
    if all(run.verdict == "failed" for run in runs):
        return "No run can be judged: all have failed."
    if not judged:
        return "Too early to tell whether a run chases logits: no gate has closed yet."
    if len(runs) == 1:
        why = "above its level at k_warmup" if (runs[0].pull or 0.0) < 0 else "by the pull of the loss"
        return {
            "chasing": "This run chases logits.",
            "growing": f"No logit chasing: the residual scale grows, but not {why}.",
            "shrinking": "No logit chasing: the residual scale shrinks.",
            "held": "No logit chasing: the residual scale is held.",
            "inert": "No logit chasing: the residual scale has no effect on the logits.",
            "normed": "No logit chasing: the final norm is in place.",
            "diverged": "This run diverged.",
        }[runs[0].verdict]
    if not chasing:
        waiting = len(modes) - len(judged)
        later = f" so far; of {waiting} of {len(modes)} it is too early to tell" if waiting else ""
        return f"No mode chases logits{later}."
    names = [
        f"{comparison.name(mode)} ({sum(run.verdict == 'chasing' for run in mode.runs)} of {len(mode.runs)} seeds)"
        for mode in chasing
    ]
    more = [f"and {len(names) - LISTED} more"] if len(names) > LISTED else []
    verb = "chases" if len(chasing) == 1 else "chase"
    return f"{len(chasing)} of {len(judged)} modes {verb} logits: {'; '.join(names[:LISTED] + more)}."


@dataclass(frozen=True)
class Table:
    """A table of text. `align` has one letter per column: l, r, or s for what goes below the column before it."""

    id: str
    title: str
    note: str
    columns: tuple[str, ...]
    align: str
    rows: tuple[tuple[str, ...], ...]


def filled(id: str, title: str, note: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> Table:
    """The table without the columns, of (heading, alignment), that are empty in every row."""
    kept = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    headings, align = zip(*(columns[place] for place in kept), strict=True) if kept else ((), ())
    return Table(id, title, note, headings, "".join(align), tuple(tuple(row[place] for place in kept) for row in rows))


def tables(comparison: Comparison) -> list[Table]:
    """The tables of the report; those that one run alone cannot fill are left out."""
    if len(comparison.runs) == 1:
        return [runs_table(comparison)]
    compared = pairs_table(comparison)
    return [
        *(statistics_table(comparison, size) for size in comparison.sizes),
        *([compared] if compared.rows else []),
        runs_table(comparison),
        differences_table(comparison),
    ]


def statistics_table(comparison: Comparison, size: str) -> Table:
    rows = []
    for mode in comparison.of_size(size):
        marks, n = outlying(comparison, mode), len(mode.counted)
        losses, gaps = mode.values(lambda run: run.val_loss), mode.values(comparison.gap)
        gap, best = (None if mode.is_baseline else mode.estimate(of) for of in (comparison.gap, comparison.best_gap))
        rows.append(
            (
                mode.label,
                str(n),
                interval(mode.estimate(lambda run: run.val_loss), ".3f"),
                each(losses, ".3f", marks),
                interval(gap, "+.2f", n=n),
                "" if mode.is_baseline else each(gaps, "+.2f", marks),
                "reference" if mode.is_baseline else told(gap),
                interval(best, "+.2f", n=n),
                interval(mode.estimate(lambda run: run.growth), "+.2f"),
                interval(mode.estimate(lambda run: run.drift), "+.2f"),
                interval(mode.estimate(lambda run: run.last("logits/norm_mean")), ".0f"),
            )
        )
    columns = [
        ("mode", "l"), ("n", "r"), ("validation loss", "r"), ("each seed", "s"), ("gap to baseline, %", "r"),
        ("each seed", "s"), ("told by the interval", "l"), ("gap at T*, %", "r"), ("growth since gate 0", "r"),
        ("drift, e-folds", "s"), ("logit norm", "r"),
    ]  # fmt: skip
    most = max(len(mode.counted) for mode in comparison.of_size(size))
    rule = f"Outliers by the modified z-score (|z| > {OUTLIER_Z:g}) are marked * and counted all the same"
    if most < OUTLIER_MIN:
        rule = f"With at most {most} seeds no outlier can be told (the rule needs {OUTLIER_MIN}); none is left out"
    note = (
        "Mean (95 % interval over seeds, Student's t). The gap pairs each run with the baseline of the same seed and "
        f"settings; T* is each run's best temperature for its logits. {rule}. The order of the rows is fixed, not a "
        "ranking."
    )
    return filled(f"statistics-{size}", f"Seeds and intervals, {size}", note, columns, rows)


def told(gap: Estimate | None) -> str:
    """What the interval of the gap says in words."""
    if gap is None:
        return "no baseline"
    if gap.low is None:
        return "one seed: no interval"
    return ("above" if gap.mean > 0 else "below") + " baseline" if gap.excludes_zero else UNDECIDED


def pairs_table(comparison: Comparison) -> Table:
    compared = pairs(comparison)
    rows = [
        (
            pair.first.size if len(comparison.sizes) > 1 else "",
            pair.first.label,
            pair.second.label,
            str(pair.mean.n),
            interval(pair.mean, "+.2f"),
            each(pair.gaps, "+.2f"),
            number(pair.mean.p, ".3f"),
            number(pair.p_holm, ".3f"),
            pair.conclusion,
        )
        for pair in compared
    ]
    tested = sum(pair.mean.p is not None for pair in compared)
    number_of_tests = (
        f" With {tested} comparisons about {0.05 * tested:.1f} of them would seem different by chance alone; Holm's p "
        "accounts for their number."
    )
    note = (
        "Validation loss of the first mode against the second, paired by seed, per cent (95 % interval)."
        f"{number_of_tests if tested > 1 else ''} Modes whose interval contains zero are not distinguishable, whatever "
        "their means."
    )
    columns = [
        ("size", "l"), ("mode", "l"), ("against", "l"), ("n", "r"), ("difference, %", "r"), ("each seed", "r"),
        ("p", "r"), ("Holm's p", "r"), ("validation loss of the mode", "l"),
    ]  # fmt: skip
    return filled("pairs", "All pairs of modes", note, columns, rows)


RUN_COLUMNS = [  # heading, alignment, what of a run's row (see Comparison.row), and how it is written
    ("seed", "r", "seed", ""),
    ("status", "l", "status", ""),
    ("step", "r", "step", ""),
    ("validation loss", "r", "val_loss", ".4f"),
    ("at T*", "s", "val_loss_best_temperature", ".4f"),
    ("T*", "s", "best_temperature", ".3f"),
    ("gap, %", "r", "gap_percent", "+.2f"),
    ("at T*", "s", "gap_best_temperature_percent", "+.2f"),
    ("growth since gate 0", "r", "growth", "+.2f"),
    ("baseline's", "s", "growth_baseline", "+.2f"),
    ("internal_taper's", "s", "growth_internal_taper", "+.2f"),
    ("drift", "r", "drift", "+.2f"),
    ("worst mismatch", "r", "mismatch_end", ".2f"),
    ("at gate 0", "s", "mismatch_gate_0", ".2f"),
    ("logit norm", "r", "logit_norm", ".1f"),
    ("pull", "r", "pull", "+.4f"),
    ("verdict", "l", "verdict", ""),
    ("directory", "l", "run", ""),
]


def runs_table(comparison: Comparison) -> Table:
    rows = []
    for mode in comparison.modes:
        for run in mode.runs:
            row = comparison.row(mode, run)
            if mode.is_baseline:
                row |= {"gap_percent": None, "gap_best_temperature_percent": None}
            rows.append([comparison.name(mode), *(number(row[key], form) for _, _, key, form in RUN_COLUMNS)])
    note = (
        "Growth since gate 0: ln of the last scale/final_rms_mean over the one at the first step with gate 0 (without "
        "a taper: at the same step), below it the same seed's baseline's and internal_taper's. Drift: the same "
        "over the one at k_warmup. Pull: radial/train_mean averaged over the steps after the gate has closed, nats per "
        "e-fold; negative pulls the scale up. Worst mismatch: the largest |calib/mismatch.<site>| at the end. T*: the "
        "best temperature, the one number to divide all logits by that gives the smallest validation loss."
    )
    return filled("runs", "Every run", note, [("mode", "l"), *(column[:2] for column in RUN_COLUMNS)], rows)


def differences_table(comparison: Comparison) -> Table:
    """Settings that are not the same in all modes; one row per mode, its seeds' values together."""
    hidden = (*OWN, "tracking", "cache_dir", "report", "seed")
    settings = [[dict(leaves(run.resolved)) for run in mode.runs if run.resolved] for mode in comparison.modes]
    keys = dict.fromkeys(key for mode in settings for run in mode for key in run if not within(key, hidden))
    texts = {key: ["; ".join(dict.fromkeys(show(run.get(key)) for run in mode)) for mode in settings] for key in keys}
    differing = {key: of for key, of in texts.items() if len(set(of)) > 1 or any("; " in text for text in of)}
    seeds = [", ".join(str(run.seed) for run in mode.runs) for mode in comparison.modes]
    rows = tuple(zip(map(comparison.name, comparison.modes), seeds, *differing.values(), strict=True))
    same = "" if differing else " There are none but the seeds."
    note = f"Resolved settings that are not the same everywhere.{same}"
    columns = ("mode", "seeds", *differing)
    return Table("differences", "Differences between the configurations", note, columns, "l" * len(columns), rows)


def each(values: dict[int, float], form: str, marks: dict[int, str] | None = None) -> str:
    """Every seed's value in the order of the seeds, outliers with a star."""
    return ", ".join(f"{number(value, form)}{'*' * (seed in (marks or {}))}" for seed, value in values.items())
