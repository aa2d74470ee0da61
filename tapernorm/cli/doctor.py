"""What a machine has of what tapernorm needs: findings of one line each, with a remedy where something is amiss.

It has to work where nothing else does. So the standard library is all that is imported here, every other import is
inside the check that needs it, and what may crash the interpreter or hang happens in a process of its own with a time
limit. No finding holds a key, a password or more of a path than is needed: see `redact`.
"""

from __future__ import annotations

import json
import locale
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from tapernorm import __version__, git_revision

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
INSTALL = "pip install -c constraints.txt -e ."
ANSWER_SECONDS = 3.0  # how long a server may take
COMPILE_SECONDS, TRAIN_SECONDS, IMPORT_SECONDS = 26.0, 26.0, 24.0  # all three start at once
EXTRAS = {
    "joblib": "sweeps in several processes",
    "slurm": "sweeps on SLURM",
    "dashboard": "scripts/wandb_dashboard.py",
    "lens": "taking models apart (docs/interpretability.md)",
    "lm_eval": "benchmarks of exported models (docs/method.md)",
}
MODULES = {"hydra-core": "hydra", "PyYAML": "yaml"}  # where the module has another name than the package
VARIABLES = re.compile(  # that change what happens here; their values are not shown
    r"TAPERNORM_|WANDB_|HF_|HUGGINGFACE_|TRANSFORMERS_|TIKTOKEN_|DATA_GYM_|HYDRA_|TORCH|CUDA_|NVIDIA_|PYTORCH_|OMP_|MKL_"
    r"|PYTHON|TMPDIR$|CC$|CXX$|(?i:https?|all|no)_proxy$",
    flags=re.ASCII,
)
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", flags=re.IGNORECASE)


@dataclass(frozen=True)
class Finding:
    """One line of the report. A problem stops ordinary use; a warning limits, slows or endangers some of it."""

    mark: Literal["ok", "warning", "problem"]
    topic: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.mark:<8} {self.topic}: {self.text}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Options:
    """Where to look, and which modules turned out not to be importable."""

    runs_dir: str = "runs"
    cache_dir: str | None = None
    broken: Mapping[str, str] = field(default_factory=dict)


Check = Callable[[Options], Iterable[Finding]]
ok, warning, problem = (partial(Finding, mark) for mark in ("ok", "warning", "problem"))


def ok_if(fine: object, topic: str, text: str, remedy: str, otherwise: Callable[..., Finding] = warning) -> Finding:
    return ok(topic, text) if fine else otherwise(topic, text, remedy)


# -------------------------------------------------------------------------------------------------- Python, packages


def check_python(options: Options) -> Iterator[Finding]:
    where = f"Python {platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}"
    yield ok_if(sys.version_info >= (3, 11), "python", where, "tapernorm needs Python 3.11", problem)
    text = f"{__version__}, {git_revision() or 'not a git checkout'}, in {ROOT}"
    if ROOT in map(Path, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        yield ok("tapernorm", f"{text}, by PYTHONPATH")
    elif other := installed_root():
        differs = f"{text}; but the installed one, which scripts/ use, is in {other}"
        yield ok_if(other == ROOT, "tapernorm", text if other == ROOT else differs, INSTALL)
    else:
        yield warning("tapernorm", f"{text}, not installed, so only train.py and evaluate.py find it", INSTALL)


def installed_root() -> Path | None:
    """The directory from which programs elsewhere import tapernorm."""
    code = "import importlib.util; print(importlib.util.find_spec('tapernorm').origin)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    return Path(done.stdout.strip()).resolve().parents[1] if done.stdout else None


def check_packages(options: Options) -> Iterator[Finding]:
    """Versions against the ranges of pyproject.toml."""
    _, needed, extras = requirements()
    fitting = []
    for text in needed:
        name, version = name_of(text), version_of(name_of(text))
        if version is not None and fits(text, version):
            fitting.append(f"{name} {version}")
        else:
            fault = f"{name} is not installed" if version is None else f"{name} {version} is outside {text}"
            yield problem("packages", fault, INSTALL)
    if fitting:
        yield ok("packages", f"{len(fitting)} within their ranges: {', '.join(fitting)}")
    for extra, purpose in EXTRAS.items():
        for text in extras.get(extra, []):
            name, version, remedy = name_of(text), version_of(name_of(text)), f"{INSTALL[:-1]}'.[{extra}]'"
            if version is None or fits(text, version):
                yield ok("extras", f"{name}, for {purpose}: {version or f'not installed, {remedy} brings it'}")
            else:
                yield warning("extras", f"{name} {version} is outside {text}", remedy)


def requirements() -> tuple[str, list[str], dict[str, list[str]]]:
    """(Python's range, requirements, requirements by extra): of the source tree, else of the installed package."""
    file = ROOT / "pyproject.toml"
    if file.is_file():
        import tomllib  # new in 3.11

        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        return project["requires-python"], project["dependencies"], project["optional-dependencies"]
    found: dict[str, list[str]] = {}
    for text in metadata.requires("tapernorm") or []:
        text, _, marker = text.partition(";")
        extra = re.search(r"extra == ['\"]([^'\"]+)", marker)
        found.setdefault(extra[1] if extra else "", []).append(text.strip())
    return metadata.metadata("tapernorm")["Requires-Python"], found.pop("", []), found


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def fits(requirement: str, version: str) -> bool:
    """Whether `version` is in the range of a requirement such as 'omegaconf>=2.3,<2.4'."""
    from packaging.requirements import Requirement

    return Requirement(requirement).specifier.contains(version, prereleases=True)


IMPORTING = """
import importlib, sys
for name in sys.argv[1:]:
    print("start", name, flush=True)
    try:
        importlib.import_module(name)
    except BaseException as error:
        first = (str(error).splitlines() or [""])[0]
        print("fault", name, f"{type(error).__name__}: {first}", flush=True)
"""


def broken_modules() -> dict[str, str]:
    """Installed packages that cannot be imported, with the reason, also where importing one kills the interpreter."""
    _, needed, _ = requirements()
    names = [MODULES.get(name_of(text), name_of(text)) for text in needed if version_of(name_of(text))]
    broken: dict[str, str] = {}
    while names:
        code, out, _ = in_child(IMPORTING, *names, seconds=IMPORT_SECONDS)
        lines = [line.split(" ", 2) for line in out.splitlines() if line.startswith(("start ", "fault "))]
        broken |= {row[1]: row[2] for row in lines if row[0] == "fault"}
        if code == 0 or not lines:
            break
        last = lines[-1][1]
        broken[last] = "no end within the time limit" if code is None else f"it ends Python with status {code}"
        names = names[names.index(last) + 1 :] if code is not None else []
    return broken


def check_imports(options: Options) -> Iterator[Finding]:
    for name, reason in options.broken.items():
        yield problem("imports", f"{name} is installed but broken ({reason})", f"reinstall it: {INSTALL}")
    if not options.broken:
        yield ok("imports", "every installed package can be imported")


# ------------------------------------------------------------------------------------------------------------ machine


def check_environment(options: Options) -> Iterator[Finding]:
    names = sorted(name for name in os.environ if VARIABLES.match(name))
    yield ok("environment", f"set (values are not shown): {', '.join(names) or 'none of the usual variables'}")


def check_console(options: Options) -> Iterator[Finding]:
    encoding = (sys.stdout.encoding or "none").lower()
    text = f"{encoding} on standard output, locale {'.'.join(filter(None, locale.getlocale())) or 'C'}"
    complete = encoding.replace("-", "") == "utf8"
    text += "" if complete else ": characters it lacks become '?'"
    yield ok_if(complete, "console", text, "set PYTHONUTF8=1 or LC_ALL=C.UTF-8")


def check_limits(options: Options) -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < 1024  # -1: no limit
    text = f"{soft} open files" + (" are few for large data sets and W&B" if few else "")
    yield ok_if(not few, "limits", text, f"ulimit -n {max(hard, 1024)}")


def check_memory(options: Options) -> Iterator[Finding]:
    sizes = []
    with suppress(ValueError, OSError, AttributeError):  # Windows
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = _cgroup("memory.max", "memory/memory.limit_in_bytes").strip()
    if limit.isdigit() and int(limit) < 2**60:  # version 1 has a huge number for 'no limit'
        sizes.append(int(limit))
    if sizes:
        text = f"{min(sizes) / GIB:.1f} GiB for this process" + (", limited by its cgroup" if len(sizes) > 1 else "")
        yield ok_if(min(sizes) >= 2 * GIB, "memory", text, "model=tiny or 1m, a smaller trainer.batch_size")


def _cgroup(*names: str) -> str:
    """The first of a container's limit files that can be read, versions 2 and 1."""
    for name in names:
        with suppress(OSError, ValueError):
            return Path("/sys/fs/cgroup", name).read_text(encoding="ascii")
    return ""


def cores() -> float:
    """Cores that this process may use: by its affinity and its container's quota."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup("cpu.max").split()  # microseconds of computing, per microseconds; 'max' for no limit
    return min(mine, int(quota[0]) / int(quota[1])) if quota and quota[0].isdigit() else mine


def check_storage(options: Options) -> Iterator[Finding]:
    """Room, and whether a file can be written, forced to the disk and renamed, as checkpoints and data are."""
    cache = options.cache_dir or os.environ.get("TAPERNORM_CACHE") or "~/.cache/tapernorm"
    for topic, given, remedy in (
        ("runs_dir", options.runs_dir, "choose another one with runs_dir=..."),
        ("cache_dir", cache, "choose another one with cache_dir=... or TAPERNORM_CACHE"),
        ("temp", None, "choose another one with TMPDIR"),
    ):
        try:
            wanted = Path(tempfile.gettempdir() if given is None else given).expanduser().absolute()
            existing = next(path for path in (wanted, *wanted.parents) if path.exists())
            free = shutil.disk_usage(existing).free
            try_disk(existing)
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
            reason = getattr(error, "strerror", None) or error
            yield problem(topic, f"{given or 'the temporary directory'} cannot be used: {reason}", remedy)
        else:
            where = f"{wanted}" + ("" if existing == wanted else " (will be made)")
            text = f"{where}: {free / GIB:.1f} GiB free, write, fsync and rename work"
            yield ok_if(free >= GIB, topic, text, f"make room, or {remedy}")


def try_disk(directory: Path) -> None:
    """Raises OSError if a file cannot be written, forced to the disk and renamed in `directory`."""
    with tempfile.TemporaryDirectory(prefix=".tapernorm-doctor-", dir=directory) as folder:
        file = Path(folder, "a")
        with file.open("wb") as stream:
            stream.write(b"0" * 4096)
            stream.flush()
            os.fsync(stream.fileno())
        file.rename(file.with_name("b"))


def check_device(options: Options) -> Iterator[Finding]:
    import torch

    from tapernorm.runtime.device import pick_device, pick_dtype

    device = pick_device("auto")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found = f"{len(names)} CUDA {torch.version.cuda} devices ({', '.join(names)})" if names else "no CUDA device"
    text = f"{found}; auto is {device} in {str(pick_dtype('auto', device)).removeprefix('torch.')}"
    unused = device.type != "cuda" and shutil.which("nvidia-smi")
    text += f", although there is an NVIDIA driver (torch {torch.__version__})" if unused else ""
    remedy = "see CUDA_VISIBLE_DEVICES and nvidia-smi, or install torch for your driver from pytorch.org"
    yield ok_if(not unused, "device", text, remedy)
    threads, available = torch.get_num_threads(), cores()
    chosen = os.environ.get("OMP_NUM_THREADS", "not set")
    text = f"{threads} threads (OMP_NUM_THREADS {chosen}), {available:g} of {os.cpu_count()} cores to use"
    remedy = f"more threads than cores are slow: OMP_NUM_THREADS={max(int(available), 1)}"
    yield ok_if(threads <= max(available, 1), "threads", text, remedy)


COMPILING = """
import torch
from tapernorm.runtime.device import pick_device
x = torch.arange(8.0, device=pick_device("auto"))
y = torch.compile(lambda x: torch.sin(x) * 2 + 1)(x)
assert torch.allclose(y, torch.sin(x) * 2 + 1, atol=1e-5), "wrong numbers"
"""


def check_compile(options: Options) -> Iterator[Finding]:
    """Only trainer.compile and the benchmarks need it, so what fails here is a warning."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        own = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        own["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"  # which pays from the second kernel on
        code, _, said = in_child(COMPILING, seconds=COMPILE_SECONDS, **own)
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if code == 0:
        text = "works"
    elif code is None:
        text = f"is not done within {COMPILE_SECONDS:.0f} s; is the machine busy?"
    elif compiler is None or not shutil.which(compiler.split()[0]):
        text = f"finds no C++ compiler ({f'CXX={compiler}' if compiler else 'g++ or clang++'})"
    else:
        text = f"fails ({last_line(said, code)})"
    yield ok_if(code == 0, "torch.compile", text, "trainer.compile=false, the default, does without")


# ----------------------------------------------------------------------------------------------------------- services


def check_tokenizer(options: Options) -> Iterator[Finding]:
    from tapernorm.data.tokenizer import gpt2_cache

    cache, cached = gpt2_cache()
    source = "TIKTOKEN_CACHE_DIR" if "TIKTOKEN_CACHE_DIR" in os.environ else "tiktoken's default"
    if cached:
        yield ok("tokenizer", f"GPT-2's files are in {cache} ({source})")
    elif os.environ.get("TIKTOKEN_CACHE_DIR") == "":
        yield warning("tokenizer", "TIKTOKEN_CACHE_DIR is empty, so tiktoken caches nothing", "name a directory")
    else:
        yield ok("tokenizer", f"GPT-2's files are not in {cache} ({source}); tokenizer=gpt2 downloads them first")


def check_hub(options: Options) -> Iterator[Finding]:
    from huggingface_hub import constants, get_token

    kept = list(Path(constants.HF_HUB_CACHE).glob("*--*"))
    text = f"cache {constants.HF_HUB_CACHE} ({len(kept)} repositories), token {'set' if get_token() else 'not set'}"
    switches = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    offline = [name for name in switches if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")]
    if offline:
        yield ok("hub", f"{text}; offline by {', '.join(offline)}")
    elif reason := unreachable(constants.ENDPOINT):
        remedy = "local copies do: dataset.path=<folder>, model.init=<directory>"
        yield warning("hub", f"{text}; {constants.ENDPOINT} cannot be reached ({reason})", remedy)
    else:
        yield ok("hub", f"{text}; {constants.ENDPOINT} answers")


def check_wandb(options: Options) -> Iterator[Finding]:
    from tapernorm.config.options import TrackingConfig
    from tapernorm.training.tracking import account, wanted_mode

    mode = wanted_mode(TrackingConfig())
    if mode == "disabled":
        yield ok("W&B", "off (WANDB_MODE=disabled)")
        return
    key, server = account()
    text = f"API key {'present' if key else 'not present'}; tracking.wandb=auto goes "
    if mode in ("offline", "dryrun") or not key:
        yield ok("W&B", f"{text}offline" + (f" (WANDB_MODE={mode})" if mode != "auto" else ""))
    elif reason := unreachable(server):
        remedy = "runs go on offline and are uploaded later with wandb sync; WANDB_MODE=offline starts them faster"
        yield warning("W&B", f"{text}online, but {server} cannot be reached ({reason})", remedy)
    else:
        yield ok("W&B", f"{text}online; {server} answers")


def unreachable(address: str) -> str | None:
    """Why a server does not answer, None if it does. The error's text may hold a proxy's password: its kind will do."""
    import requests

    try:
        requests.head(address, timeout=ANSWER_SECONDS)
    except (requests.RequestException, ValueError) as error:
        return type(error).__name__
    return None


# ----------------------------------------------------------------------------------------------------------- training

TINY: dict[str, Any] = {
    "model": {"n_layer": 2, "n_ctx": 32, "d_model": 32, "head_dim": 16},
    "norm": {"kind": "taper", "sites": ["attn", "mlp", "final"]},
    "anchor": {"kind": "fixed_target"},
    "gate": {"k_warmup": 5, "k_taper": 9},
    "calibration": {"window": 3},
    "dataset": {"kind": "toy", "stories": 100, "valid_stories": 20, "vocab_size": 300},
    "optim": {"lr": 0.003},
    "trainer": {"max_steps": 12, "batch_size": 4, "val_interval": 12, "val_tokens": 512, "save_interval": 7}
    | {"samples": 0, "progress": "none"},
    "tracking": {"wandb": "disabled"},
    "report": False,
}


def self_test(folder: Path) -> None:
    """Train through warmup, calibration and taper, resume from the middle, fold. Raises AssertionError in words."""
    import torch

    from tapernorm.config.resolve import build, resolve
    from tapernorm.model.fold import fold
    from tapernorm.runtime.device import pick_device
    from tapernorm.training import checkpoint
    from tapernorm.training.loop import train

    config = resolve(build({**TINY, "cache_dir": str(folder / "cache")}))

    def run(name: str, start: Path | None = None) -> tuple[Path, dict[str, Any]]:
        (folder / name).mkdir(parents=True, exist_ok=True)
        summary = train(config, folder / name, start, say=lambda line: None)
        return checkpoint.path_at(folder / name, config.trainer.max_steps), summary

    last, summary = run("whole")
    require(summary["val_loss"] is not None and summary["gate"] == 0.0, "the gate did not reach 0")
    resumed, again = run("resumed", checkpoint.path_at(folder / "whole", 7))
    if pick_device("auto").type == "cpu":
        ours, theirs = checkpoint.read_weights(last), checkpoint.read_weights(resumed)
        different = [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
        require(not different, f"the resumed run differs from the uninterrupted one in {', '.join(different[:3])}")
    else:  # some of a GPU's kernels add in an order that changes from run to run
        difference = abs(again["val_loss"] - summary["val_loss"])
        require(difference < 0.05, f"the resumed run's loss differs from the uninterrupted one's by {difference:.1e}")
    model, _, tokenizer = checkpoint.load_model(last)
    model = model.double().eval()
    tokens = torch.arange(64).reshape(2, 32) % tokenizer.n_vocab
    with torch.no_grad():
        difference = (fold(model)(tokens) - model(tokens)).abs().max().item()
    require(difference < 1e-9, f"folding changes the logits by {difference:.1e}")


def require(condition: bool, text: str) -> None:
    """`assert` that stays with python -O."""
    if not condition:
        raise AssertionError(text)


TRAINING = "import sys, pathlib; from tapernorm.cli.doctor import self_test; self_test(pathlib.Path(sys.argv[1]))"


def check_training(options: Options) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        code, _, said = in_child(TRAINING, folder, seconds=TRAIN_SECONDS)
    if code == 0:
        yield ok("training", "12 steps to gate 0: loss finite, resumed equals uninterrupted, folded equals unfolded")
    elif code is None:
        yield warning("training", f"the self-test is not done within {TRAIN_SECONDS:.0f} s", "see the threads above")
    else:
        remedy = "see the problems above; if there are none, report this one"
        yield problem("training", f"the self-test fails: {last_line(said, code)}", remedy)


# ------------------------------------------------------------------------------------------------------------- report

BEFORE_IMPORTS: Sequence[Check] = (check_python, check_packages)
AFTER_IMPORTS: Mapping[Check, tuple[str, ...]] = {  # with the modules that each needs
    check_imports: (),
    check_environment: (),
    check_console: (),
    check_limits: (),
    check_memory: (),
    check_storage: (),
    check_device: ("torch",),
    check_tokenizer: ("numpy", "pydantic"),
    check_hub: ("requests",),
    check_wandb: ("wandb", "requests", "pydantic"),
}
SLOW: Sequence[Check] = (check_compile, check_training)  # in processes of their own, started first and shown last


def examine(options: Options, show: Callable[[Finding], None]) -> list[Finding]:
    """Run every check and `show` each finding as soon as those before it are there; the findings in that order."""
    findings: list[Finding] = []

    def take(found: Iterable[Finding]) -> None:
        for finding in found:
            findings.append(replace(finding, text=redact(finding.text), remedy=redact(finding.remedy)))
            show(findings[-1])

    with ThreadPoolExecutor(len(SLOW)) as pool:
        slow = [pool.submit(run_check, check, options, ("torch",)) for check in SLOW]
        try:
            for check in BEFORE_IMPORTS:
                take(run_check(check, options))
            options = replace(options, broken=broken_modules())
            for check, needs in AFTER_IMPORTS.items():
                take(run_check(check, options, needs))
            for future in slow:
                take(future.result())
        finally:  # also after Ctrl-C: nothing goes on, and no temporary directory stays
            end(*_children)
    return findings


def run_check(check: Check, options: Options, needs: Sequence[str] = ()) -> list[Finding]:
    """The findings of a check, or that it failed: none may take the others with it."""
    topic = check.__name__.removeprefix("check_")
    if lacking := [name for name in needs if name in options.broken or version_of(name) is None]:
        return [problem(topic, f"not checked, as {' and '.join(lacking)} cannot be imported", INSTALL)]
    try:
        return list(check(options))
    except Exception as error:
        text = f"the check failed ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        return [problem(topic, text, "see the problems above; if there are none, report this one")]


def redact(text: str) -> str:
    """`text` in one line without secrets of the environment, passwords of addresses and the home directory's name."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) > 5:
            text = text.replace(value, "***")
    text = re.sub(r"(\w+://)[^/\s@]*@", r"\1***@", text)
    home = os.path.expanduser("~")  # noqa: PTH111  (Path.home() raises where there is none)
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?=/|\W|$)", "~", text)
    return " ".join(text.split())


def as_json(findings: Sequence[Finding]) -> str:
    about = {"tapernorm": __version__, "git_revision": git_revision()}
    content = {**about, "findings": [asdict(finding) for finding in findings]}
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


# ---------------------------------------------------------------------------------------------------------- processes

_children: set[subprocess.Popen[str]] = set()


def in_child(code: str, *arguments: str, seconds: float, **environment: str) -> tuple[int | None, str, str]:
    """Run Python code in a process of its own: (status, None past the time limit; standard output; standard error)."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", **environment},
        start_new_session=True,  # so that its own children end with it
    )
    _children.add(child)
    try:
        out, said = child.communicate(timeout=seconds)
        return child.returncode, out, said
    except subprocess.TimeoutExpired:
        end(child)
        return None, *child.communicate()
    finally:
        end(child)
        _children.discard(child)


def end(*children: subprocess.Popen[str]) -> None:
    for child in children:
        if child.poll() is None:
            with suppress(OSError):  # it has ended meanwhile
                os.killpg(child.pid, signal.SIGKILL) if os.name == "posix" else child.kill()


def last_line(said: str, code: int | None) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"status {code}"
