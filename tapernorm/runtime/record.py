"""record"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from tapernorm.config.schema import (
    ConfigError,
    write_text,
)

METRICS_FILE = "metrics.jsonl"


REPORT_FILE = "report.html"


# Every metric by name, with its meaning; docs/metrics.md has the formulas. <site> is a norm: 0.attn, 0.mlp, ..., final.
METRICS: dict[str, str] = {
    "trainer/step": "optimizer steps taken ('step' in metrics.jsonl)",
    "trainer/tokens": "training tokens seen; the x axis, in every row",
    "train/loss": "cross-entropy on the training batches since the previous row, nats per token; no anchor term",
    "val/loss": "cross-entropy on the fixed validation tokens, nats per token",
    "val/perplexity": "exp(val/loss)",
    "val/best_temperature": "T* = argmin_T mean cross-entropy of z / T on the validation tokens",
    "val/loss_best_temperature": "the loss there, nats per token",
    "anchor/loss": "the anchor's scale loss before its weight",
    "anchor/weighted": "lambda times anchor/loss: what the anchor adds to the training objective",
    "anchor/force": "the restoring force d(anchor/weighted) / d ln s, nats per e-fold; positive pulls the scale down",
    "anchor/lambda": "the anchor's resolved weight lambda",
    "gate/g": "the global gate that the step used: 1 normalized, 0 tapered",
    "calib/c.<site>": "the calibrated constant that stands in for 1/r at this norm",
    "calib/mismatch.<site>": "mean over tokens of ln(c r) at this norm: 0 where c stands in for 1/r",
    "taper/gain_rms.<site>": "root mean square of the tapered branch's gain gamma_t",
    "scale/rms.<site>": "mean scale of the residual stream at this norm's input",
    "scale/rms_p99.<site>": "99th percentile over tokens of the same scale",
    "scale/final_rms_mean": "mean scale s(h_L) of the residual stream before the final norm",
    "scale/final_rms_p99": "99th percentile over tokens of s(h_L)",
    "scale/drift": "ln of scale/final_rms_mean over its value at the end of the warmup, e-folds",
    "scale/target": "s_tgt, the level of s(h_L) at the end of the warmup, where the anchor holds it",
    "logits/norm_mean": "mean over tokens of the logit vector's l2 norm",
    "logits/abs_max": "largest absolute logit",
    "logits/std": "mean over tokens of the standard deviation over the vocabulary",
    "radial/mean": "radial gradient <dl/dh_L, h_L> on the probe batch, nats per e-fold of scale",
    "radial/train_mean": "radial gradient on the training batches since the previous row, nats per e-fold of scale",
    "radial/theory": "E_p[z] - z_y from the logits alone: the radial gradient if no final norm were there",
    "radial/fraction": "share of the squared gradient at h_L that points along h_L",
    "radial/bound_ok": "share of the tokens with positive margin that satisfy the margin bound; null without any",
    "grad/norm": "l2 norm of the gradient of all parameters, before clipping",
    "grad/final_hidden_norm": "mean over tokens of the l2 norm of dl/dh_L",
    "update/ratio": "l2 norm of the step's weight change over the l2 norm of the weights",
    "probe/loss": "cross-entropy on the probe batch, nats per token",
    "probe/entropy": "mean entropy of the predicted distributions, nats",
    "probe/accuracy": "share of probe tokens whose most likely prediction is right",
    "throughput/tokens_per_s": "training tokens per second, without probes, validation and saving",
    "optim/lr": "learning rate that the step used",
    "nonfinite/count": "NaN and infinite values logged so far; absent while there are none",
}


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, one per step, ascending; metrics of the same step are merged.

    A torn last line, which a killed process leaves, is dropped. Raises ConfigError if there is no such file or
    another line is damaged.
    """
    path = directory / METRICS_FILE
    if not path.is_file():
        raise ConfigError(f"{directory} has no {METRICS_FILE}: it is not a run's directory")
    merged: dict[int, dict[str, Any]] = {}
    for row in _parse(path):
        merged.setdefault(row["step"], {}).update(row)
    return [merged[step] for step in sorted(merged)]


def _parse(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            int(row["step"])
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                break
            raise ConfigError(f"{path}, line {number} is damaged: delete the line to go on") from None
        rows.append(row)
    return rows


def _keep_until(path: Path, step: int | None, last: dict[str, Any] | None = None) -> dict[str, Any]:
    """Drop a torn last line and the rows after `step` (None: no limit); return the last row kept, {} if none.

    `last` is a row that was there once; it comes back if it is lost.
    """
    rows = [row for row in _parse(path) if step is None or row["step"] <= step] if path.is_file() else []
    if last and (not rows or rows[-1]["step"] < last["step"]):
        rows.append(last)
    content = b"".join(map(_encode, rows))
    if content != (path.read_bytes() if path.is_file() else b""):
        temporary = path.with_suffix(".tmp")
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(path)) from error
    return rows[-1] if rows else {}


def _encode(row: dict[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _number(name: str, value: Any) -> int | float | None:
    if hasattr(value, "item"):  # a tensor or numpy scalar
        value = value.item()
    if value is None or isinstance(value, float):
        return value
    if isinstance(value, int):
        return int(value)
    raise TypeError(f"metric {name} is a {type(value).__name__}, not a number")


def finite(data: Any) -> Any:
    """Plain nested data with NaN and infinities as None: what strict JSON can hold."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


Tree = dict[str, Any]


def load_summary(directory: Path) -> Tree | None:
    """summary.json, None if there is none. Raises ConfigError, one line, if it is not what was written."""
    file = directory / "summary.json"
    if not file.exists():
        return None
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        summary = None
    if not isinstance(summary, dict) or not isinstance(summary.get("status"), str):
        raise ConfigError(f"{file}: it is damaged; delete it, and the run counts as interrupted")
    return summary


def write_summary(directory: Path, summary: Tree) -> None:
    """Atomically: whoever sees summary.json sees all of it. If it cannot be written, the run counts as interrupted."""
    text = json.dumps(finite(summary), indent=2, allow_nan=False)
    try:
        write_text(directory / "summary.json", text + "\n")
    except OSError as error:
        with suppress(OSError):
            print(f"warning: {directory / 'summary.json'} cannot be written: {error.strerror}", flush=True)


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that is too large for a float."""
    return math.inf if loss >= 700 else math.exp(loss)
