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
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tapernorm.config.options import TrackingConfig
from tapernorm.config.schema import ConfigError
from tapernorm.runtime.record import METRICS, METRICS_FILE, REPORT_FILE, _encode, _keep_until, _number

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


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
