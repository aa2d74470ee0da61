"""What a sweep will cost: the operations of a known shape, the gap that seeds can find, and the presets' dry runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from scipy.stats import nct, t

from tapernorm.analysis.intervals import detectable
from tapernorm.cli import cost
from tapernorm.config.resolve import build, resolve

ROOT = Path(__file__).parents[2]
PRESETS = sorted(
    path.relative_to(ROOT / "configs/experiment").with_suffix("").as_posix()
    for path in (ROOT / "configs/experiment").rglob("*.yaml")
    if "sweeper:" in path.read_text()
)


@pytest.mark.parametrize("tied", [True, False])
def test_operations_of_a_known_shape(tied: bool) -> None:
    shape = {"n_layer": 2, "d_model": 32, "head_dim": 16, "d_ff": 88, "n_ctx": 64, "tied": tied}
    run = resolve(build({"model": shape}), 400)
    weights = 2 * (4 * 32 * 32 + 3 * 32 * 88) + 400 * 32
    assert cost.per_token(run) == 6 * weights + 6 * 2 * 32 * 64


@pytest.mark.parametrize("n", [2, 3, 6, 24])
def test_the_detectable_gap_is_found_as_often_as_said(n: int) -> None:
    gap = detectable(0.83, n)
    assert gap is not None
    limit, shift = t.ppf(0.975, n - 1), gap / 0.83 * n**0.5
    assert 1 - nct.cdf(limit, n - 1, shift) == pytest.approx(0.8, abs=1e-6)
    assert detectable(0.83, 1) is None


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_tells_what_it_costs(preset: str, tmp_path: Path) -> None:
    # One seed instead of six: as many kinds of jobs, composed in a sixth of the time.
    command = [sys.executable, str(ROOT / "train.py"), "-m", f"experiment={preset}", "seed=0", "sweep.dry_run=true"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *_, total, here, there, gap = done.stdout.splitlines()
    jobs = done.stdout.count("  new\n")
    assert jobs >= 3 and re.fullmatch(rf"{jobs} jobs, [\d,]+ tokens, \S+ floating-point operations", total)
    assert re.match(r"about \S+ (hours|minutes) here, one after the other, at \S+ GFLOP/s with \d+ threads", here)
    assert re.match(r"about \S+ (hours|minutes) on one H100, if it reaches sweep.mfu=0.3 of its 989 TFLOP/s", there)
    assert gap == "one seed has no spread: it shows no gap to be real"
    assert not list(tmp_path.iterdir())
