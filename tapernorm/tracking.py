"""What a run reports: one metrics.jsonl always, Weights & Biases as its mirror, and a progress bar or lines.

The mirror cannot stop, slow or distort training: whatever goes wrong with it is said in one line and the run goes
on. This is the only module that imports wandb, and it does so only when a run is mirrored.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

from tqdm import tqdm

from tapernorm.config import ConfigError, TrackingConfig

METRICS_FILE = "metrics.jsonl"
REPORT_FILE = "report.html"

# Every metric by name, with its meaning; docs/metrics.md has the formulas. <site> is a norm: 0.attn, 0.mlp, ..., final.
METRICS: dict[str, str] = {
    "trainer/step": "optimizer steps taken ('step' in metrics.jsonl)",
    "trainer/tokens": "training tokens seen; the x axis, in every row",
    "train/loss": "cross-entropy on the training batches since the previous row, nats per token; no anchor term",
    "val/loss": "cross-entropy on the fixed validation tokens, nats per token",
    "val/perplexity": "exp(val/loss)",
    "anchor/loss": "the anchor's scale loss before its weight",
    "anchor/weighted": "lambda times anchor/loss: what the anchor adds to the training objective",
    "anchor/force": "the restoring force d(anchor/weighted) / d ln s, nats per e-fold; positive pulls the scale down",
    "anchor/lambda": "the anchor's resolved weight lambda",
    "gate/g": "the global gate that the step used: 1 normalized, 0 tapered",
    "calib/c.<site>": "the calibrated constant that stands in for 1/r at this norm",
    "taper/gain_rms.<site>": "root mean square of the tapered branch's gain gamma_t",
    "scale/rms.<site>": "mean scale of the residual stream at this norm's input",
    "scale/rms_p99.<site>": "99th percentile over tokens of the same scale",
    "scale/final_rms_mean": "mean scale s(h_L) of the residual stream before the final norm",
    "scale/final_rms_p99": "99th percentile over tokens of s(h_L)",
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

# What W&B's summary keeps of a metric where that is not its last value.
SUMMARIES = {"val/loss": "min", "val/perplexity": "min", "throughput/tokens_per_s": "mean"}


class Tracker:
    """Writes metrics to directory/metrics.jsonl and mirrors them to Weights & Biases; a context manager.

    metrics.jsonl holds one JSON object a line and one line a step, {"step": k, "train/loss": ..., ...}; steps
    ascend. Metrics logged later for the newest step join its line, which is rewritten in place. Every `log` reaches
    the operating system before it returns, so a killed process loses nothing; `flush` also survives a power cut.

    Every line has trainer/tokens: step times `tokens_per_step`, so that a resumed run needs no counter.
    `resume_step` = k removes the rows of later steps, which are about to be trained again. `state` is what `state()`
    returned before: it continues the same W&B run. `config` is the resolved configuration as a plain nested dict.
    W&B keeps its files in directory/wandb, and gets directory/report.html as an artifact if there is one at the end.

    Raises ConfigError if metrics.jsonl is damaged, and with tracking.strict if W&B cannot be reached.
    """

    def __init__(
        self,
        directory: Path,
        config: dict[str, Any],
        tracking: TrackingConfig,
        *,
        name: str,
        tokens_per_step: int,
        resume_step: int | None = None,
        state: dict[str, Any] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        state = state or {}
        self.nonfinite: int = state.get("nonfinite", 0)
        self._say = say
        self._directory, self._tokens_per_step = directory, tokens_per_step
        self._finished = False
        self._run_id: str | None = state.get("wandb_id")
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / METRICS_FILE
        self._row = _keep_until(path, resume_step)
        self._run = self._start_wandb(directory, config, tracking, name)
        self._mirror_failed = False
        path.touch()
        self._file = path.open("r+b")
        end = self._file.seek(0, os.SEEK_END)
        self._offset = end - len(_encode(self._row)) if self._row else end

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record numbers of a step: int, float, None, 0-d tensors and numpy scalars.

        NaN and infinities are written as null and counted: from the first on, every row has nonfinite/count.
        Raises TypeError, naming the metric, for anything that is no number; non-finite values never raise.
        """
        values: dict[str, int | float | None] = {"trainer/tokens": step * self._tokens_per_step}
        for name, value in metrics.items():
            number = _number(name, value)
            if number is not None and not math.isfinite(number):
                if self.nonfinite == 0:
                    self._warn(f"{name} is {number} at step {step}")
                self.nonfinite += 1
                number = None
            values[name] = number
        if self.nonfinite:
            values["nonfinite/count"] = self.nonfinite
        if self._row.get("step") != step:
            self._row = {"step": step}
            self._offset = self._file.seek(0, os.SEEK_END)
        self._row |= values
        self._file.seek(self._offset)
        self._file.write(_encode(self._row))
        self._file.truncate()  # after the write: a kill in between leaves a torn last line, which readers drop
        self._file.flush()
        # W&B's own step may not go back, so it is left alone; rows without a value would only draw gaps.
        row = {name: number for name, number in values.items() if number is not None}
        self._mirror(lambda run: run.log({"trainer/step": step, **row}))

    def flush(self) -> None:
        """Force metrics.jsonl to the disk; called before each checkpoint."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs to go on with the same W&B run and count; plain values."""
        return {"wandb_id": self._run_id, "nonfinite": self.nonfinite}

    def finish(self, status: str, summary: Mapping[str, Any] | None = None) -> None:
        """Close the file and the W&B run, whose summary gets `summary` and the status; later calls do nothing.

        The W&B run counts as finished if status is 'finished', and as failed with anything else.
        """
        if self._finished:
            return
        self._finished = True
        values = {"status": status, **(summary or {})}
        self._mirror(lambda run: run.summary.update(values))
        self._mirror(self._log_report)
        self._mirror(lambda run: run.finish(exit_code=0 if status == "finished" else 1), always=True)
        self.flush()  # last, because a full disk makes it raise
        self._file.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish("finished" if kind is None else "failed")

    def _log_report(self, run: Any) -> None:
        path = self._directory / REPORT_FILE
        if path.is_file():
            import wandb

            report = wandb.Artifact(f"report-{run.id}", type="report")
            report.add_file(str(path), policy="immutable")  # where it is: by default a copy goes to the user's home
            run.log_artifact(report)

    def _warn(self, text: str) -> None:
        self._say(f"warning: {text}; non-finite values are logged as null and counted in nonfinite/count")
        self._mirror(lambda run: run.alert(title="non-finite metric", text=text, level="ERROR"))

    def _mirror(self, call: Callable[[Any], Any], always: bool = False) -> None:
        """Do something with the W&B run; after a first failure, which is said, only what is to be done `always`."""
        if self._run is None or (self._mirror_failed and not always):
            return
        try:
            call(self._run)
        except Exception as error:
            if not self._mirror_failed:
                self._say(f"warning: W&B failed ({_first_line(error)}); the run goes on with {METRICS_FILE} alone")
            self._mirror_failed = True

    def _start_wandb(self, directory: Path, config: dict[str, Any], tracking: TrackingConfig, name: str) -> Any:
        """The W&B run, or None if disabled or impossible."""
        mode: str = tracking.wandb
        if mode == "auto":
            mode = os.environ.get("WANDB_MODE") or "auto"
        if mode == "disabled":
            return None
        if mode not in ("auto", "online", "run", "offline", "dryrun"):
            self._say(f"warning: WANDB_MODE={mode} is none of online, offline, disabled; going on offline")
            mode = "offline"
        # An id of our own: a WANDB_RUN_ID in the environment would merge the jobs of a sweep.
        run_id = self._run_id or secrets.token_hex(4)
        arguments = {
            "dir": str(directory),
            "project": tracking.project,
            "entity": tracking.entity,
            "group": tracking.group,
            "tags": list(tracking.tags),
            "name": name,
            "id": run_id,
            "config": config,
            "allow_val_change": True,  # a resumed run may have changed settings
            "reinit": "create_new",  # by default a second job in this process would get the first job's run
        }
        try:
            run = self._connect(mode, arguments, directory / "wandb", tracking)
            _define_metrics(run)
        except ConfigError:
            raise
        except Exception as error:
            self._say(f"warning: W&B cannot start ({_first_line(error)}); the run goes on with {METRICS_FILE} alone")
            return None
        self._run_id = run_id
        return run

    def _connect(self, mode: str, arguments: dict[str, Any], files: Path, tracking: TrackingConfig) -> Any:
        """wandb.init online if wanted and possible, else offline."""
        import wandb  # takes half a second, so only where it is used

        quiet: dict[str, Any] = {"silent": True, "quiet": True, "console": "off"}
        arguments["settings"] = wandb.Settings(
            **quiet,
            disable_git=True,
            disable_code=True,
            save_code=False,
            init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", 30)),
            finish_timeout=60,  # what is not uploaded by then stays in the run's directory, for `wandb sync`
        )
        # For the whole process, before anything else: a later login would print, and ask for a key on a terminal.
        wandb.setup(wandb.Settings(**quiet))
        if mode not in ("offline", "dryrun"):
            reason = ""
            try:
                if mode != "auto":
                    wandb.setup(wandb.Settings(mode="online"))  # tracking.wandb=online beats WANDB_MODE
                if wandb.login(prompt=False, verify=False):
                    run = wandb.init(mode="online", resume="allow", **arguments)
                    self._say(f"W&B: {run.url}")
                    return run
            except Exception as error:
                reason = _first_line(error)
                wandb.teardown()  # else the id stays in use by the attempt that failed
                wandb.setup(wandb.Settings(**quiet))
            expected = mode == "auto" and not reason  # auto means: offline without a key
            reason = reason or "no API key"
            if tracking.strict and not expected:
                raise ConfigError(f"tracking.wandb={tracking.wandb}: W&B cannot be reached: {reason}")
            warning = "" if expected else "warning: "
            self._say(f"{warning}W&B: {reason}, so offline; to upload later: wandb sync {files}/offline-run-*")
        run = wandb.init(mode="offline", **arguments)
        # The file that W&B itself writes online only, in its layout; JSON is YAML.
        config = {key: {"value": value} for key, value in arguments["config"].items()}
        (Path(run.dir) / "config.yaml").write_text(json.dumps(config, indent=2) + "\n")
        return run


class NoTracker(Tracker):
    """Takes everything and keeps nothing: of all processes of a run but the first."""

    def __init__(self) -> None:
        self._finished = True

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        pass

    def flush(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}


def _define_metrics(run: Any) -> None:
    """Tell W&B every metric's x axis and what its summary keeps."""
    run.define_metric("trainer/tokens")
    for name in METRICS:
        if name != "trainer/tokens":
            name = name.replace("<site>", "*")
            run.define_metric(name, step_metric="trainer/tokens", summary=SUMMARIES.get(name))


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


def _keep_until(path: Path, step: int | None) -> dict[str, Any]:
    """Drop a torn last line and the rows after `step` (None: no limit); return the last row kept, {} if none."""
    if not path.is_file():
        return {}
    rows = [row for row in _parse(path) if step is None or row["step"] <= step]
    content = b"".join(map(_encode, rows))
    if content != path.read_bytes():
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
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


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


class Progress:
    """A progress bar on a terminal, plain lines elsewhere; times and rates are of this process alone.

    A line: `step 120/600  20 %  loss 3.412  gate 0.87 tapering  15.2k tokens/s  ETA 1:23`. Lines come for the first
    and the last step and at most every `LINE_SECONDS` between them. `done` is the step that a resumed run starts
    after, `unit` what is counted; what is over within `delay` seconds shows nothing. loss None repeats the newest known
    loss, so the caller need not fetch it from the device at each step.
    """

    LINE_SECONDS = 5.0

    def __init__(
        self,
        total: int,
        done: int = 0,
        mode: Literal["auto", "bar", "lines", "none"] = "auto",
        stream: TextIO | None = None,
        unit: str = "step",
        delay: float = 0.0,
    ) -> None:
        self.total, self.done, self.unit, self.delay = total, done, unit, delay
        self.stream = stream or sys.stderr  # looked up now: it may have been redirected since the import
        if mode == "auto":
            mode = "bar" if self.stream.isatty() else "lines"
        self.mode = mode
        self._loss: float | None = None
        self._start = time.monotonic()
        self._printed = -math.inf
        self._pending: str | None = None  # the newest line, not yet printed
        self._bar: Any = None
        if mode == "bar":
            self._bar = tqdm(total=total, initial=done, file=self.stream, unit=unit, delay=delay, dynamic_ncols=True)

    def update(
        self, step: int, *, loss: float | None, tokens_per_s: float, gate: float | None = None, phase: str = ""
    ) -> None:
        """Show that `step` is done. loss in nats per token; gate None where there is none to show."""
        self._loss = self._loss if loss is None else loss
        if self.mode == "none":
            return
        parts = [] if self._loss is None else [f"loss {self._loss:.3f}"]
        if gate is not None:
            parts.append(f"gate {gate:.2f} {phase}")
        if tokens_per_s:
            parts.append(f"{tqdm.format_sizeof(tokens_per_s)} tokens/s")
        if self._bar is not None:
            self._bar.set_postfix_str("  ".join(parts), refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if now - self._start < self.delay:
            return
        left = (self.total - step) * (now - self._start) / max(step - self.done, 1)
        parts = [f"{self.unit} {step}/{self.total}", f"{100 * step / self.total:.0f} %", *parts]
        self._pending = "  ".join([*parts, f"ETA {clock(left)}"])
        if step >= self.total or now - self._printed >= self.LINE_SECONDS:
            self._printed = now
            self._flush_line()

    def say(self, line: str, printer: Callable[[str], None] = print) -> None:
        """Hand a line to what prints it, with the bar out of its way."""
        with tqdm.external_write_mode(file=sys.stdout) if self._bar is not None else nullcontext():
            printer(line)

    def close(self) -> None:
        """Print the last line, or leave the bar as it is."""
        self._flush_line()
        if self._bar is not None:
            self._bar.close()

    def _flush_line(self) -> None:
        if self._pending is not None:
            print(self._pending, file=self.stream, flush=True)
        self._pending = None


def clock(seconds: float) -> str:
    """1:23 or 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
