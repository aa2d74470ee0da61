"""What a run reports: one metrics.jsonl always, and Weights & Biases as its mirror.

The mirror is a process of its own that follows metrics.jsonl, so it cannot stop, slow or distort training: whatever
goes wrong with it, a call that never returns included, is said in one line and the run goes on. This is the only
module that imports wandb, and only the mirror's process does so (`python -m tapernorm.training.tracking`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tapernorm.config.options import TrackingConfig
from tapernorm.config.schema import ConfigError
from tapernorm.runtime.record import METRICS, METRICS_FILE, REPORT_FILE, MetricsFile

log = logging.getLogger(__name__)

QUIET: dict[str, Any] = {"silent": True, "quiet": True, "console": "off"}  # of wandb.Settings
# What W&B's summary keeps of a metric where that is not its last value.
SUMMARIES = {"val/loss": "min", "val/perplexity": "min", "throughput/tokens_per_s": "mean"}
Messages = queue.SimpleQueue[tuple[str, Any]]
POLL_SECONDS = 0.5  # between two looks of the mirror at metrics.jsonl


class Tracker:
    """Writes metrics to directory/metrics.jsonl and mirrors them to Weights & Biases; a context manager.

    Each `log` appends a row with trainer/tokens, which is step times `tokens_per_step`. `resume_step` = k removes the
    rows of later steps, which are about to be trained again. `state` is what `state()` returned before: it continues
    the same W&B run. `config` is the resolved configuration as a plain nested dict. W&B keeps its files in
    directory/wandb, and gets directory/report.html if there is one at the end.

    Raises what MetricsFile raises, and ConfigError with tracking.strict if W&B cannot be reached.
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
    ) -> None:
        state = state or {}
        self.nonfinite: int = state.get("nonfinite", 0)
        self._run_id: str | None = state.get("wandb_id")
        self._directory, self._tokens_per_step = directory, tokens_per_step
        self._finished = False
        directory.mkdir(parents=True, exist_ok=True)
        self._rows = MetricsFile(directory, resume_step)
        self._mirror = self._start_mirror(config, tracking, name)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record numbers of a step: int, float, None, 0-d tensors and numpy scalars.

        NaN and infinities are written as null and counted: from the first on, every row has nonfinite/count.
        Raises TypeError, naming the metric, for anything that is no number; non-finite values never raise.
        """
        row: dict[str, int | float | None] = {"step": step, "trainer/tokens": step * self._tokens_per_step}
        for name, value in metrics.items():
            number = _number(name, value)
            if number is not None and not math.isfinite(number):
                if self.nonfinite == 0:
                    self._warn(f"{name} is {number} at step {step}")
                self.nonfinite += 1
                number = None
            row[name] = number
        if self.nonfinite:
            row["nonfinite/count"] = self.nonfinite
        self._rows.append(row)
        self._hear_mirror()

    def flush(self) -> None:
        """Force metrics.jsonl to the disk; called before each checkpoint."""
        self._rows.flush()

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
        if self._mirror is not None:
            self._mirror.send("finish", {"status": status, **(summary or {})})
            self._mirror.hear("end", self.FINISH_SECONDS)
            files = self._directory / "wandb"
            if files.is_dir() and shutil.disk_usage(files).free <= 1 << 16:  # W&B tells nobody
                self._mirror.problem = self._mirror.problem or "its disk is full"
            self._hear_mirror()
        self.flush()  # last, because a full disk makes it raise
        self._rows.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt) and self._mirror is not None:  # at once
            self._mirror.kill()
            self._mirror = None
        self.finish("finished" if kind is None else "failed")

    def _warn(self, text: str) -> None:
        log.warning(f"{text}; non-finite values are logged as null and counted in nonfinite/count")
        if self._mirror is not None:
            self._mirror.send("alert", text)

    def _hear_mirror(self) -> None:
        """Say what the mirror has to say; a problem ends it."""
        if self._mirror is not None:
            self._mirror.hear()
            if self._mirror.problem:
                log.warning(f"W&B failed ({self._mirror.problem}); the run goes on with {METRICS_FILE} alone")
                self._mirror.kill()
                self._mirror = None

    def _start_mirror(self, config: dict[str, Any], tracking: TrackingConfig, name: str) -> Mirror | None:
        """The mirror once it has begun, None if it is disabled or impossible."""
        wanted = wanted_mode(tracking)
        if wanted == "disabled":
            return None
        mode = {"run": "online", "dryrun": "offline"}.get(wanted, wanted)
        if mode not in ("auto", "online", "offline"):
            log.warning(f"WANDB_MODE={wanted} is none of online, offline, disabled; going on offline")
            mode = "offline"
        run_id = self._run_id or secrets.token_hex(4)
        seconds = float(os.environ.get("WANDB_INIT_TIMEOUT", 30))
        request = {
            "mode": mode,
            "strict": tracking.strict,
            "seconds": seconds,
            "from": self._rows.end,
            "run": {
                "dir": str(self._directory),
                "project": tracking.project,
                "entity": tracking.entity,
                "group": tracking.group,
                "tags": list(tracking.tags),
                "name": name,
                "id": run_id,  # one of our own: a WANDB_RUN_ID in the environment would merge the jobs of a sweep
                "config": config,
                "allow_val_change": True,  # a resumed run may have changed settings
            },
        }
        mirror = Mirror(request, seconds + self.START_SECONDS)
        if not mirror.problem:
            self._run_id = run_id
            return mirror
        mirror.kill()
        if tracking.strict and mode != "offline":
            raise ConfigError(f"tracking.wandb={tracking.wandb}: W&B cannot be reached: {mirror.problem}")
        log.warning(f"W&B cannot start ({mirror.problem}); the run goes on with {METRICS_FILE} alone")
        return None


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


def _number(name: str, value: Any) -> int | float | None:
    if hasattr(value, "item"):  # a tensor or numpy scalar
        value = value.item()
    if value is None or isinstance(value, float):
        return value
    if isinstance(value, int):
        return int(value)
    raise TypeError(f"metric {name} is a {type(value).__name__}, not a number")


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


# ------------------------------------------------------------------------------------------ the mirror, from outside
# The two processes send each other lines of JSON, [kind, content]. Rows go by way of the file: a pipe that nobody reads
# fills up, and then stops whoever writes.


class Mirror:
    """The process that mirrors a run. `problem` says in one line what has ended it; None if nothing has."""

    def __init__(self, request: dict[str, Any], seconds: float) -> None:
        self.problem: str | None = None
        self._heard = set[str]()
        path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            start_new_session=True,  # a Ctrl-C is for the run, which decides about its mirror
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same on Windows
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, _messages(self._process.stdout)
        self.send("start", request)
        self.hear("ready", seconds)

    def send(self, kind: str, content: Any) -> None:
        with suppress(OSError):  # it has ended, as its answers tell
            print(json.dumps([kind, content]), file=self._requests, flush=True)

    def hear(self, until: str = "", seconds: float = 0.0) -> None:
        """Take note of the answers that are there, or wait for one: none in so many seconds is a problem."""
        try:
            while until not in self._heard and not self.problem:
                kind, content = self._answers.get(timeout=seconds)
                self._heard.add(kind)
                if kind in ("info", "warning"):
                    getattr(log, kind)(content)
                elif kind == "problem":
                    self.problem = content
                elif kind == "end":
                    self.kill()
                    self.problem = None if "done" in self._heard else "its process has ended"
        except queue.Empty:
            if until:
                self.problem = f"no answer within {seconds:.0f} s"
        except BaseException:  # Ctrl-C
            self.kill()
            raise

    def kill(self) -> None:
        """End it at once, and with it W&B's own process; what is not uploaded yet lies in the run's wandb/."""
        self._process.kill()
        self._process.wait()
        with suppress(OSError):
            self._requests.close()


def _messages(stream: IO[str]) -> Messages:
    """What arrives on a stream, and ("end", None) after it, without waiting for it."""
    messages: Messages = queue.SimpleQueue()

    def read() -> None:
        with stream:
            for line in stream:
                messages.put(tuple(json.loads(line)))
        messages.put(("end", None))

    threading.Thread(target=read, daemon=True).start()
    return messages


# --------------------------------------------------------------------------------------------------- inside the mirror


def main() -> None:
    """Follow a run until it ends: requests on standard input, answers on standard output."""
    requests = _messages(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what W&B prints is for nobody

    def answer(kind: str, content: str = "") -> None:
        print(json.dumps([kind, content]), file=answers, flush=True)

    run = None
    try:
        _, request = requests.get()
        run = _connect(request, answer)
        answer("ready")
        _follow(run, request, requests)
        answer("done")
    except Exception as error:
        with suppress(Exception):
            if run is not None:
                run.finish(exit_code=1)
        answer("problem", _first_line(error))
        os._exit(1)  # W&B's own tidying up may wait for ever


def _connect(request: dict[str, Any], answer: Callable[[str, str], None]) -> Any:
    """wandb.init online if wanted and possible, else offline."""
    os.environ["WANDB_MODE"] = "offline" if request["mode"] == "offline" else "online"
    import wandb

    arguments, auto = request["run"], request["mode"] == "auto"
    arguments["settings"] = wandb.Settings(
        **QUIET,
        disable_git=True,
        disable_code=True,
        save_code=False,
        init_timeout=request["seconds"],
        finish_timeout=60,  # what is not uploaded by then stays in the run's directory, for `wandb sync`
    )
    wandb.setup(wandb.Settings(**QUIET))  # else it asks an unreachable server who the user is, without a limit of time
    run, reason = None, "no API key"
    if request["mode"] != "offline":
        try:
            if wandb.login(prompt=False, verify=False):
                run = wandb.init(mode="online", resume="allow", **arguments)
                answer("info", f"W&B: {run.url}")
        except Exception as error:
            auto, reason = False, _first_line(error)
            wandb.teardown()  # else the id stays in use by the attempt that failed
        if run is None and request["strict"] and not auto:
            raise RuntimeError(reason)
        if run is None:
            files = f"{arguments['dir']}/wandb/offline-run-*"
            answer("info" if auto else "warning", f"W&B: {reason}, so offline; to upload later: wandb sync {files}")
    if run is None:
        run = wandb.init(mode="offline", **arguments)
        # The file that W&B itself writes online only, in its layout; JSON is YAML.
        tree = {key: {"value": value} for key, value in arguments["config"].items()}
        Path(run.dir, "config.yaml").write_text(json.dumps(tree, indent=2) + "\n")
    run.define_metric("trainer/tokens")
    for name in METRICS.keys() - {"trainer/tokens"}:
        pattern = name.replace("<site>", "*")
        run.define_metric(pattern, step_metric="trainer/tokens", summary=SUMMARIES.get(name))
    return run


def _follow(run: Any, request: dict[str, Any], requests: Messages) -> None:
    """Log the rows that metrics.jsonl gets; close the W&B run when the run has ended, or its process is gone."""
    directory, kind = Path(request["run"]["dir"]), ""
    content: Any = None
    with (directory / METRICS_FILE).open("rb") as file:
        file.seek(request["from"])
        while kind not in ("finish", "end"):
            kind = ""
            with suppress(queue.Empty):
                kind, content = requests.get(timeout=POLL_SECONDS)
            while (line := file.readline()).endswith(b"\n"):
                row = json.loads(line)
                # W&B's own step may not go back, so it is left alone; rows without a value would only draw gaps.
                values = {name: value for name, value in row.items() if value is not None and name != "step"}
                run.log({"trainer/step": row["step"], **values})
            file.seek(-len(line), os.SEEK_CUR)  # half a row
            if kind == "alert":
                run.alert(title="non-finite metric", text=content, level="ERROR")
    summary = content if kind == "finish" else {"status": "failed"}
    run.summary.update(summary)
    if (directory / REPORT_FILE).is_file():
        import wandb

        report = wandb.Artifact(f"report-{run.id}", type="report")
        report.add_file(str(directory / REPORT_FILE), policy="immutable")  # by default a copy goes to the user's home
        run.log_artifact(report)
    run.finish(exit_code=0 if summary["status"] == "finished" else 1)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


if __name__ == "__main__":
    main()
