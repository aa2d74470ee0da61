"""c against an independent float64 least-squares solution, one batch and EMA; averages; microbatches."""

import numpy as np
import pytest
import torch

from tapernorm.config.options import CalibrationConfig
from tapernorm.method.calibration import Calibration, Ema
from tapernorm.method.gate import GateSchedule, Phase
from tapernorm.method.norms import TaperLN, TaperNorm

D, STEPS, K_WARMUP, WINDOW, DECAY = 16, 9, 9, 5, 0.8


def least_squares_c(rows: list[tuple[np.ndarray, np.ndarray, float]], eps: float, centered: bool) -> float:
    """argmin_c sum_t weight_t mean_rows ||h/r * gamma_t - c * h * gamma_t||^2, by numpy in float64.

    rows: per step the recorded h (N, D), that step's gamma (D,), and its weight.
    """
    left, right = [], []
    for h, gamma, weight in rows:
        x = h.astype(np.float64)
        if centered:
            x = x - x.mean(-1, keepdims=True)
        r = np.sqrt((x**2).mean(-1, keepdims=True) + eps)
        scale = np.sqrt(weight / len(x))
        left.append((scale * x * gamma).ravel())
        right.append((scale * x / r * gamma).ravel())
    solution, *_ = np.linalg.lstsq(np.concatenate(left)[:, None], np.concatenate(right), rcond=None)
    return float(solution[0])


@pytest.mark.parametrize(
    ("kind", "family"), [("ema", "rms"), ("ema", "layer"), ("one_batch", "rms"), ("one_batch", "layer")]
)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_c_is_the_weighted_least_squares_solution(kind: str, family: str, microbatches: int) -> None:
    eps = 1e-6
    norm = {"rms": TaperNorm, "layer": TaperLN}[family](D, eps)
    config = CalibrationConfig(kind=kind, decay=DECAY, window=WINDOW, fit="least_squares")
    calibration = Calibration(config, K_WARMUP, {"0.attn": norm})
    generator = torch.Generator().manual_seed(1)
    recorded = []
    for step in range(1, STEPS + 1):
        norm.weight.data = 1 + 0.4 * torch.randn(D, generator=generator)  # the optimizer moves gamma between steps
        h = (0.2 + step) * torch.randn(30, D, generator=generator) * torch.rand(30, 1, generator=generator)
        on = calibration.records(step)
        with calibration.recording(step):
            for part in h.chunk(microbatches):
                norm(part.unsqueeze(0))
        norm(100 * h)  # a validation forward in the same step: never enters
        if on:
            recorded.append((h.numpy(), norm.weight.detach().double().numpy()))
    assert len(recorded) == (WINDOW if kind == "ema" else 1)
    T = len(recorded)
    rows = [(h, gamma, (1 - DECAY) * DECAY ** (T - t)) for t, (h, gamma) in enumerate(recorded, 1)]
    chosen = calibration.finish()
    expected = least_squares_c(rows, eps, family == "layer")
    assert chosen["0.attn"] == pytest.approx(expected, rel=1e-5)
    assert norm.c.item() == pytest.approx(expected, rel=1e-5)
    assert torch.equal(norm.taper_weight, norm.weight)


FITS = {
    "least_squares": lambda p, r: (p / r).mean() / p.mean(),
    "inverse_mean": lambda p, r: 1 / r.mean(),
    "log": lambda p, r: np.exp(-np.log(r).mean()),
}


@pytest.mark.parametrize("family", ["rms", "layer"])
@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_tracked_c_follows_its_statistic_while_the_gate_is_open(family: str, fit: str, microbatches: int) -> None:
    """Against numpy: the batch of k_warmup read anew, then an average over the steps before the gate closes."""
    k_warmup, k_taper, eps = 3, 8, 1e-6
    norm = {"rms": TaperNorm, "layer": TaperLN}[family](D, eps)
    config = CalibrationConfig(kind="tracked", decay=DECAY, window=WINDOW, fit=fit)
    calibration = Calibration(config, k_warmup, {"0.attn": norm}, k_taper - 1)
    schedule = GateSchedule("cosine", k_warmup, k_taper)
    generator = torch.Generator().manual_seed(1)
    sums, used = [], []

    for step in range(1, 11):
        norm.set_gate(schedule.value(step), schedule.phase(step))
        norm.weight.data = 1 + 0.4 * torch.randn(D, generator=generator)
        h = (0.2 + step) * torch.randn(30, D, generator=generator) * torch.rand(30, 1, generator=generator)
        assert calibration.records(step) == (k_warmup < step < k_taper)
        used.append(norm.c.item())
        with calibration.recording(step):
            for part in h.chunk(microbatches):
                norm(part.unsqueeze(0))
        norm(100 * h)  # a validation forward in the same step: never enters
        if step == k_warmup:
            with calibration.measuring():
                norm(h.unsqueeze(0))
            calibration.finish()
        if k_warmup <= step < k_taper:
            x = h.double().numpy()
            x = x - x.mean(-1, keepdims=True) if family == "layer" else x
            r = np.sqrt((x**2).mean(-1) + eps)
            p = ((x * norm.weight.detach().double().numpy()) ** 2).sum(-1)
            pair = {"least_squares": (p / r, p), "inverse_mean": (np.ones(30), r), "log": (-np.log(r), np.ones(30))}
            sums.append([values.sum() for values in pair[fit]])
            weights = (1 - DECAY) * DECAY ** np.arange(len(sums))[::-1]
            a, b = weights @ np.array(sums)
            assert norm.c.item() == pytest.approx(np.exp(a / b) if fit == "log" else a / b, rel=1e-5)
            if step == k_warmup:
                assert norm.c.item() == pytest.approx(FITS[fit](p, r), rel=1e-5)
    assert used[k_taper - 1] == used[k_taper] == norm.c.item(), "frozen at gate 0"


def test_the_final_norms_c_stays_where_the_warmup_left_it() -> None:
    """The loss pulls at the scale that it reads: a c that gave way to that would have both run away."""
    norms = {"0.attn": TaperNorm(D, 1e-6), "final": TaperNorm(D, 1e-6)}
    config = CalibrationConfig(kind="tracked", decay=DECAY, window=WINDOW, fit="log")
    calibration = Calibration(config, 1, norms, 5)
    with calibration.measuring():
        for norm in norms.values():
            norm(torch.ones(1, 4, D))
    calibration.finish()
    with calibration.recording(2):
        for norm in norms.values():
            norm.set_gate(0.5, Phase.TAPERING)
            norm(3 * torch.ones(1, 4, D))
    assert norms["0.attn"].c.item() < 0.7 and norms["final"].c.item() == pytest.approx(1.0)


def test_a_rare_large_token_moves_least_squares_and_hardly_the_log() -> None:
    """One token of 1,024 with 30 times the scale: c r of all others, as GPT-2's first position would have it."""
    found = {}
    for fit in FITS:
        norm = TaperNorm(D, 1e-6)
        calibration = Calibration(CalibrationConfig(window=1, decay=0.0, fit=fit), 1, {"0.attn": norm}, 2)
        h = torch.nn.functional.normalize(torch.randn(1024, D), dim=-1) * D**0.5
        h[0] *= 30
        with calibration.measuring():
            norm(h)
        found[fit] = calibration.finish()["0.attn"]
    assert found == pytest.approx({"least_squares": 0.548, "inverse_mean": 0.972, "log": 0.9967}, abs=2e-3)


def test_statistics_that_are_not_finite_leave_c_alone() -> None:
    norm = TaperNorm(D, 1e-6)
    calibration = Calibration(CalibrationConfig(window=1, decay=0.5, fit="log"), 1, {"0.attn": norm}, 5)
    with calibration.measuring():
        norm(2 * torch.ones(1, 4, D))
    calibration.finish()
    norm.set_gate(0.5, Phase.TAPERING)
    with calibration.recording(2):
        norm(torch.full((1, 4, D), torch.nan))
    assert norm.c.item() == pytest.approx(0.5)


def test_calibration_none_keeps_c_at_one_and_records_nothing() -> None:
    norm = TaperNorm(D, 1e-6)
    norm.weight.data.fill_(1.5)
    calibration = Calibration(CalibrationConfig(kind="none", window=5, decay=0.99, fit="log"), 9, {"final": norm})
    assert not any(calibration.records(step) for step in range(1, 20))
    assert calibration.finish() == {"final": 1.0}
    assert torch.equal(norm.taper_weight, norm.weight)


def test_ema_is_bias_corrected() -> None:
    average = Ema(0.99)
    for x in (1.0, 2.0, 4.0):
        average.update(torch.tensor(x))
    weights = np.array([0.99**2, 0.99, 1.0])
    assert average.mean.item() == pytest.approx((weights * [1.0, 2.0, 4.0]).sum() / weights.sum(), rel=1e-6)


def test_doubtful_calibrations_are_said(said: list[str]) -> None:
    norm = TaperNorm(D, 1e-6)
    calibration = Calibration(
        CalibrationConfig(kind="ema", window=2, decay=0.99, fit="least_squares"), 2, {"0.mlp": norm}
    )
    for step in (1, 2):
        with calibration.recording(step):
            norm(1e-3 * torch.randn(1, 8, D))
    calibration.finish()
    assert any("0.mlp" in line and "outside" in line for line in said)
    assert any("window of 2 steps" in line for line in said)
