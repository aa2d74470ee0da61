"""c against an independent float64 least-squares solution, one batch and EMA; averages; microbatches."""

import numpy as np
import pytest
import torch

from tapernorm.calibration import Calibration, Ema
from tapernorm.config import CalibrationConfig
from tapernorm.norms import TaperLN, TaperNorm

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
    chosen = calibration.finish(lambda line: None)
    expected = least_squares_c(rows, eps, family == "layer")
    assert chosen["0.attn"] == pytest.approx(expected, rel=1e-5)
    assert norm.c.item() == pytest.approx(expected, rel=1e-5)
    assert torch.equal(norm.taper_weight, norm.weight)


def test_calibration_none_keeps_c_at_one_and_records_nothing() -> None:
    norm = TaperNorm(D, 1e-6)
    norm.weight.data.fill_(1.5)
    calibration = Calibration(CalibrationConfig(kind="none", window=5, decay=0.99, fit="log"), 9, {"final": norm})
    assert not any(calibration.records(step) for step in range(1, 20))
    assert calibration.finish(lambda line: None) == {"final": 1.0}
    assert torch.equal(norm.taper_weight, norm.weight)


def test_ema_is_bias_corrected() -> None:
    average = Ema(0.99)
    for x in (1.0, 2.0, 4.0):
        average.update(torch.tensor(x))
    weights = np.array([0.99**2, 0.99, 1.0])
    assert average.mean.item() == pytest.approx((weights * [1.0, 2.0, 4.0]).sum() / weights.sum(), rel=1e-6)


def test_doubtful_calibrations_are_said() -> None:
    said: list[str] = []
    norm = TaperNorm(D, 1e-6)
    calibration = Calibration(
        CalibrationConfig(kind="ema", window=2, decay=0.99, fit="least_squares"), 2, {"0.mlp": norm}
    )
    for step in (1, 2):
        with calibration.recording(step):
            norm(1e-3 * torch.randn(1, 8, D))
    calibration.finish(said.append)
    assert any("0.mlp" in line and "outside" in line for line in said)
    assert any("window of 2 steps" in line for line in said)
