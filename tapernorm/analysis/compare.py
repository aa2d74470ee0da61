"""Runs put side by side: modes with their seeds, baselines, gaps and pairs, for sweeps' tables and reports."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tapernorm.analysis.intervals import Estimate, estimate, holm, outliers, paired_percent
from tapernorm.analysis.runs import VERDICTS, Run, silence
from tapernorm.config.schema import leaves
from tapernorm.runtime.progress import clock
from tapernorm.runtime.saved import ADJUSTABLE, OWN, show, within

UNDECIDED = "not distinguishable"
ORDER = {"baseline": 0, "internal_taper": 1, "final_taper": 2, "all_taper": 3}

Measure = Callable[[Run], float | None]


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

    def values(self, measure: Measure) -> dict[int, float]:
        """A number of each counted seed, where the run has it."""
        found = {seed: measure(run) for seed, run in self.counted.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def estimate(self, measure: Measure) -> Estimate | None:
        return estimate(list(self.values(measure).values()))

    @property
    def verdict(self) -> tuple[str, str]:
        """(kind, badge text): the gravest verdict that any seed has, and how many seeds have it."""
        kinds = Counter(run.verdict for run in self.runs)
        kind = next(kind for kind in ("chasing", "diverged", "failed", *VERDICTS) if kinds[kind])
        share = "" if len(self.runs) == 1 else f", {kinds[kind]} of {len(self.runs)}"
        return kind, f"{VERDICTS[kind]}{share}"


@dataclass(frozen=True)
class Pair:
    """Validation losses of two modes, paired by seed: 100 (first/second - 1)."""

    first: Mode
    second: Mode
    gaps: dict[int, float]
    mean: Estimate
    p_holm: float | None = None

    @property
    def conclusion(self) -> str:
        """In words, and no more than the interval allows."""
        if self.mean.low is None:
            return "one pair: no interval"
        if not self.mean.excludes_zero:
            return UNDECIDED
        word = "higher loss" if self.mean.mean > 0 else "lower loss"
        if self.p_holm is None:
            return f"{word} (equal in every seed)"
        return word if self.p_holm < 0.05 else f"{word}; not after Holm's correction"


@dataclass(frozen=True)
class Comparison:
    """All runs of a report."""

    modes: tuple[Mode, ...]
    baselines: dict[str, Run]  # by match key

    @property
    def runs(self) -> list[Run]:
        return [run for mode in self.modes for run in mode.runs]

    def baseline_of(self, run: Run) -> Run | None:
        return self.baselines.get(run.match) if run.resolved else None

    def gap(self, run: Run) -> float | None:
        """Validation loss against the same seed's baseline, per cent."""
        return self._against(run, lambda found: found.val_loss)

    def best_gap(self, run: Run) -> float | None:
        return self._against(run, lambda found: found.best_loss)

    def logit_gap(self, run: Run) -> float | None:
        return self._against(run, lambda found: found.last("logits/norm_mean"))

    def _against(self, run: Run, measure: Measure) -> float | None:
        base = self.baseline_of(run)
        own, other = measure(run), measure(base) if base else None
        return 100 * (own / other - 1) if run.finished and own is not None and other else None

    @property
    def sizes(self) -> list[str]:
        return list(dict.fromkeys(mode.size for mode in self.modes))

    def of_size(self, size: str) -> list[Mode]:
        return [mode for mode in self.modes if mode.size == size]

    def name(self, mode: Mode) -> str:
        """The mode's label, with its size where there are several."""
        return mode.label if len(self.sizes) == 1 else f"{mode.label} ({mode.size})"

    def row(self, mode: Mode, run: Run) -> dict[str, Any]:
        """A run's numbers. Nats per token (losses), per cent (gaps), e-folds (growth, drift, mismatch), nats per
        e-fold (pull)."""
        base = self.baseline_of(run)
        return {
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
            "val_loss_best_temperature": run.best_loss,
            "best_temperature": run.last("val/best_temperature"),
            "gap_percent": self.gap(run),
            "gap_best_temperature_percent": self.best_gap(run),
            "baseline": base.name if base else None,
            "outlier": outlying(self, mode).get(run.seed) if run.seed is not None else None,
            "growth": run.growth,
            **{f"growth_{name}": run.reference_growths.get(name) for name in ("baseline", "internal_taper")},
            "drift": run.drift,
            "level_at_k_warmup": run.last("scale/target"),
            **dict(zip(("mismatch_gate_0", "mismatch_end"), run.mismatches, strict=True)),
            "logit_norm": run.last("logits/norm_mean"),
            "logit_norm_gap_percent": self.logit_gap(run),
            "logit_max": run.last("logits/abs_max"),
            "lever": run.lever,
            "pull": run.pull,
            "verdict": VERDICTS[run.verdict],
            "tokens_per_s": run.last("throughput/tokens_per_s"),
            "seconds": run.summary.get("seconds"),
            "parameters": run.summary.get("parameters"),
            "error": run.error,
        }


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Group runs into modes and find their baselines and references."""
    baselines: dict[str, Run] = {}
    for run in runs:
        if run.is_baseline and run.finished:
            baselines.setdefault(run.match, run)
    groups: dict[str, list[Run]] = {}
    for run in runs:
        judged = run if run.final_norm else replace(run, references=references(run, runs, baselines))
        groups.setdefault(_mode_key(run), []).append(judged)
    firsts = [members[0] for members in groups.values()]
    sizes = _size_labels(firsts)
    labels = _mode_labels(firsts, sizes)
    modes = [
        Mode(label, size, tuple(sorted(members, key=lambda run: (run.seed is None, run.seed or 0))))
        for members, size, label in zip(groups.values(), sizes, labels, strict=True)
    ]
    # A fixed order, never by result: ranking differences that may be noise would claim what is not known.
    modes.sort(key=lambda mode: (sizes.index(mode.size), ORDER.get(mode.first.norm, 9), mode.first.anchor != "none"))
    return Comparison(tuple(modes), baselines)


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
            gaps = paired_percent(*(mode.values(lambda run: run.val_loss) for mode in (second, first)))
            if mean := estimate(list(gaps.values())):
                found.append(Pair(second, first, gaps, mean))
    adjusted = holm([pair.mean.p for pair in found])
    return [replace(pair, p_holm=p) for pair, p in zip(found, adjusted, strict=True)]


def outlying(comparison: Comparison, mode: Mode) -> dict[int, str]:
    """{seed: what stands out} for loss and gap. Such runs are marked and counted all the same."""
    marks: dict[int, list[str]] = {}
    for name, values in (
        ("loss", mode.values(lambda run: run.val_loss)),
        ("gap", mode.values(comparison.gap)),
    ):
        for seed, out in zip(values, outliers(list(values.values())) or [], strict=False):
            if out:
                marks.setdefault(seed, []).append(name)
    return {seed: ", ".join(names) for seed, names in marks.items()}


def uncounted(comparison: Comparison) -> Iterator[str]:
    """A line for every run that is in no mean, and why; for every seed that other modes of the size have."""
    for mode in comparison.modes:
        title = f"{mode.label} ({mode.size})"
        for run in mode.runs:
            if run.finished and run not in mode.counted.values():
                yield f"{title}, seed {run.seed}: a second run of this seed, shown but not counted ({run.name})"
            elif not run.finished:
                yield f"{title}, seed {run.seed}: {state_of(run)} ({run.name})"
        seeds = {run.seed for other in comparison.of_size(mode.size) for run in other.runs if run.seed is not None}
        if missing := sorted(seeds - {run.seed for run in mode.runs}):
            yield f"{title}: no run of seed{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        if not any(comparison.baseline_of(run) for run in mode.runs) and mode.counted:
            yield f"{title}: no finished baseline with the same seed and settings, so no gap"


def state_of(run: Run) -> str:
    """Where a run that is not finished stands, and why it stands there."""
    quiet = silence(run.directory) if run.status == "unfinished" else None
    since = "" if quiet is None else f", last metric {clock(quiet)} ago"
    return f"{run.status} at step {run.last_step}{since}{f': {run.error}' if run.error else ''}"


# ------------------------------------------------------------------------------------------------------------- naming


def _mode_key(run: Run) -> str:
    """Everything but the seed and where and how the run happened."""
    if not run.resolved:
        return f"{run.norm} {run.anchor} {run.setting('model', 'name')}"
    return _settings(run, lambda key: not within(key, (*ADJUSTABLE, *OWN, "seed")))


def _settings(run: Run, wanted: Callable[[str], bool]) -> str:
    """Seeds of a taper from trained models start each from its own, and are one mode all the same."""
    init = "random" if run.setting("model", "init") in (None, "random") else "trained"
    kept = {key: value for key, value in leaves(run.resolved) if wanted(key)}
    return json.dumps(kept | {"model.init": init}, sort_keys=True)


def _size_labels(runs: Sequence[Run]) -> list[str]:
    """The model's name; with the data set's where there are several, and a number where that is not enough."""
    several = len({run.setting("dataset", "name") for run in runs}) > 1
    numbered: dict[str, list[str]] = {}
    found = []
    for run in runs:
        name = str(run.setting("model", "name") or "?") + (f", {run.setting('dataset', 'name')}" if several else "")
        key = _settings(run, lambda key: within(key, ("model", "dataset")))
        keys = numbered.setdefault(name, [])
        if key not in keys:
            keys.append(key)
        found.append((name, keys.index(key) + 1))
    return [name if len(numbered[name]) == 1 else f"{name} #{number}" for name, number in found]


def _mode_labels(runs: Sequence[Run], sizes: Sequence[str]) -> list[str]:
    """Norm and anchor; where these do not tell two modes of a size apart, also the settings that do."""
    kinds = [(run.norm, run.anchor, size) for run, size in zip(runs, sizes, strict=True)]
    labels = []
    for run, kind in zip(runs, kinds, strict=True):
        base = run.norm if run.is_baseline else f"{run.norm}, {'no anchor' if run.anchor == 'none' else run.anchor}"
        alike = [other for other, its in zip(runs, kinds, strict=True) if its == kind]
        labels.append(", ".join([base, *_telling(run, alike)]))
    return labels


def _telling(run: Run, alike: Sequence[Run]) -> list[str]:
    """`lr=0.005`: what was asked for and differs from runs with the same norm and anchor."""
    others, asked = [dict(leaves(other.resolved)) for other in alike], [dict(leaves(other.composed)) for other in alike]
    return [
        f"{key.removeprefix('optim.').removeprefix('trainer.')}={show(value)}"
        for key, value in leaves(run.resolved)
        if not within(key, (*ADJUSTABLE, *OWN, "seed", "model.init"))
        and any(other.get(key) != value for other in others)
        # Values that derive from others are left out, unless nothing was asked for.
        and any(other.get(key) != asked[0].get(key) for other in asked)
    ]
