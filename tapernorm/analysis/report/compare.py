"""Runs put side by side: modes with their seeds, baselines, intervals, pairs, and what they say in words."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tapernorm.analysis.intervals import (
    OUTLIER_MIN,
    OUTLIER_Z,
    Estimate,
    estimate,
    holm,
    outliers,
    p_value,
    paired_percent,
)
from tapernorm.analysis.report.runs import GROWTH, LEVER, VERDICTS, Run, silence
from tapernorm.config.schema import leaves
from tapernorm.runtime.progress import clock
from tapernorm.runtime.saved import ADJUSTABLE, OWN, show, within

LISTED = 3  # modes that a headline names
UNDECIDED = "not distinguishable"
BEST_LOSS = "val/loss_best_temperature"


@dataclass(frozen=True)
class Mode:
    """Runs that differ in their seed alone."""

    label: str
    size: str
    runs: tuple[Run, ...]  # ascending seeds

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def is_baseline(self) -> bool:
        return self.first.is_baseline

    @property
    def counted(self) -> dict[int, Run]:
        """The finished run of each seed; of several with the same seed the first."""
        by_seed: dict[int, Run] = {}
        for run in self.runs:
            if run.finished and run.seed is not None:
                by_seed.setdefault(run.seed, run)
        return by_seed

    def values(self, measure: Callable[[Run], float | None]) -> dict[int, float]:
        """A number of each counted seed, where the run has it."""
        found = {seed: measure(run) for seed, run in self.counted.items()}
        return {seed: value for seed, value in found.items() if value is not None}


@dataclass(frozen=True)
class Pair:
    """Validation losses of two modes, paired by seed: 100 (first/second - 1)."""

    first: Mode
    second: Mode
    gaps: dict[int, float]
    mean: Estimate
    p: float | None
    p_holm: float | None


@dataclass(frozen=True)
class Comparison:
    """All runs of a report."""

    runs: tuple[Run, ...]
    modes: tuple[Mode, ...]
    baselines: dict[str, Run]  # by match key

    def gap(self, run: Run) -> float | None:
        """Validation loss against the same seed's baseline, per cent."""
        return self._against(run, lambda found: found.val_loss)

    def best_gap(self, run: Run) -> float | None:
        """The same of the losses at the best temperature, which leaves out what a scale of all logits could mend."""
        return self._against(run, lambda found: found.last(BEST_LOSS))

    def logit_gap(self, run: Run) -> float | None:
        """Logit norm against the same seed's baseline, per cent."""
        return self._against(run, lambda found: found.last("logits/norm_mean"))

    def baseline_of(self, run: Run) -> Run | None:
        return self.baselines.get(run.match) if run.resolved else None

    def _against(self, run: Run, measure: Callable[[Run], float | None]) -> float | None:
        base = self.baseline_of(run)
        own, other = measure(run), measure(base) if base else None
        return 100 * (own / other - 1) if run.finished and own is not None and other else None

    @property
    def sizes(self) -> list[str]:
        return list(dict.fromkeys(mode.size for mode in self.modes))

    def of_size(self, size: str) -> list[Mode]:
        return [mode for mode in self.modes if mode.size == size]

    def mode_of(self, run: Run) -> Mode:
        return next(mode for mode in self.modes if run in mode.runs)


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Group runs into modes and find their baselines and references."""
    baselines: dict[str, Run] = {}
    for run in runs:
        if run.is_baseline and run.finished:
            baselines.setdefault(run.match, run)
    runs = [run if run.final_norm else replace(run, references=references(run, runs, baselines)) for run in runs]
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_mode_key(run), []).append(run)
    sizes = _size_labels([members[0] for members in groups.values()])
    labels = _mode_labels([members[0] for members in groups.values()], sizes)
    modes = [
        Mode(label, size, tuple(sorted(members, key=lambda run: (run.seed is None, run.seed or 0))))
        for members, size, label in zip(groups.values(), sizes, labels, strict=True)
    ]
    order = {"baseline": 0, "internal_taper": 1, "final_taper": 2, "all_taper": 3}
    first_seen = {size: number for number, size in enumerate(sizes)}
    # A fixed order, never by result: ranking differences that may be noise would claim what is not known.
    modes.sort(key=lambda mode: (first_seen[mode.size], order.get(mode.first.norm, 9), mode.first.anchor != "none"))
    return Comparison(tuple(run for mode in modes for run in mode.runs), tuple(modes), baselines)


def references(run: Run, runs: Sequence[Run], baselines: dict[str, Run]) -> list[Run]:
    """The same seed's baseline and internal taper with the same gate, as far as there are finished ones."""
    inner = (
        other
        for other in runs
        if other.finished and other.final_norm and other.anchor == "none" and other.k_taper == run.k_taper is not None
    )
    found = [baselines.get(run.match), next((other for other in inner if other.match == run.match), None)]
    return [other for other in found if other and run.resolved]


def pairs(comparison: Comparison) -> list[Pair]:
    """Every two modes of one size that share a finished seed; p-values are adjusted over all of the list."""
    found = []
    for size in comparison.sizes:
        for first, second in itertools.combinations(comparison.of_size(size), 2):
            gaps = paired_percent(second.values(lambda run: run.val_loss), first.values(lambda run: run.val_loss))
            mean = estimate(list(gaps.values()))
            if mean is not None:
                found.append((second, first, gaps, mean, p_value(list(gaps.values()))))
    adjusted = holm([pair[4] for pair in found])
    return [Pair(*pair, p_holm=p) for pair, p in zip(found, adjusted, strict=True)]


def conclusion(pair: Pair) -> str:
    """In words, and no more than the interval allows."""
    if pair.mean.low is None:
        return "one pair: no interval"
    if not pair.mean.excludes_zero:
        return UNDECIDED
    word = "higher loss" if pair.mean.mean > 0 else "lower loss"
    if pair.p_holm is None:
        return f"{word} (equal in every seed)"
    return word if pair.p_holm < 0.05 else f"{word}; not after Holm's correction"


def missing_seeds(comparison: Comparison, mode: Mode) -> list[int]:
    """Seeds that other modes of this size have and this one has not."""
    seeds = {run.seed for other in comparison.of_size(mode.size) for run in other.runs if run.seed is not None}
    return sorted(seeds - {run.seed for run in mode.runs})


def outlying(comparison: Comparison, mode: Mode) -> dict[int, str]:
    """{seed: what stands out} for loss and gap. Such runs are marked and counted all the same."""
    marks: dict[int, str] = {}
    for name, measure in (("loss", lambda run: run.val_loss), ("gap", comparison.gap)):
        values = mode.values(measure)
        for seed, out in zip(values, outliers(list(values.values())) or [], strict=False):
            if out:
                marks[seed] = f"{marks[seed]}, {name}" if seed in marks else name
    return marks


def uncounted(comparison: Comparison) -> Iterator[str]:
    """A line for every run that is in no mean, and why; for every seed that is missing."""
    for mode in comparison.modes:
        counted = mode.counted.values()
        for run in mode.runs:
            if run in counted:
                continue
            if run.finished:
                yield f"{_title(mode, run)}: a second run of this seed, shown but not counted ({run.name})"
            else:
                yield f"{_title(mode, run)}: {state_of(run)} ({run.name})"
        if missing := missing_seeds(comparison, mode):
            listed = ", ".join(map(str, missing))
            yield f"{mode.label} ({mode.size}): no run of seed{'s' * (len(missing) > 1)} {listed}"
        if not any(comparison.baseline_of(run) for run in mode.runs) and mode.counted:
            yield f"{mode.label} ({mode.size}): no finished baseline with the same seed and settings, so no gap"


def state_of(run: Run) -> str:
    """Where a run that is not finished stands, and why it stands there."""
    quiet = silence(run.directory) if run.status == "unfinished" else None
    since = "" if quiet is None else f", last metric {clock(quiet)} ago"
    return f"{run.status} at step {run.last_step}{since}{f': {run.error}' if run.error else ''}"


def _title(mode: Mode, run: Run) -> str:
    return f"{mode.label} ({mode.size}), seed {run.seed}"


# ------------------------------------------------------------------------------------------------------------ verdict


def mode_verdict(mode: Mode) -> tuple[str, str]:
    """(kind, badge text): the gravest verdict that any seed has, and how many seeds have it."""
    kinds = Counter(run.verdict for run in mode.runs)
    kind = next(kind for kind in (*list(VERDICTS)[:1], "diverged", "failed", *VERDICTS) if kinds[kind])
    share = "" if len(mode.runs) == 1 else f", {kinds[kind]} of {len(mode.runs)}"
    return kind, f"{VERDICTS[kind]}{share}"


def headline(comparison: Comparison) -> str:
    """One sentence: which modes chase logits."""
    several = len(comparison.sizes) > 1
    chasing = [mode for mode in comparison.modes if mode_verdict(mode)[0] == "chasing"]
    judged = [mode for mode in comparison.modes if any(run.verdict not in ("early", "failed") for run in mode.runs)]
    if all(run.verdict == "failed" for run in comparison.runs):
        return "No run can be judged: all have failed."
    if not judged:
        return "Too early to tell whether a run chases logits: no gate has closed yet."
    if len(comparison.runs) == 1:
        run = comparison.runs[0]
        why = "above its level at k_warmup" if (run.pull or 0.0) < 0 else "by the pull of the loss"
        return {
            "chasing": "This run chases logits.",
            "growing": f"No logit chasing: the residual scale grows, but not {why}.",
            "shrinking": "No logit chasing: the residual scale shrinks.",
            "held": "No logit chasing: the residual scale is held.",
            "inert": "No logit chasing: the residual scale has no effect on the logits.",
            "normed": "No logit chasing: the final norm is in place.",
            "diverged": "This run diverged.",
        }[run.verdict]
    waiting = len(comparison.modes) - len(judged)
    if not chasing:
        later = f" so far; of {waiting} of {len(comparison.modes)} it is too early to tell" if waiting else ""
        return f"No mode chases logits{later}."
    names = [
        f"{mode.label}{f' ({mode.size})' if several else ''}"
        + f" ({sum(run.verdict == 'chasing' for run in mode.runs)} of {len(mode.runs)} seeds)"
        for mode in chasing
    ]
    verb = "chases" if len(chasing) == 1 else "chase"
    listed = "; ".join(names[:LISTED]) + (f"; and {len(names) - LISTED} more" if len(names) > LISTED else "")
    return f"{len(chasing)} of {len(judged)} modes {verb} logits: {listed}."


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


# ------------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Table:
    """A table of text. `align` has one letter per column: l, r, or s for what goes below the column before it."""

    id: str
    title: str
    note: str
    columns: tuple[str, ...]
    align: str
    rows: tuple[tuple[str, ...], ...]


def filled(id: str, title: str, note: str, columns: Sequence[str], align: str, rows: Sequence[Sequence[str]]) -> Table:
    """The table without the columns that are empty in every row."""
    kept = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    kept_rows = tuple(tuple(row[place] for place in kept) for row in rows)
    return Table(id, title, note, tuple(columns[p] for p in kept), "".join(align[p] for p in kept), kept_rows)


def tables(comparison: Comparison) -> list[Table]:
    """The tables of the report; those that one run alone cannot fill are left out."""
    several = len(comparison.runs) > 1
    found = [statistics_table(comparison, size) for size in comparison.sizes] if several else []
    if several and (compared := pairs_table(comparison)).rows:
        found.append(compared)
    found.append(runs_table(comparison))
    if several:
        found.append(differences_table(comparison))
    return found


def statistics_table(comparison: Comparison, size: str) -> Table:
    rows = []
    for mode in comparison.of_size(size):
        marks = outlying(comparison, mode)
        losses, gaps = mode.values(lambda run: run.val_loss), mode.values(comparison.gap)
        gap, best = estimate(list(gaps.values())), estimate(list(mode.values(comparison.best_gap).values()))
        rows.append(
            (
                mode.label,
                str(len(mode.counted)),
                interval(estimate(list(losses.values())), ".3f"),
                each(losses, ".3f", marks),
                "" if mode.is_baseline else interval(gap, "+.2f", n=len(mode.counted)),
                "" if mode.is_baseline else each(gaps, "+.2f", marks),
                "reference" if mode.is_baseline else told(gap),
                "" if mode.is_baseline else interval(best, "+.2f", n=len(mode.counted)),
                interval(estimate(list(mode.values(lambda run: run.growth).values())), "+.2f"),
                interval(estimate(list(mode.values(lambda run: run.drift).values())), "+.2f"),
                interval(estimate(list(mode.values(lambda run: run.last("logits/norm_mean")).values())), ".0f"),
            )
        )
    columns = (
        "mode", "n", "validation loss", "each seed", "gap to baseline, %", "each seed", "told by the interval",
        "gap at T*, %", "growth since gate 0", "drift, e-folds", "logit norm",
    )  # fmt: skip
    counts = [len(mode.counted) for mode in comparison.of_size(size)]
    rule = f"Outliers by the modified z-score (|z| > {OUTLIER_Z:g}) are marked * and counted all the same"
    if max(counts) < OUTLIER_MIN:
        rule = (
            f"With at most {max(counts)} seeds no outlier can be told (the rule needs {OUTLIER_MIN}); none is left out"
        )
    note = (
        "Mean (95 % interval over seeds, Student's t). The gap pairs each run with the baseline of the same seed and "
        f"settings; T* is each run's best temperature for its logits. {rule}. The order of the rows is fixed, not a "
        "ranking."
    )
    return filled(f"statistics-{size}", f"Seeds and intervals, {size}", note, columns, "lrrsrslrrsr", rows)


def told(gap: Estimate | None) -> str:
    """What the interval of the gap says in words."""
    if gap is None:
        return "no baseline"
    if gap.low is None:
        return "one seed: no interval"
    return ("above" if gap.mean > 0 else "below") + " baseline" if gap.excludes_zero else UNDECIDED


def pairs_table(comparison: Comparison) -> Table:
    compared = pairs(comparison)
    several = len(comparison.sizes) > 1
    rows = [
        (
            *((pair.first.size,) if several else ()),
            pair.first.label,
            pair.second.label,
            str(pair.mean.n),
            interval(pair.mean, "+.2f"),
            each(pair.gaps, "+.2f", {}),
            number(pair.p, ".3f"),
            number(pair.p_holm, ".3f"),
            conclusion(pair),
        )
        for pair in compared
    ]
    tested = sum(pair.p is not None for pair in compared)
    number_of_tests = (
        f" With {tested} comparisons about {0.05 * tested:.1f} of them would seem different by chance alone; Holm's p "
        "accounts for their number."
    )
    note = (
        "Validation loss of the first mode against the second, paired by seed, per cent (95 % interval)."
        f"{number_of_tests if tested > 1 else ''} Modes whose interval contains zero are not distinguishable, whatever "
        "their means."
    )
    columns = (
        *(("size",) if several else ()),
        "mode", "against", "n", "difference, %", "each seed", "p", "Holm's p", "validation loss of the mode",
    )  # fmt: skip
    return Table("pairs", "All pairs of modes", note, columns, "l" * several + "llrrrrrl", tuple(rows))


def runs_table(comparison: Comparison) -> Table:
    rows = [
        (
            mode.label if len(comparison.sizes) == 1 else f"{mode.label} ({mode.size})",
            "" if run.seed is None else str(run.seed),
            run.status,
            str(run.last_step),
            number(run.val_loss, ".4f"),
            number(run.last(BEST_LOSS), ".4f"),
            number(run.last("val/best_temperature"), ".3f"),
            "" if run.is_baseline else number(comparison.gap(run), "+.2f"),
            "" if run.is_baseline else number(comparison.best_gap(run), "+.2f"),
            number(run.growth, "+.2f"),
            *(number(run.reference_growths.get(name), "+.2f") for name in ("baseline", "internal_taper")),
            number(run.drift, "+.2f"),
            *(number(worst, ".2f") for worst in reversed(run.mismatches)),
            number(run.last("logits/norm_mean"), ".1f"),
            number(run.pull, "+.4f"),
            VERDICTS[run.verdict],
            run.name,
        )
        for mode in comparison.modes
        for run in mode.runs
    ]
    columns = (
        "mode", "seed", "status", "step", "validation loss", "at T*", "T*", "gap, %", "at T*", "growth since gate 0",
        "baseline's", "internal_taper's", "drift", "worst mismatch", "at gate 0", "logit norm", "pull", "verdict",
        "directory",
    )  # fmt: skip
    note = (
        "Growth since gate 0: ln of the last scale/final_rms_mean over the one at the first step with gate 0 (without "
        "a taper: at the same step), below it the same seed's baseline's and internal_taper's. Drift: the same "
        "over the one at k_warmup. Pull: radial/train_mean averaged over the steps after the gate has closed, nats per "
        "e-fold; negative pulls the scale up. Worst mismatch: the largest |calib/mismatch.<site>| at the end. T*: the "
        "best temperature, the one number to divide all logits by that gives the smallest validation loss."
    )
    return filled("runs", "Every run", note, columns, "lrlrrssrsrssrrsrrll", rows)


def differences_table(comparison: Comparison) -> Table:
    """Settings that are not the same in all modes; one row per mode, its seeds' values together."""
    hidden = (*OWN, "tracking", "cache_dir", "report", "seed")
    settings = [
        [{k: v for k, v in leaves(run.resolved) if not within(k, hidden)} for run in mode.runs]
        for mode in comparison.modes
    ]
    keys = dict.fromkeys(key for mode in settings for run in mode for key in run)
    texts = {key: [_distinct([run.get(key) for run in mode if run]) for mode in settings] for key in keys}
    differing = [key for key in keys if len(set(texts[key])) > 1 or any("; " in text for text in texts[key])]
    rows = [
        (
            mode.label if len(comparison.sizes) == 1 else f"{mode.label} ({mode.size})",
            ", ".join(str(run.seed) for run in mode.runs),
            *(texts[key][number] for key in differing),
        )
        for number, mode in enumerate(comparison.modes)
    ]
    same = "" if differing else " There are none but the seeds."
    note = f"Resolved settings that are not the same everywhere.{same}"
    columns = ("mode", "seeds", *differing)
    return Table(
        "differences", "Differences between the configurations", note, columns, "l" * len(columns), tuple(rows)
    )


def _distinct(values: Sequence[Any]) -> str:
    return "; ".join(dict.fromkeys(show(value) for value in values))


def number(value: float | None, form: str) -> str:
    """A number as text, '' for none; what rounds to zero has no sign."""
    if value is None:
        return ""
    text = f"{value:{form}}"
    return text if any(digit in text for digit in "123456789") else text.lstrip("+-")


def interval(found: Estimate | None, form: str, unit: str = "", n: int | None = None) -> str:
    """`+0.50 % (-1.55 to +2.56)`, the mean alone of one value, '' for none; it says so if they are not n."""
    if found is None:
        return ""
    fewer = "" if n in (None, found.n) else f"n = {found.n}"
    if found.low is None:
        return number(found.mean, form) + unit + (f" ({fewer})" if fewer else "")
    ends = f"{number(found.low, form)} to {number(found.high, form)}"
    return f"{number(found.mean, form)}{unit} ({ends}{f'; {fewer}' if fewer else ''})"


def each(values: dict[int, float], form: str, marks: dict[int, str]) -> str:
    """Every seed's value in the order of the seeds, outliers with a star."""
    return ", ".join(f"{number(value, form)}{'*' * (seed in marks)}" for seed, value in values.items())


# ------------------------------------------------------------------------------------------------------------- naming


def _mode_key(run: Run) -> str:
    """Everything but the seed and where and how the run happened."""
    if not run.resolved:
        return f"{run.norm} {run.anchor} {run.setting('model', 'name')}"
    hidden = (*ADJUSTABLE, *OWN, "seed")
    kept = {key: value for key, value in leaves(run.resolved) if not within(key, hidden)}
    return json.dumps(kept | {"model.init": _init(run)}, sort_keys=True)


def _init(run: Run) -> str:
    """Seeds of a taper from trained models start each from its own, and are one mode all the same."""
    return "random" if run.setting("model", "init") in (None, "random") else "trained"


def _size_labels(runs: Sequence[Run]) -> list[str]:
    """The model's name; with the data set's where there are several, and a number where that is not enough."""
    keys = []
    for run in runs:
        parts = {key: value for key, value in leaves(run.resolved) if within(key, ("model", "dataset"))}
        keys.append(json.dumps(parts | {"model.init": _init(run)}, sort_keys=True))
    names = [str(run.setting("model", "name") or "?") for run in runs]
    if len({run.setting("dataset", "name") for run in runs}) > 1:
        names = [f"{name}, {run.setting('dataset', 'name')}" for name, run in zip(names, runs, strict=True)]
    numbered: dict[str, list[str]] = {}
    for name, key in zip(names, keys, strict=True):
        if key not in numbered.setdefault(name, []):
            numbered[name].append(key)
    return [
        name if len(numbered[name]) == 1 else f"{name} #{numbered[name].index(key) + 1}"
        for name, key in zip(names, keys, strict=True)
    ]


def _mode_labels(runs: Sequence[Run], sizes: Sequence[str]) -> list[str]:
    """Norm and anchor; where these do not tell two modes of a size apart, also the settings that do."""
    labels = []
    for run, size in zip(runs, sizes, strict=True):
        alike = [r for r, s in zip(runs, sizes, strict=True) if (r.norm, r.anchor, s) == (run.norm, run.anchor, size)]
        base = run.norm if run.is_baseline else f"{run.norm}, {'no anchor' if run.anchor == 'none' else run.anchor}"
        labels.append(", ".join([base, *_telling(run, alike)]))
    return labels


def _telling(run: Run, alike: Sequence[Run]) -> list[str]:
    """`lr=0.005`: what was asked for and differs from runs with the same norm and anchor."""
    hidden = (*ADJUSTABLE, *OWN, "seed", "model.init")
    own, others = dict(leaves(run.resolved)), [dict(leaves(other.resolved)) for other in alike]
    asked = [dict(leaves(other.composed)) for other in alike]
    return [
        f"{key.removeprefix('optim.').removeprefix('trainer.')}={show(value)}"
        for key, value in own.items()
        if not within(key, hidden)
        and any(other.get(key) != value for other in others)
        # Values that derive from others are left out, unless nothing was asked for.
        and any(other.get(key) != asked[0].get(key) for other in asked)
    ]
