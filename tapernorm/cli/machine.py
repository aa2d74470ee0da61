"""The checks of Python, packages, machine and services: each imports what it needs, as anything may be missing."""

from __future__ import annotations

import locale
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from tapernorm.cli.findings import ROOT, Finding, Options, in_child, ok, ok_if, problem, warning
from tapernorm.runtime.revision import __version__, git_revision

GIB = 2**30
INSTALL = "pip install -c constraints.txt -e ."
ANSWER_SECONDS = 3.0  # how long a server may take
IMPORT_SECONDS = 24.0
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
