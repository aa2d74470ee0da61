"""Reports: what is read, compared and said, and the page in a real browser."""

from __future__ import annotations

import base64
import csv
import json
import math
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tapernorm.analysis import charts, compare, page, report, runs, tables
from tapernorm.analysis.compare import Comparison
from tapernorm.cli import jobs, report_command, run
from tapernorm.cli.resume import Start
from tapernorm.config.options import Config
from tapernorm.config.resolve import build, resolve
from tapernorm.config.schema import to_dict, write_yaml
from tapernorm.runtime.record import METRICS, write_summary
from tapernorm.training.tracking import Tracker
from tests.conftest import NORMS, TINY, merge

REPO = Path(__file__).parents[2]
SITES = ("0.attn", "0.mlp", "1.attn", "1.mlp", "final")
STEPS = range(2, 25, 2)
HOSTILE = "</script><b>bold</b><script>window.hacked=1</script>"


def rows(config: Config, loss: float, drift: float = 0.0, nudge: float = 0.0) -> list[dict[str, Any]]:
    """Metrics of an invented run whose scale leaves its level of 2 by `drift` e-folds after the gate has closed."""
    tapers = config.norm.kind == "taper"
    final = "final" in config.norm.sites
    found = []
    for step in STEPS:
        late = step > 18
        share = max(0.0, (step - 18) / 6)
        scale = 2 * math.exp(drift * share)
        row: dict[str, Any] = {
            "step": step,
            "trainer/tokens": step * 128,
            "train/loss": loss + 1 / step,
            "val/loss": loss + 0.5 * (24 - step) / 24,
            "gate/g": max(0.0, min(1.0, (18 - step) / 8)) if tapers else 1.0,
            "grad/norm": 1.0,
            "grad/final_hidden_norm": 0.01,
            "radial/bound_ok": 1.0 if final and late else 0.0,
            "update/ratio": 0.01,
            "radial/train_mean": -0.1 if final and late else 0.0,
            "radial/theory": 0.2 + nudge,
            "radial/mean": (0.2 + nudge) if final and late else 0.0,
            "throughput/tokens_per_s": 1000.0,
            "probe/entropy": 3.0,
            "probe/accuracy": 0.2,
            "logits/norm_mean": 50 + 10 * share * (1 + drift),
            "logits/abs_max": 9.0,
            "scale/final_rms_mean": scale,
            "scale/final_rms_p99": 1.5 * scale,
        }
        row |= {f"scale/rms.{site}": scale for site in SITES}
        if tapers:
            row |= {f"calib/c.{site}": 0.5 for site in SITES} | {f"taper/gain_rms.{site}": 1.0 for site in SITES}
        if step >= 10:
            row |= {"scale/target": 2.0, "scale/drift": drift * share}
            row |= {f"calib/mismatch.{site}": (step - 10) / 100 * (-1) ** i for i, site in enumerate(SITES) if tapers}
        if step == 24:
            row |= {"val/loss_best_temperature": 0.99 * loss - nudge, "val/best_temperature": 0.95}
        if step > 10 and config.anchor.kind != "none":
            row |= {"anchor/loss": 0.1, "anchor/weighted": 0.1, "anchor/force": 0.1}
        found.append(row)
    return found


def make(
    directory: Path,
    norm: str | dict[str, Any] = "baseline",
    seed: int = 0,
    loss: float = 3.0,
    drift: float = 0.0,
    status: str | None = "finished",
    torn: bool = False,
    **sections: Any,
) -> Path:
    """A run's directory as train.py leaves it; status None: it is still running."""
    tree = merge(TINY, {"norm": NORMS[norm] if isinstance(norm, str) else norm, "seed": seed, **sections})
    config = resolve(build(tree), 512)
    (directory / ".hydra").mkdir(parents=True)
    write_yaml(directory / ".hydra" / "config.yaml", to_dict(build(tree)))
    write_yaml(directory / "config.yaml", to_dict(config))
    found = rows(config, loss, drift, nudge=0.01 * seed)
    if status != "finished":
        found = found[:-2]
    text = "".join(json.dumps(row) + "\n" for row in found)
    theory = [-0.5, 0.0, 2.0]
    tokens = {"step": 24, "theory": theory, "measured": theory if "final" in config.norm.sites else [0.0] * 3}
    (directory / "probe_tokens.json").write_text(json.dumps(tokens))
    (directory / "metrics.jsonl").write_text(text + '{"step": 99, "train/lo' * torn)
    if status:
        finished = {"val_loss": loss, "tokens": 3072} if status == "finished" else {}
        error = "the loss is not finite" if status == "diverged" else None
        write_summary(directory, {"status": status, "error": error, **finished})
    return directory


def rewrite(directory: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """Put other rows in the place of a run's."""
    file = directory / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(change(row)) + "\n" for row in rows))
    return directory


def with_levels(directory: Path, warmup: float, taper: float, end: float, pull: float = -0.1) -> Path:
    """A run as older versions left it, with these levels at steps 10, 18 and 24, and a target that was stale."""
    levels = {10: warmup, 18: taper, 24: end}

    def change(row: dict[str, Any]) -> dict[str, Any]:
        row = {key: v for key, v in row.items() if not key.startswith(("scale/drift", "scale/final", "calib/mismatch"))}
        row |= {"scale/final_rms_mean": levels[row["step"]]} if row["step"] in levels else {}
        row |= {"scale/target": 1.544} if row["step"] >= 10 else {}
        return row | {"radial/train_mean": pull} if row["step"] > 18 else row

    (directory / "probe_tokens.json").unlink()
    return rewrite(directory, change)


def comparison(folder: Path) -> Comparison:
    return compare.compare_runs([runs.read(path) for path in runs.discover([folder])])


@pytest.fixture
def three_seeds(tmp_path: Path) -> Path:
    """Baseline, all_taper and all_taper with an anchor, three seeds each."""
    for seed, loss in enumerate((3.0, 3.1, 3.2)):
        make(tmp_path / f"base-{seed}", seed=seed, loss=loss)
        make(tmp_path / f"free-{seed}", "all_taper", seed, loss * (1.01 + 0.001 * seed), drift=0.8)
        anchored = {"anchor": {"kind": "log_target"}}
        make(tmp_path / f"held-{seed}", "all_taper", seed, loss * (0.99 + 0.01 * seed), drift=0.05, **anchored)
    return tmp_path


# ---------------------------------------------------------------------------------------------------------- comparison


def test_gaps_are_paired_by_seed(three_seeds: Path) -> None:
    found = comparison(three_seeds)
    assert [mode.label for mode in found.modes] == ["baseline", "all_taper, no anchor", "all_taper, log_target"]
    free, held = found.modes[1:]
    assert free.values(found.gap) == pytest.approx({0: 1.0, 1: 1.1, 2: 1.2})
    table = tables.statistics_table(found, "tiny").rows
    assert table[0][6] == "reference"
    assert table[1][4:7] == ("+1.10 (+0.85 to +1.35)", "+1.00, +1.10, +1.20", "above baseline")  # 1.1 ± 4.303 * 0.1/√3
    assert table[2][6] == compare.UNDECIDED
    assert held.values(found.gap) == pytest.approx({0: -1.0, 1: 0.0, 2: 1.0})


def test_a_missing_seed_is_left_out_of_the_pairs_and_named(three_seeds: Path) -> None:
    shutil.rmtree(three_seeds / "base-1")
    shutil.rmtree(three_seeds / "held-2")
    found = comparison(three_seeds)
    assert found.modes[1].values(found.gap) == pytest.approx({0: 1.0, 2: 1.2})
    told = list(compare.uncounted(found))
    assert "baseline (tiny): no run of seed 1" in told
    assert tables.statistics_table(found, "tiny").rows[1][4].endswith("; n = 2)")
    assert "all_taper, log_target (tiny): no run of seed 2" in told
    pairs = {(pair.first.label, pair.second.label): pair for pair in compare.pairs(found)}
    assert sorted(pairs[("all_taper, log_target", "baseline")].gaps) == [0]
    assert pairs[("all_taper, log_target", "baseline")].conclusion == "one pair: no interval"


def test_failed_and_unfinished_runs_are_shown_and_counted_nowhere(three_seeds: Path) -> None:
    make(three_seeds / "dead", "all_taper", 3, status="diverged")
    make(three_seeds / "alive", "all_taper", 4, status=None, torn=True)
    make(three_seeds / "again", "all_taper", 0, loss=9.0)
    found = comparison(three_seeds)
    free = found.modes[1]
    assert sorted(free.counted) == [0, 1, 2] and len(free.runs) == 6
    assert free.values(lambda run: run.val_loss)[0] != free.values(lambda run: run.val_loss)[1]
    told = "\n".join(compare.uncounted(found))
    assert "all_taper, no anchor (tiny), seed 3: diverged at step 20: the loss is not finite (dead)" in told
    assert "all_taper, no anchor (tiny), seed 4: unfinished at step 20, last metric 0:0" in told
    assert "second run of this seed, shown but not counted" in told
    assert {row[2] for row in tables.runs_table(found).rows} == {"finished", "diverged", "unfinished"}
    assert free.verdict == ("chasing", "chases logits, 3 of 6")


def test_one_seed_has_a_gap_but_no_interval(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b", "internal_taper", loss=3.03)
    found = comparison(tmp_path)
    row = tables.statistics_table(found, "tiny").rows[1]
    assert row[4] == "+1.00" and row[6] == "one seed: no interval"
    assert "no outlier can be told" in tables.statistics_table(found, "tiny").note


def test_outliers_are_marked_and_counted(tmp_path: Path) -> None:
    for seed in range(6):
        make(tmp_path / f"base-{seed}", seed=seed)
        make(tmp_path / f"taper-{seed}", "internal_taper", seed, loss=3.9 if seed == 4 else 3.03 + 0.001 * seed)
    found = comparison(tmp_path)
    row = tables.statistics_table(found, "tiny").rows[1]
    assert row[1] == "6" and row[5].split(", ")[4] == "+30.00*" and row[5].count("*") == 1
    with (report.write_report([tmp_path], tmp_path).parent / "report.csv").open() as file:
        marked = {line["run"]: line["outlier"] for line in csv.DictReader(file) if line["outlier"]}
    assert marked == {"taper-4": "loss, gap"}


def test_swept_settings_make_modes_of_their_own_and_baselines_match_them(tmp_path: Path) -> None:
    for rate in (0.01, 0.02):
        for norm in ("baseline", "internal_taper"):
            for seed in (0, 1):
                name = f"{norm}-{rate}-{seed}"
                loss = 3 + 10 * rate + (0.03 if norm != "baseline" else 0)
                make(tmp_path / name, norm, seed, loss, optim={"lr": rate}, trainer={"log_interval": 1 + seed})
    found = comparison(tmp_path)
    assert sorted(mode.label for mode in found.modes) == sorted(
        [
            "baseline, lr=0.01",
            "baseline, lr=0.02",
            "internal_taper, no anchor, lr=0.01",
            "internal_taper, no anchor, lr=0.02",
        ]
    )
    base = found.baseline_of(next(run for run in found.runs if run.name == "internal_taper-0.02-1"))
    assert base is not None and base.name == "baseline-0.02-1"


def test_sizes_are_never_mixed(tmp_path: Path) -> None:
    wide = {"model": {"name": "wide", "d_model": 64}}
    make(tmp_path / "a", seed=0)
    make(tmp_path / "b", seed=0, loss=2.0, **wide)
    make(tmp_path / "c", "internal_taper", loss=2.2, **wide)
    found = comparison(tmp_path)
    assert found.sizes == ["tiny", "wide"]
    assert found.gap(found.of_size("wide")[1].first) == pytest.approx(10.0)
    assert len(compare.pairs(found)) == 1


def test_a_sweeps_table_has_the_same_gaps(three_seeds: Path) -> None:
    table = {row["job"]: row["gap %"] for row in jobs.rows_of(jobs.Sweep(three_seeds, []))}
    found = comparison(three_seeds)
    assert {run.name: found.gap(run) for run in found.runs} == table


# -------------------------------------------------------------------------------------------------------------- verdict


@pytest.mark.parametrize(
    ("norm", "drift", "expected"),
    [
        ("all_taper", 0.5, "chasing"),
        ("all_taper", 0.05, "held"),
        ("all_taper", -0.5, "shrinking"),
        ("internal_taper", 0.8, "normed"),
        ("baseline", 0.8, "normed"),
    ],
)
def test_verdicts(tmp_path: Path, norm: str, drift: float, expected: str) -> None:
    found = runs.read(make(tmp_path / "run", norm, drift=drift))
    assert found.verdict == expected
    assert found.drift == pytest.approx(drift)


FREE, HELD = {"kind": "none"}, {"kind": "mean_log"}


@pytest.mark.parametrize(
    ("norm", "anchor", "levels", "expected", "headline"),
    [
        ("all_taper", HELD, (4.26, 3.2, 2.67), "shrinking", "No logit chasing: the residual scale shrinks."),
        ("all_taper", HELD, (4.26, 2.0, 2.67), "growing", "No logit chasing: the residual scale grows, but not above"),
        ("all_taper", HELD, (2.0, 2.1, 2.6), "chasing", "This run chases logits."),
        ("all_taper", FREE, (2.0, 2.2, 3.0), "chasing", "This run chases logits."),
        ("internal_taper", FREE, (2.0, 4.0, 8.0), "normed", "No logit chasing: the final norm is in place."),
        ("all_taper", FREE, (2.0, 6.0, 6.2), "held", "No logit chasing: the residual scale is held."),
    ],
    ids=[
        "anchored, falls",
        "anchored, back up to its level",
        "anchored in vain",
        "free",
        "inner",
        "grew before gate 0",
    ],
)
def test_the_verdict_is_on_what_happened_since_the_gate_closed(
    tmp_path: Path, norm: str, anchor: dict[str, Any], levels: tuple[float, float, float], expected: str, headline: str
) -> None:
    found = runs.read(with_levels(make(tmp_path / "run", norm, anchor=anchor), *levels))
    assert found.verdict == expected
    assert tables.headline(comparison(tmp_path)).startswith(headline)
    assert found.growth == pytest.approx(math.log(levels[2] / levels[1]))
    assert found.points("scale/drift") == [
        (step, pytest.approx(math.log(level / levels[0]))) for step, level in zip((10, 18, 24), levels, strict=True)
    ]
    assert report.verdict(tmp_path / "run") == runs.VERDICTS[expected]


def test_growth_that_a_final_norm_shows_too_is_no_chase(tmp_path: Path) -> None:
    with_levels(make(tmp_path / "base"), 2.0, 3.0, 2.5)
    with_levels(make(tmp_path / "inner", "internal_taper"), 2.0, 2.0, 3.0)
    with_levels(make(tmp_path / "other", "internal_taper", seed=1), 2.0, 2.0, 9.0)
    with_levels(make(tmp_path / "slow", "internal_taper", gate={"k_taper": 20}), 2.0, 2.0, 9.0)
    for name, end, expected in (("less", 2.6, "growing"), ("more", 3.2, "chasing")):
        folder = with_levels(make(tmp_path / name, "all_taper"), 2.0, 2.0, end)
        found = comparison(tmp_path)
        [run] = [run for run in found.runs if run.name == name]
        assert run.verdict == expected
        references = {"baseline": pytest.approx(math.log(2.5 / 3)), "internal_taper": pytest.approx(math.log(1.5))}
        assert run.reference_growths == references
        table = tables.runs_table(found)
        place = table.columns.index("baseline's")
        assert ("-0.18", "+0.41") in [row[place : place + 2] for row in table.rows]
        shutil.rmtree(folder)


def test_the_tables_have_mismatch_and_the_loss_at_the_best_temperature(tmp_path: Path) -> None:
    make(tmp_path / "base")
    make(tmp_path / "free", "all_taper", loss=3.03, drift=0.8)
    table = tables.runs_table(comparison(tmp_path))
    row = dict(zip(table.columns, table.rows[1], strict=True))
    assert (row["worst mismatch"], row["at gate 0"], row["T*"]) == ("0.14", "0.08", "0.950")
    assert table.rows[1][table.columns.index("validation loss") + 1] == "2.9997"
    assert table.rows[1][table.columns.index("gap, %") + 1] == "+1.00"
    with (report.write_report([tmp_path], tmp_path).parent / "report.csv").open() as file:
        line = next(line for line in csv.DictReader(file) if line["run"] == "free")
    assert float(line["mismatch_gate_0"]) == pytest.approx(0.08) and float(line["mismatch_end"]) == pytest.approx(0.14)
    assert float(line["growth"]) == pytest.approx(0.8) and float(line["growth_baseline"]) == 0
    rewrite(tmp_path / "base", lambda row: {key: value for key, value in row.items() if "temperature" not in key})
    old = tables.runs_table(compare.compare_runs([runs.read(tmp_path / "base")]))
    assert not {"worst mismatch", "T*", "at T*"} & set(old.columns)


def test_a_run_whose_gate_is_open_is_not_judged(tmp_path: Path) -> None:
    directory = make(tmp_path / "run", "all_taper", drift=1.0, status=None)
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    (directory / "metrics.jsonl").write_text("\n".join(lines[:8]) + "\n")  # to step 16 of a taper that ends at 18
    found = comparison(tmp_path)
    assert found.runs[0].verdict == "early" and tables.headline(found).startswith("Too early")


def test_runs_that_failed_are_not_called_early(tmp_path: Path) -> None:
    make(tmp_path / "run", "all_taper", status="failed")
    assert tables.headline(comparison(tmp_path)) == "No run can be judged: all have failed."


def test_a_scale_without_effect_is_no_chase(tmp_path: Path) -> None:
    directory = make(tmp_path / "run", "all_taper", drift=1.0)
    text = (directory / "metrics.jsonl").read_text()
    (directory / "metrics.jsonl").write_text(text.replace('"radial/mean": 0.2', '"radial/mean": 0.02'))
    assert runs.read(directory).verdict == "inert"
    assert runs.read(make(tmp_path / "open", "all_taper", drift=1.0, gate={"shape": "constant"})).verdict == "normed"


def test_the_headline_of_a_sweep_that_goes_on(tmp_path: Path) -> None:
    make(tmp_path / "base")
    make(tmp_path / "held", "all_taper", anchor={"kind": "mean_log"})
    assert tables.headline(comparison(tmp_path)) == "No mode chases logits."
    (make(tmp_path / "free", "all_taper", status=None) / "metrics.jsonl").unlink()
    found = tables.headline(comparison(tmp_path))
    assert found == "No mode chases logits so far; of 1 of 3 it is too early to tell."


def test_a_growing_scale_without_a_pull_is_no_chase(tmp_path: Path) -> None:
    directory = make(tmp_path / "run", "all_taper", drift=1.0)
    text = (directory / "metrics.jsonl").read_text()
    (directory / "metrics.jsonl").write_text(text.replace('"radial/train_mean": -0.1', '"radial/train_mean": 0.1'))
    assert runs.read(directory).verdict == "growing"


def test_the_restoring_force_is_derived_where_it_was_not_logged(tmp_path: Path) -> None:
    directory = make(tmp_path / "run", "all_taper", drift=0.5, anchor={"kind": "fixed_target"})
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for row in lines:
        row.pop("anchor/force", None)
    lines[4]["anchor/lambda"] = 0.25
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    found = runs.read(directory)
    scale = 2 * math.exp(0.5)
    assert found.derives_force and found.last("anchor/force") == pytest.approx(2 * 0.25 * scale * (scale - 2))
    assert any("anchor/force" in note for note in charts.notes(charts.payload(comparison(tmp_path))["runs"]))


# --------------------------------------------------------------------------------------------------------------- files


def test_every_metric_that_is_drawn_or_named_exists() -> None:
    drawn = {line.metric for chart in charts.CHARTS for line in chart.lines} - {charts.GAP}
    captions = " ".join([*(chart.caption for chart in charts.CHARTS), *charts.CAPTIONS.values()])
    assert drawn <= set(METRICS)
    assert set(re.findall(r"[a-z]+/[a-z0-9_]+(?:\.<site>)?", captions)) <= set(METRICS) | {"1/scale"}


def test_report_writes_page_text_table_and_figures(three_seeds: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    assert report.write_report([three_seeds], out) == out / "report.html"
    assert sorted(path.name for path in out.iterdir()) == [
        "chasing.png", "losses.png", "report.csv", "report.html", "report.md",
    ]  # fmt: skip
    text = (out / "report.md").read_text()
    assert "1 of 3 modes chases logits" in text and "not distinguishable" in text and "![chasing](chasing.png)" in text
    with (out / "report.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 9 and {line["verdict"] for line in lines} >= {"chases logits", "scale held"}
    assert float(lines[3]["gap_percent"]) == pytest.approx(1.0) and lines[3]["baseline"] == "base-0"


def test_embedded_data_cannot_leave_its_element() -> None:
    data = {"name": HOSTILE, "line": "\u2028", "nan": math.nan, "and": "&lt;!--"}
    text = page.embed(data)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == data | {"nan": None}


def test_thinning_keeps_peaks_ends_and_gaps() -> None:
    points: runs.Points = [(step, 1.0 + step * 1e-6) for step in range(10_000)]
    points[4321], points[77], points[5000] = (4321, 99.0), (77, -5.0), (5000, None)
    kept = charts.thin(points, 400)
    assert len(kept) <= 405 and kept == sorted(kept, key=lambda point: point[0])
    assert {points[0], points[-1], points[4321], points[77], points[5000]} <= set(kept)
    assert charts.thin(points[:400], 400) == points[:400]


def test_thinned_seeds_have_enough_steps_in_common_for_their_mean() -> None:
    noise = random.Random(0)
    seeds = [charts.thin([(step, noise.random()) for step in range(n)], 400) for n in (4000, 4000, 2500)]
    common = set.intersection(*({step for step, _ in points} for points in seeds))
    assert common >= set(range(0, 2500, 32))


def test_thirty_long_runs_stay_below_ten_megabytes_and_say_what_is_left_out(tmp_path: Path) -> None:
    first = runs.read(make(tmp_path / "run", "all_taper", drift=0.5))
    names = [f"{block}.{half}" for block in range(8) for half in ("attn", "mlp")]
    lines = []
    for step in range(1, 1001):
        row = {key: value * math.exp(0.1 * math.sin(step)) for key, value in first.rows[-1].items() if key != "step"}
        lines.append({"step": step, **row} | {f"scale/rms.{name}": math.exp(math.sin(step)) for name in names})
    long = [
        runs.Run(
            tmp_path / f"run-{seed}",
            "finished",
            None,
            {"val_loss": 3.0},
            first.composed,
            first.resolved | {"seed": seed},
            lines,
        )
        for seed in range(30)
    ]
    found = compare.compare_runs(long)
    text = page.render(found, "long", report.datetime.now())
    assert len(text.encode()) < 10e6
    assert "not every point is drawn" in text


def test_a_run_that_could_not_be_built_is_listed(tmp_path: Path) -> None:
    make(tmp_path / "good")
    bad = make(tmp_path / "bad", "all_taper", status="failed")
    (bad / "config.yaml").write_text("]")
    (bad / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    found = comparison(tmp_path)
    assert {run.name: run.status for run in found.runs} == {"good": "finished", "bad": "failed"}
    assert report.write_report([tmp_path], tmp_path).is_file()


# ------------------------------------------------------------------------------------------------- runs and commands


def test_a_run_writes_its_page_quickly_unless_told_not_to(
    tiny: Callable[..., Config], tmp_path: Path, capsys, monkeypatch
) -> None:
    ends: list[dict[str, Any]] = []
    finish = Tracker.finish
    monkeypatch.setattr(Tracker, "finish", lambda self, *given: (ends.extend(given[1:]), finish(self, *given)))
    config = tiny(norm="all_taper", anchor={"kind": "mean_log"}, trainer={"max_steps": 20}, report=True)
    for name, wanted in (("with", True), ("without", False)):
        tree = to_dict(config) | {"report": wanted}
        (tmp_path / name).mkdir()
        summary = run.execute(Start(resolve(build(tree)), tree, tmp_path / name), overrides=[])
        assert summary["status"] == "finished"
        assert (tmp_path / name / "report.html").exists() == wanted
        assert (summary.get("verdict") in runs.VERDICTS.values()) == wanted
        assert ends[-1].get("verdict") == summary.get("verdict"), "W&B's summary has it, too"
        assert ("report.html" in capsys.readouterr().out) == wanted
    start = time.process_time()  # other programs' time does not count
    report.write_page(tmp_path / "without")
    assert time.process_time() - start < 2
    (only,) = comparison(tmp_path / "without").runs
    assert only.points("anchor/force") and not only.derives_force


def test_a_finished_run_that_could_not_be_made_longer_is_still_shown_as_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> dict[str, Any]:
        raise RuntimeError("no memory")

    directory = make(tmp_path / "run")
    tree = merge(TINY, {"norm": NORMS["baseline"], "report": True})
    monkeypatch.setattr(run, "_outcome", fail)
    summary = run.execute(Start(resolve(build(tree)), tree, directory), overrides=[])
    assert (summary["status"], runs.read(directory).status) == ("failed", "finished")
    assert '"status":"finished"' in (directory / "report.html").read_text()


def test_a_page_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    def fail(directory: Path, summary: dict[str, Any]) -> None:
        raise OSError("no space\nleft")

    monkeypatch.setattr(report, "write_page", fail)
    run.write_page(tmp_path, {})
    assert said == ["warning: no report.html (OSError: no space left)"]


def test_a_sweeps_report_that_cannot_be_written_is_one_line(tmp_path: Path, said: list[str]) -> None:
    jobs.write_report(tmp_path / "nothing")
    (line,) = said
    assert line.startswith("warning: no report (ConfigError") and "\n" not in line


def test_the_script_writes_beside_the_runs_or_where_it_is_told(
    three_seeds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report_command.main([str(three_seeds)])
    assert capsys.readouterr().out == f"{three_seeds / 'report.html'}\n"
    report_command.main([str(three_seeds / "base-0"), str(three_seeds / "free-0"), "--out", str(three_seeds / "two")])
    with (three_seeds / "two" / "report.csv").open() as file:
        assert [line["run"] for line in csv.DictReader(file)] == ["base-0", "free-0"]


@pytest.mark.parametrize("what", ["nowhere", "empty"])
def test_the_scripts_faults_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as stop:
        report_command.main([str(tmp_path / what)])
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.err.startswith("error: ") and captured.err.count("\n") == 1


def test_watching_writes_again_when_something_was_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make(tmp_path / "run", status=None, torn=True)
    naps = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            os.utime(directory / "metrics.jsonl", (2e9, 2e9))
        if len(naps) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    report_command.main([str(tmp_path), "--watch", "5"])
    assert naps == [5.0] * 4 and capsys.readouterr().out.count("report.html") == 2


# ------------------------------------------------------------------------------------------------------------- browser

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM.exists() and DRIVER.exists()), reason="Debian's chromium and chromium-driver are not installed"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in (
        "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync", "disable-dev-shm-usage", "hide-scrollbars",
        f"user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):  # fmt: skip
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield driver
    driver.quit()


class View:
    """One page in the browser."""

    def __init__(self, driver: Any, file: Path, width: int, dark: bool) -> None:
        self.driver = driver
        self.size(width, 900)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        driver.get(file.as_uri())
        self.settle()

    def size(self, width: int, height: int) -> None:
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)

    def js(self, body: str) -> Any:
        return self.driver.execute_script(body)

    def settle(self) -> None:
        for _ in range(300):
            if self.js("return document.documentElement.dataset.ready") == "true":
                return
            time.sleep(0.1)
        raise TimeoutError("the page does not get ready")

    def click(self, selector: str) -> None:
        self.js(f"document.querySelector({json.dumps(selector)}).click()")
        self.settle()

    def choose(self, select: str, value: str) -> None:
        self.js(
            f"const s = document.getElementById('{select}'); s.value = '{value}'; s.dispatchEvent(new Event('change'))"
        )
        self.settle()

    def charts(self) -> dict[str, list[str]]:
        """Runs with finite points in each chart, by legend group; the heat map's cells count as one."""
        return self.js("""
            const found = {};
            for (const section of document.querySelectorAll("#charts > section")) {
              const data = section.querySelector(".plot").data || [];
              const finite = (trace) => (trace.z || [trace.y]).flat().some((value) => Number.isFinite(value));
              const groups = data.filter(finite).map((trace) => trace.legendgroup || trace.type);
              found[section.id.replace("chart-", "")] = [...new Set(groups)];
            }
            return found;""")

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def screenshot(self, file: Path) -> None:
        width, height = self.js("return [window.innerWidth, document.documentElement.scrollHeight]")
        self.size(width, height)
        time.sleep(0.5)
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        taken = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
        file.write_bytes(base64.b64decode(taken["data"]))
        self.size(width, 900)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sweep with hostile names, a diverged and an unfinished run; one run alone; a run without any metric.

    And the runs or sweeps that TAPERNORM_REPORT_RUNS names, if it does.
    """
    folder = tmp_path_factory.mktemp("pages")
    sweep_dir = folder / "sweep <b>&\"' name"
    for seed in range(2):
        make(sweep_dir / f"base-{seed}", seed=seed)
        make(sweep_dir / f"free-{seed}", "all_taper", seed, 3.03, drift=0.8)
        make(sweep_dir / f"held-{seed}", "all_taper", seed, 3.05, drift=0.1, anchor={"kind": "log_target"})
    hostile = {"kind": "taper", "name": HOSTILE, "sites": ["attn", "mlp"]}
    make(sweep_dir / "<i>hostile<img src=x onerror=window.hacked=1>", hostile, 0, 3.1)
    make(sweep_dir / "dead", "all_taper", 2, status="diverged")
    make(sweep_dir / "alive", "all_taper", 3, status=None, torn=True)
    empty = make(folder / "empty", status=None)
    for name in ("metrics.jsonl", "probe_tokens.json"):
        (empty / name).unlink()
    real = [Path(name) for name in os.environ.get("TAPERNORM_REPORT_RUNS", "").split(os.pathsep) if name]
    return {
        **({"real": report.write_report(real, folder / "real")} if real else {}),
        "sweep": report.write_report([sweep_dir], sweep_dir),
        "single": report.write_page(
            make(folder / "single", "all_taper", drift=0.8, anchor={"kind": "mean_log"}).resolve()
        ),
        "empty": report.write_page(empty),
    }


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1440, 800])
def test_every_chart_has_data_at_every_width_and_theme(
    browser: Any, pages: dict[str, Path], tmp_path: Path, width: int, dark: bool
) -> None:
    keep = Path(os.environ.get("TAPERNORM_SCREENSHOTS") or tmp_path)
    keep.mkdir(parents=True, exist_ok=True)
    for name in pages.keys() - {"empty"}:
        view = View(browser, pages[name], width, dark)
        found = view.charts()
        expected = {chart.id for chart in charts.CHARTS} | {"layers", "heat", "mismatch", "tokens"}
        assert set(found) == expected
        assert {chart for chart, groups in found.items() if not groups} == ({"gap"} if name == "single" else set())
        assert view.js("return document.documentElement.scrollWidth") <= width, "nothing sticks out sideways"
        shade = view.js("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", shade)[:3])) < 150) == dark
        assert view.js("return performance.getEntriesByType('resource').length") == 0, "no network"
        view.screenshot(keep / f"{name}-{width}-{'dark' if dark else 'light'}.png")
        assert view.errors() == []


@needs_browser
def test_one_click_switches_a_run_in_all_charts(browser: Any, pages: dict[str, Path]) -> None:
    view = View(browser, pages["sweep"], 1440, False)
    whole = view.charts()
    number = view.js(
        "return JSON.parse(document.getElementById('data').textContent).runs.findIndex((r) => r.name === 'held-1')"
    )
    view.click(f"[data-run='{number}']")
    without = view.charts()
    assert {chart: [g for g in groups if g != "held-1"] for chart, groups in whole.items()} == without
    assert any("held-1" in groups for groups in whole.values())
    view.click(f"[data-run='{number}']")
    assert view.charts() == whole
    view.click("[data-mode='0']")
    assert not any(group.startswith("base-") for groups in view.charts().values() for group in groups)
    view.click("#none")
    assert {chart for chart, groups in view.charts().items() if groups} == {"heat", "mismatch"}
    assert "No run is switched on" in view.js("return document.querySelector('#chart-loss .absent').textContent")
    view.click("#all")
    assert view.charts() == whole and view.errors() == []


@needs_browser
def test_controls_change_all_charts(browser: Any, pages: dict[str, Path]) -> None:
    view = View(browser, pages["sweep"], 1440, False)
    last = "return Math.max(...document.querySelector('#plot-loss').data.flatMap((trace) => trace.x))"
    assert view.js(last) == 24 * 128
    view.choose("x", "steps")
    assert view.js(last) == 24
    marks = view.js("return document.querySelector('#plot-loss').layout.annotations.map((note) => [note.text, note.x])")
    assert sorted(marks) == [["k_taper", 18], ["k_warmup", 10]]

    count = "return document.querySelector('#plot-loss').data.length"
    before = view.js(count)
    view.choose("smoothing", "16")
    assert view.js(count) > before, "the raw lines stay"
    view.choose("smoothing", "0")
    view.choose("lines", "means")
    assert view.js("return document.querySelector('#plot-drift').data.some((trace) => trace.fill === 'tonexty')")
    view.choose("lines", "runs")

    colours = "return new Set(document.querySelector('#plot-loss').data.map((trace) => trace.line.color)).size"
    for key, number in (("mode", 4), ("anchor", 2), ("seed", 4)):
        view.choose("colour", key)
        assert view.js(colours) == number, key
    view.choose("marker", "anchor")
    view.choose("theme", "dark")
    assert view.js("return document.documentElement.dataset.dark") == "true"

    view.js("return Plotly.relayout('plot-loss', {'xaxis.range[0]': 4, 'xaxis.range[1]': 12})")
    time.sleep(0.5)
    assert view.js("return document.querySelector('#plot-radial').layout.xaxis.range") == [4, 12]
    view.click("#zoom")
    assert view.js("return document.querySelector('#plot-radial').layout.xaxis.range")[0] == 0

    view.choose("heat-kind", "absolute")
    assert view.js("return document.querySelector('#plot-heat').data[0].z[0][0]") == pytest.approx(math.log10(2))
    chip = "#chart-scale .chip:last-child"
    assert view.js(f"return document.querySelector('{chip}').getAttribute('aria-pressed')") == "false"
    lines = view.js("return document.querySelector('#plot-scale').data.length")
    view.click(chip)
    assert view.js("return document.querySelector('#plot-scale').data.length") > lines
    assert view.errors() == []


@needs_browser
def test_names_are_text_and_never_markup(browser: Any, pages: dict[str, Path]) -> None:
    view = View(browser, pages["sweep"], 1440, False)
    assert view.js("return typeof window.hacked") == "undefined"
    assert view.js("return document.querySelectorAll('img, b').length") == 0
    assert view.js("return document.getElementById('title').textContent") == "sweep <b>&\"' name"
    assert HOSTILE in view.js("return document.body.innerText")
    assert view.js("return document.querySelectorAll('.plot b, .plot image[href^=x]').length") == 0
    assert view.js("return document.title").startswith("sweep <b>&\"' name")
    assert view.errors() == []


@needs_browser
def test_what_is_not_there_is_said(browser: Any, pages: dict[str, Path]) -> None:
    view = View(browser, pages["empty"], 800, False)
    assert not any(view.charts().values())
    absent = view.js(
        "return [...document.querySelectorAll('.absent')].map((note) => note.offsetHeight ? note.textContent : '')"
    )
    assert len(absent) == len(charts.CHARTS) + 4 and all(text.startswith("Not recorded") for text in absent)
    assert "unfinished at step 0" in view.js("return document.getElementById('uncounted').textContent")
    assert view.errors() == []


@needs_browser
def test_printing_is_light_and_fits_the_paper(browser: Any, pages: dict[str, Path]) -> None:
    view = View(browser, pages["sweep"], 1440, True)
    view.js("window.dispatchEvent(new Event('beforeprint'))")
    time.sleep(1)
    widths = view.js(
        "return [...document.querySelectorAll('.main-svg')].map((svg) => svg.getBoundingClientRect().width)"
    )
    assert max(widths) < 720 and view.js("return document.documentElement.dataset.dark") == "false"
    view.js("window.dispatchEvent(new Event('afterprint'))")
    view.settle()
    assert view.js("return document.documentElement.dataset.dark") == "true"
    printed = view.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    assert base64.b64decode(printed).startswith(b"%PDF") and view.errors() == []
