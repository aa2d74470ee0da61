"""What a run reports: one metrics.jsonl always, Weights & Biases as its mirror, and a progress bar or lines.

The mirror cannot stop, slow or distort training: it has a thread of its own, and whatever goes wrong with it, a call
that never returns included, is said in one line and the run goes on. This is the only module that imports wandb, and
it does so only when a run is mirrored.
"""

from __future__ import annotations

import json
import math
import os
import queue
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

from tqdm import tqdm

from tapernorm.config.options import TrackingConfig
from tapernorm.config.schema import ConfigError

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

QUIET: dict[str, Any] = {"silent": True, "quiet": True, "console": "off"}  # of wandb.Settings
# What W&B's summary keeps of a metric where that is not its last value.
SUMMARIES = {"val/loss": "min", "val/perplexity": "min", "throughput/tokens_per_s": "mean"}


class Mirror:
    """A W&B run, or whatever `start` returns, and the calls to it, in order, on a thread of their own.

    The first failure ends it: `problem` says it in one line and later calls are left out, but for those that are to be
    made `always`. So does a call that does not return: whoever waits for it gives up after a time.
    """

    WAITING = 10_000  # calls at most; a service that is so far behind does not catch up

    def __init__(self) -> None:
        self.run: Any = None
        self.problem: str | None = None
        self.error: Exception | None = None
        self._calls: queue.Queue[tuple[Callable[[Any], Any], bool] | None] = queue.Queue(self.WAITING)
        # A daemon, as a call that hangs must not keep the process from ending.
        threading.Thread(target=self._work, name="W&B", daemon=True).start()

    def start(self, start: Callable[[], Any], seconds: float) -> bool:
        """Set `run` to what `start` returns; False if it failed or took too long."""

        def call(_: Any) -> None:
            self.run = start()

        self.call(call)
        return self.wait(seconds) and self.problem is None

    def call(self, call: Callable[[Any], Any], always: bool = False) -> None:
        """Have something done with the run, without waiting for it."""
        try:
            self._calls.put_nowait((call, always))
        except queue.Full:
            self.problem = self.problem or "it does not keep up"

    def close(self) -> None:
        """Let the thread end once it has nothing left to do."""
        with suppress(queue.Full):
            self._calls.put_nowait(None)

    def wait(self, seconds: float) -> bool:
        """Wait until every call has been made; False, and a problem, if that takes longer."""
        end = time.monotonic() + seconds
        with self._calls.all_tasks_done:
            while self._calls.unfinished_tasks:
                left = end - time.monotonic()
                if left <= 0:
                    self.problem = self.problem or f"no answer within {seconds:.0f} s"
                    return False
                self._calls.all_tasks_done.wait(left)
        return True

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, always = item
            try:
                if self.problem is None or always:
                    call(self.run)
            except Exception as error:
                self.error = self.error or error
                self.problem = self.problem or _first_line(error)
            finally:
                self._calls.task_done()


def _end_service() -> None:
    """End W&B's service process, for which the interpreter would wait at its end and which a later run would use.

    It may hang or be dead already, so nothing is asked of it, as wandb.teardown() would.
    """
    with suppress(Exception):  # none of this is public
        from wandb.sdk import wandb_setup
        from wandb.sdk.lib.service import service_token

        connection: Any = wandb_setup._singleton._connection  # type: ignore[union-attr]
        wandb_setup._singleton = None
        service_token.clear_service_in_env()
        connection._proc._process.kill()
        connection._cleanup()  # the wait at the end


def _has_space(directory: Path) -> bool:
    return not directory.is_dir() or shutil.disk_usage(directory).free > 1 << 16


class Tracker:
    """Writes metrics to directory/metrics.jsonl and mirrors them to Weights & Biases; a context manager.

    metrics.jsonl holds one JSON object a line and one line a step, {"step": k, "train/loss": ..., ...}; steps
    ascend. Metrics logged later for the newest step join its line, which is rewritten in place. Every `log` reaches
    the operating system before it returns, so a killed process loses nothing; `flush` also survives a power cut.

    Every line has trainer/tokens: step times `tokens_per_step`, so that a resumed run needs no counter.
    `resume_step` = k removes the rows of later steps, which are about to be trained again. `state` is what `state()`
    returned before: it continues the same W&B run. `config` is the resolved configuration as a plain nested dict.
    W&B keeps its files in directory/wandb, and gets directory/report.html as an artifact if there is one at the end.

    Raises ConfigError if metrics.jsonl is damaged, and with tracking.strict if W&B cannot be reached; OSError, naming
    the file, if it cannot be written, and the row that was there before is there still.
    """

    START_SECONDS = 15.0  # to wait for W&B beyond its own limits
    FINISH_SECONDS = 75.0

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
        # The row of the checkpoint's step is rewritten when more is logged of it; torn by that, it is in the state.
        self._row = _keep_until(path, resume_step, state.get("row"))
        self._told = False
        self._mirror = self._start_wandb(directory, config, tracking, name)
        path.touch()
        self._file = path.open("r+b", buffering=0)  # nothing is held back that a full disk did not take
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
        before, self._row = self._row, self._row | values
        try:
            self._put(self._row)
        except OSError as error:
            with suppress(OSError):  # what was there had room
                self._put(before if before.keys() > {"step"} else None)
            raise OSError(error.errno, error.strerror, str(self._directory / METRICS_FILE)) from error
        # W&B's own step may not go back, so it is left alone; rows without a value would only draw gaps.
        row = {name: number for name, number in values.items() if number is not None}
        self._to_wandb(lambda run: run.log({"trainer/step": step, **row}))

    def _put(self, row: dict[str, Any] | None) -> None:
        """Make this row the last line, in place of the one of the same step."""
        self._file.seek(self._offset)
        left = memoryview(b"" if row is None else _encode(row))
        while left:
            left = left[self._file.write(left) :]
        self._file.truncate()  # after the write: a kill in between leaves a torn last line, which readers drop

    def flush(self) -> None:
        """Force metrics.jsonl to the disk; called before each checkpoint."""
        os.fsync(self._file.fileno())

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs to go on with the same W&B run, count and last row; plain values."""
        return {"wandb_id": self._run_id, "nonfinite": self.nonfinite, "row": dict(self._row)}

    def finish(self, status: str, summary: Mapping[str, Any] | None = None) -> None:
        """Close the file and the W&B run, whose summary gets `summary` and the status; later calls do nothing.

        The W&B run counts as finished if status is 'finished', and as failed with anything else.
        """
        if self._finished:
            return
        self._finished = True
        values = {"status": status, **(summary or {})}
        self._to_wandb(lambda run: run.summary.update(values))
        self._to_wandb(self._log_report)
        self._to_wandb(lambda run: run.finish(exit_code=0 if status == "finished" else 1), always=True)
        self._leave_wandb(self.FINISH_SECONDS)
        self.flush()  # last, because a full disk makes it raise
        self._file.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt) and self._mirror is not None:  # at once
            _end_service()
            self._mirror = None
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
        self._to_wandb(lambda run: run.alert(title="non-finite metric", text=text, level="ERROR"))

    def _to_wandb(self, call: Callable[[Any], Any], always: bool = False) -> None:
        """Have something done with the W&B run, if there is one; a problem that it has had meanwhile is said, once."""
        if self._mirror is None:
            return
        self._mirror.call(call, always)
        self._tell_problem()

    def _tell_problem(self) -> None:
        if self._mirror is not None and self._mirror.problem and not self._told:
            self._told = True
            self._say(f"warning: W&B failed ({self._mirror.problem}); the run goes on with {METRICS_FILE} alone")

    def _leave_wandb(self, seconds: float) -> None:
        """Wait until W&B has got everything, or end its process; what it has not uploaded lies in the run's wandb/."""
        if self._mirror is None:
            return
        done = False
        try:
            done = self._mirror.wait(seconds)
            if not _has_space(self._directory / "wandb"):  # its service tells nobody
                self._mirror.problem = self._mirror.problem or "its disk is full"
        finally:
            if self._mirror.problem or not done:  # or it was Ctrl-C
                _end_service()
            self._tell_problem()
            self._mirror.close()
            self._mirror = None

    def _start_wandb(
        self, directory: Path, config: dict[str, Any], tracking: TrackingConfig, name: str
    ) -> Mirror | None:
        """The W&B run, or None if disabled or impossible."""
        mode = wanted_mode(tracking)
        if mode == "disabled":
            return None
        if mode not in ("auto", "online", "run", "offline", "dryrun"):
            self._say(f"warning: WANDB_MODE={mode} is none of online, offline, disabled; going on offline")
            mode = os.environ["WANDB_MODE"] = "offline"  # W&B refuses to start with an unknown one
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

        def connect() -> Any:
            run = self._connect(mode, arguments, directory / "wandb", tracking, limit)
            _define_metrics(run)
            return run

        mirror, limit = Mirror(), float(os.environ.get("WANDB_INIT_TIMEOUT", 30))
        try:
            started = mirror.start(connect, limit + self.START_SECONDS)
        except BaseException:  # Ctrl-C
            _end_service()
            raise
        if started:
            self._run_id = run_id
            return mirror
        if isinstance(mirror.error, ConfigError):
            raise mirror.error
        _end_service()
        if tracking.strict and mode not in ("offline", "dryrun"):
            raise ConfigError(f"tracking.wandb={tracking.wandb}: W&B cannot be reached: {mirror.problem}")
        self._say(f"warning: W&B cannot start ({mirror.problem}); the run goes on with {METRICS_FILE} alone")
        return None

    def _connect(
        self, mode: str, arguments: dict[str, Any], files: Path, tracking: TrackingConfig, limit: float
    ) -> Any:
        """wandb.init online if wanted and possible, else offline."""
        import wandb  # takes half a second, so only where it is used

        arguments["settings"] = wandb.Settings(
            **QUIET,
            disable_git=True,
            disable_code=True,
            save_code=False,
            init_timeout=limit,
            finish_timeout=60,  # what is not uploaded by then stays in the run's directory, for `wandb sync`
        )
        # For the whole process, before anything else: a later login would print, and ask for a key on a terminal.
        wandb.setup(wandb.Settings(**QUIET))
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
                wandb.setup(wandb.Settings(**QUIET))
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


def wanted_mode(tracking: TrackingConfig) -> str:
    """tracking.wandb; where that is 'auto', WANDB_MODE, if it is set."""
    return os.environ.get("WANDB_MODE") or "auto" if tracking.wandb == "auto" else tracking.wandb


def account() -> tuple[bool, str]:
    """Whether W&B has an API key, and its server's address; asks nobody and prints nothing."""
    import wandb

    server = wandb.setup(wandb.Settings(**QUIET)).settings.base_url
    try:
        return wandb.login(prompt=False, verify=False), server
    finally:
        wandb.teardown()


class NoTracker(Tracker):
    """Takes everything and keeps nothing: of all processes of a run but the first."""

    def __init__(self) -> None:
        self._finished, self._mirror = True, None

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
            with suppress(OSError):  # the terminal has gone; the run goes on
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
            with suppress(OSError):
                self._bar.close()

    def _flush_line(self) -> None:
        if self._pending is not None:
            with suppress(OSError):  # whoever read along has gone
                print(self._pending, file=self.stream, flush=True)
        self._pending = None


def clock(seconds: float) -> str:
    """1:23 or 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
