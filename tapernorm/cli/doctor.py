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
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import url2pathname

from tapernorm import __version__, git_revision

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
INSTALL = "pip install -c constraints.txt -e ."
ANSWER_SECONDS = 3.0  # how long a server may take
COMPILE_SECONDS, TRAIN_SECONDS, IMPORT_SECONDS = 26.0, 26.0, 24.0  # all three start at once
LITTLE_DISK, LITTLE_MEMORY, FEW_FILES = 1 * GIB, 2 * GIB, 1024
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

Mark = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. A problem stops ordinary use; a warning limits, slows or endangers some of it."""

    mark: Mark
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


def ok(topic: str, text: str) -> Finding:
    return Finding("ok", topic, text)


def warning(topic: str, text: str, remedy: str) -> Finding:
    return Finding("warning", topic, text, remedy)


def problem(topic: str, text: str, remedy: str) -> Finding:
    return Finding("problem", topic, text, remedy)


# -------------------------------------------------------------------------------------------------- Python, packages


def check_python(options: Options) -> Iterator[Finding]:
    wanted, _, _ = requirements()
    where = f"Python {platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}"
    if wanted and not fits(f"python{wanted}", platform.python_version()):
        yield problem("python", where, f"tapernorm needs Python {wanted}")
    else:
        yield ok("python", where)
    revision = git_revision() or "not a git checkout"
    text = f"{__version__}, {revision}, in {ROOT}"
    other = installed_root()
    if ROOT in [Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]:
        yield ok("tapernorm", f"{text}, by PYTHONPATH")
    elif other is None:
        yield warning("tapernorm", f"{text}, not installed, so only train.py and evaluate.py find it", INSTALL)
    elif other != ROOT:
        yield warning("tapernorm", f"{text}; but the installed one, which scripts/ use, is in {other}", INSTALL)
    else:
        yield ok("tapernorm", text)


def installed_root() -> Path | None:
    """The directory that holds the installed tapernorm; of an editable installation, its source tree."""
    try:
        found = metadata.distribution("tapernorm")
    except metadata.PackageNotFoundError:
        return None
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return Path(url2pathname(urlsplit(origin["url"]).path)).resolve()
    return Path(str(found.locate_file(""))).resolve()


def check_packages(options: Options) -> Iterator[Finding]:
    """Versions against the ranges of pyproject.toml."""
    _, needed, extras = requirements()
    if not needed:
        yield warning("packages", "neither pyproject.toml nor an installed tapernorm is there", INSTALL)
    fitting = []
    for text in needed:
        name, version = name_of(text), version_of(name_of(text))
        if version is None:
            yield problem("packages", f"{name} is not installed", INSTALL)
        elif not fits(text, version):
            yield problem("packages", f"{name} {version} is outside {text}", INSTALL)
        else:
            fitting.append(f"{name} {version}")
    if fitting:
        yield ok("packages", f"{len(fitting)} within their ranges: {', '.join(fitting)}")
    for extra, purpose in EXTRAS.items():
        for text in extras.get(extra, [])[:1]:  # what the extra is named after; the rest comes with it
            version = version_of(name_of(text))
            if version is not None and not fits(text, version):
                yield warning("extras", f"{name_of(text)} {version} is outside {text}", f"{INSTALL[:-1]}'.[{extra}]'")
            else:
                state = version or f"not installed, {INSTALL[:-1]}'.[{extra}]' brings it"
                yield ok("extras", f"{name_of(text)}, for {purpose}: {state}")
    text = next((text for text in extras.get("test", []) if name_of(text) == "transformers"), "transformers")
    version = version_of("transformers")
    if version is not None and not fits(text, version):
        yield warning("extras", f"transformers {version} is outside {text}", f"pip install '{text}'")
    else:
        state = version or f"not installed, pip install '{text}' brings it"
        yield ok("extras", f"transformers, for exports in its own layouts: {state}")


def requirements() -> tuple[str, list[str], dict[str, list[str]]]:
    """(Python's range, requirements, requirements by extra): of the source tree, else of the installed package."""
    file = ROOT / "pyproject.toml"
    if file.is_file() and sys.version_info >= (3, 11):
        import tomllib  # new in 3.11

        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        return project["requires-python"], project["dependencies"], project["optional-dependencies"]
    try:
        found = metadata.metadata("tapernorm")
    except metadata.PackageNotFoundError:
        return ">=3.11", [], {}
    needed: list[str] = []
    extras: dict[str, list[str]] = {}
    for text in found.get_all("Requires-Dist") or []:
        text, _, marker = text.partition(";")
        extra = re.search(r"extra == ['\"]([^'\"]+)", marker)
        (extras.setdefault(extra[1], []) if extra else needed).append(text.strip())
    return found["Requires-Python"] or "", needed, extras


def name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return found[0] if found else requirement


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def fits(requirement: str, version: str) -> bool:
    """Whether `version` is in the range of a requirement such as 'omegaconf>=2.3,<2.4'; only such ones are ours."""

    def numbers(text: str) -> tuple[int, ...]:
        found = [int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", text, maxsplit=1)[0])]
        return tuple(found + [0] * (4 - len(found)))

    here = numbers(version)
    bounds = re.findall(r"(>=|<)\s*([\d.]+)", requirement)
    return all(here >= numbers(bound) if sign == ">=" else here < numbers(bound) for sign, bound in bounds)


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
    """Installed packages that cannot be imported, with the reason. Which one kills the interpreter shows, too."""
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
    here = f"{encoding} on standard output, locale {'.'.join(filter(None, locale.getlocale())) or 'C'}"
    if encoding.replace("-", "") == "utf8":
        yield ok("console", here)
    else:
        yield warning("console", f"{here}: characters it lacks become '?'", "set PYTHONUTF8=1 or LC_ALL=C.UTF-8")


def check_limits(options: Options) -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{'unlimited' if soft == resource.RLIM_INFINITY else soft} open files"
    if 0 <= soft < FEW_FILES:
        yield warning("limits", f"{text} are few for large data sets and W&B", f"ulimit -n {max(hard, FEW_FILES)}")
    else:
        yield ok("limits", text)


def check_memory(options: Options) -> Iterator[Finding]:
    sizes = [limit for limit in (_physical_memory(), _cgroup_memory()) if limit]
    if not sizes:
        return
    text = f"{min(sizes) / GIB:.1f} GiB for this process" + (", limited by its cgroup" if len(set(sizes)) > 1 else "")
    if min(sizes) < LITTLE_MEMORY:
        yield warning("memory", text, "model=tiny or 1m, a smaller trainer.batch_size")
    else:
        yield ok("memory", text)


def _physical_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _cgroup(*names: str) -> str:
    """The first of a container's limit files that can be read, versions 2 and 1."""
    for name in names:
        try:
            return Path("/sys/fs/cgroup", name).read_text(encoding="ascii")
        except (OSError, ValueError):
            continue
    return ""


def _cgroup_memory() -> int | None:
    text = _cgroup("memory.max", "memory/memory.limit_in_bytes").strip()
    return int(text) if text.isdigit() and int(text) < 2**60 else None  # version 1 has a huge number for 'no limit'


def _cgroup_cores() -> float | None:
    text = _cgroup("cpu.max").split()
    if not text:
        text = [_cgroup("cpu/cpu.cfs_quota_us").strip(), _cgroup("cpu/cpu.cfs_period_us").strip()]
    return int(text[0]) / int(text[1]) if all(part.isdigit() for part in text) else None


def cores() -> float:
    """Cores that this process may use: by its affinity and its container's quota."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_cores()
    return mine if quota is None else min(mine, quota)


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
            where = f"{wanted}" + ("" if existing == wanted else " (will be made)")
            free = shutil.disk_usage(existing).free
            try_disk(existing)
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
            reason = getattr(error, "strerror", None) or error
            yield problem(topic, f"{given or 'the temporary directory'} cannot be used: {reason}", remedy)
            continue
        text = f"{where}: {free / GIB:.1f} GiB free, write, fsync and rename work"
        yield ok(topic, text) if free >= LITTLE_DISK else warning(topic, text, f"make room, or {remedy}")


def try_disk(directory: Path) -> None:
    """Raises OSError if a file cannot be written, forced to the disk and renamed in `directory`."""
    with tempfile.TemporaryDirectory(prefix=".tapernorm-doctor-", dir=directory) as folder:
        file = Path(folder, "a")
        with file.open("wb") as stream:
            stream.write(b"0" * 4096)
            stream.flush()
            os.fsync(stream.fileno())
        file.rename(file.with_name("b"))
        if os.name == "posix":  # elsewhere a directory cannot be opened
            handle = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def check_device(options: Options) -> Iterator[Finding]:
    import torch

    from tapernorm.runtime.device import pick_device, pick_dtype

    device = pick_device("auto")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found = f"{len(names)} CUDA {torch.version.cuda} devices ({', '.join(names)})" if names else "no CUDA device"
    works = [str(dtype).removeprefix("torch.") for dtype in (torch.bfloat16, torch.float16) if computes(device, dtype)]
    dtype = str(pick_dtype("auto", device)).removeprefix("torch.")
    text = f"{found}; auto is {device} in {dtype}; supported there: {', '.join(['float32', *works])}"
    if device.type != "cuda" and shutil.which("nvidia-smi"):
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        remedy = "see CUDA_VISIBLE_DEVICES and nvidia-smi, or install torch for your driver from pytorch.org"
        yield warning(
            "device", f"{text}, although there is an NVIDIA driver (torch {torch.__version__}: {built})", remedy
        )
    else:
        yield ok("device", text)

    threads, available = torch.get_num_threads(), cores()
    chosen = os.environ.get("OMP_NUM_THREADS", "not set")
    text = f"{threads} threads (OMP_NUM_THREADS {chosen}), {available:g} of {os.cpu_count()} cores to use"
    if hasattr(os, "getloadavg"):
        text += f", load {os.getloadavg()[0]:.1f}"
    if threads > max(available, 1):
        yield warning("threads", text, f"more threads than cores are slow: OMP_NUM_THREADS={max(int(available), 1)}")
    else:
        yield ok("threads", text)


def computes(device: Any, dtype: Any) -> bool:
    import torch

    try:
        a = torch.ones(8, 8, device=device, dtype=dtype)
        return bool((a @ a).float().sum().item() == 512)
    except RuntimeError:
        return False


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
    remedy = "trainer.compile=false, the default, does without"
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if code == 0:
        yield ok("torch.compile", "works")
    elif code is None:
        yield warning("torch.compile", f"is not done within {COMPILE_SECONDS:.0f} s; is the machine busy?", remedy)
    elif compiler is None or not shutil.which(compiler.split()[0]):
        missing = f"CXX={compiler}" if compiler else "g++ or clang++"
        yield warning("torch.compile", f"finds no C++ compiler ({missing})", f"install one, or {remedy}")
    else:
        yield warning("torch.compile", f"fails ({last_line(said, code)})", remedy)


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

    cache = Path(constants.HF_HUB_CACHE)
    kept = sorted(path.name for path in cache.glob("*--*")) if cache.is_dir() else []
    text = f"cache {cache} ({len(kept)} repositories), token {'set' if get_token() else 'not set'}"
    offline = [
        name
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
    ]
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
    "model": {"name": "tiny", "n_layer": 2, "n_ctx": 32, "d_model": 32, "head_dim": 16},
    "norm": {"kind": "taper", "name": "all_taper", "sites": ["attn", "mlp", "final"]},
    "anchor": {"kind": "fixed_target"},
    "gate": {"k_warmup": 5, "k_taper": 9},
    "calibration": {"window": 3},
    "dataset": {"kind": "toy", "stories": 100, "valid_stories": 20, "vocab_size": 300},
    "optim": {"lr": 0.003},
    "trainer": {
        "max_steps": 12,
        "batch_size": 4,
        "val_interval": 12,
        "val_tokens": 512,
        "save_interval": 7,
        "samples": 0,
        "progress": "none",
    },
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
        directory = folder / name
        directory.mkdir(parents=True, exist_ok=True)
        summary = train(config, directory, start, say=lambda line: None)
        return checkpoint.path_at(directory, config.trainer.max_steps), summary

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
            finding = Finding(finding.mark, finding.topic, redact(finding.text), redact(finding.remedy))
            findings.append(finding)
            show(finding)

    pool = ThreadPoolExecutor(len(SLOW) + 2)
    try:
        slow = [pool.submit(run_check, check, options, ("torch",)) for check in SLOW]
        for check in BEFORE_IMPORTS:
            take(run_check(check, options))
        options = replace(options, broken=broken_modules())
        quick = [pool.submit(run_check, check, options, needs) for check, needs in AFTER_IMPORTS.items()]
        for future in (*quick, *slow):
            take(future.result())
    finally:  # also after Ctrl-C: nothing goes on, and no temporary directory stays
        end_children()
        pool.shutdown(wait=True, cancel_futures=True)
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
    content = {
        "tapernorm": __version__,
        "git_revision": git_revision(),
        "findings": [asdict(finding) for finding in findings],
    }
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
        text=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", **environment},
        start_new_session=True,  # so that its own children end with it
    )
    _children.add(child)
    try:
        out, error = child.communicate(timeout=seconds)
        return child.returncode, out, error
    except subprocess.TimeoutExpired:
        end(child)
        out, error = child.communicate()
        return None, out, error
    finally:
        _children.discard(child)


def end(child: subprocess.Popen[str]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (AttributeError, OSError):  # Windows, or it has ended
        child.kill()


def end_children() -> None:
    for child in list(_children):
        end(child)


def last_line(said: str, code: int | None) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"status {code}"
