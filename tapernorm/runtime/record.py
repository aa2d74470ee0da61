"""What a run writes down: the rows of metrics.jsonl while it lasts, summary.json at its end."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tapernorm.config.schema import ConfigError, no_link, write_text

METRICS_FILE = "metrics.jsonl"
REPORT_FILE = "report.html"
Tree = dict[str, Any]

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


def read_metrics(directory: Path) -> list[Tree]:
    """The rows of a run's metrics.jsonl, one per step, ascending; metrics of the same step are merged.

    A torn last line, which a killed process leaves, is dropped. Raises ConfigError if there is no such file or
    another line is damaged.
    """
    path = directory / METRICS_FILE
    if not path.is_file():
        raise ConfigError(f"{directory} has no {METRICS_FILE}: it is not a run's directory")
    merged: dict[int, Tree] = {}
    for _, row in _rows(path):
        merged.setdefault(row["step"], {}).update(row)
    return [merged[step] for step in sorted(merged)]


def _rows(path: Path) -> Iterator[tuple[bytes, Tree]]:
    """The lines of metrics.jsonl as they are, each with what it holds."""
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            int(row["step"])
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                return
            raise ConfigError(f"{path}, line {number} is damaged: delete the line to go on") from None
        yield line, row


class MetricsFile:
    """metrics.jsonl of a run, to append to: each line is a JSON object, {"step": k, "train/loss": ..., ...}.

    Opening it drops a torn last line and, if given, the rows after the step `until`. A row has reached the operating
    system when `append` returns, so a killed process loses nothing; `flush` also survives a power cut. Raises
    ConfigError if the file is damaged; OSError, naming it, if it cannot be written, and whole rows are left.
    """

    def __init__(self, directory: Path, until: int | None = None) -> None:
        self.path = directory / METRICS_FILE
        self._file = open(self.path, "ab", buffering=0, opener=no_link)  # noqa: SIM115  # nothing is held back that a full disk did not take
        self.end = 0
        for line, row in _rows(self.path):
            if not line.endswith(b"\n") or (until is not None and row["step"] > until):
                break
            self.end += len(line)
        self._file.truncate(self.end)

    def append(self, row: Tree) -> None:
        left = memoryview(json.dumps(row, allow_nan=False).encode() + b"\n")
        size = len(left)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self.end)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.end += size

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def finite(data: Any) -> Any:
    """Plain nested data with NaN and infinities as None: what strict JSON can hold."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


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
