"""scripts/doctor.py: right marks, one line each, no secrets; and it works where nothing else does."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tapernorm.cli import doctor, doctor_command, findings, machine
from tapernorm.cli.findings import Check, Options
from tests.test_security import MARKERS, SECRETS

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "scripts" / "doctor.py")


def marks(check: Check, **options: object) -> list[str]:
    return [str(finding) for finding in doctor.run_check(check, Options(**options))]


# ------------------------------------------------------------------------------------------------------ as a user does


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path, float]:
    """doctor on this machine with secrets in its environment, no server and no terminal."""
    folder = tmp_path_factory.mktemp("doctor")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "HF_"))}
    servers = {"WANDB_BASE_URL": "http://user:proxypassword@127.0.0.1:9", "HF_ENDPOINT": "http://127.0.0.1:9"}
    own = {"HOME": str(folder), "TMPDIR": str(folder / "tmp"), "PYTHONIOENCODING": "ascii"}
    (folder / "tmp").mkdir()
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, SCRIPT, "--json", "found.json"],
        cwd=folder,
        env=clean | SECRETS | servers | own,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done, folder, time.monotonic() - began


def test_a_usable_machine_has_no_problem(
    examined: tuple[subprocess.CompletedProcess[str], Path, float],
) -> None:
    done, folder, seconds = examined
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert last.startswith("0 problems, ")
    assert {line.split()[0] for line in lines} <= {"ok", "warning"}
    for text in ("training: 12 steps to gate 0: loss finite, resumed equals", "torch ", "auto is ", "API key present"):
        assert text in done.stdout
    assert "warning  console: ascii" in done.stdout
    assert "warning  W&B: " in done.stdout and "warning  hub: " in done.stdout  # no server answers
    written = json.loads((folder / "found.json").read_text())
    assert [f"{row['mark']:<8} {row['topic']}: {row['text']}" for row in written["findings"]] == [
        line.split("; " + row["remedy"])[0] if row["remedy"] else line
        for line, row in zip(lines, written["findings"], strict=True)
    ]
    assert seconds < 60, "on a busy machine; otherwise half of it"


def test_neither_secrets_nor_the_home_directory_are_shown_and_nothing_is_left_behind(
    examined: tuple[subprocess.CompletedProcess[str], Path, float],
) -> None:
    done, folder, _ = examined
    for text in (done.stdout, (folder / "found.json").read_text()):
        assert not any(marker in text for marker in [*MARKERS, str(folder)]), text
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files if any(marker.encode() in path.read_bytes() for marker in MARKERS)]
    assert not list((folder / "tmp").glob("tmp*")) and not list(folder.rglob(".tapernorm-doctor-*"))


def test_it_needs_nothing_but_python(tmp_path: Path) -> None:
    """Without site-packages (-S): every check says what it lacks, none ends in a traceback."""
    done = subprocess.run([sys.executable, "-S", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")
    assert "problem  packages: torch is not installed; pip install" in done.stdout
    assert "problem  training: not checked, as torch cannot be imported" in done.stdout
    assert "ok       runs_dir: " in done.stdout and "ok       python: " in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_at_once_and_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    child = subprocess.Popen(
        [sys.executable, SCRIPT], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout and child.stdout.readline()
    time.sleep(1)
    child.send_signal(number)
    _, said = child.communicate(timeout=20)
    assert (child.returncode, said) == (130, b"")
    assert not list(tmp_path.iterdir())


def test_the_exit_status_and_a_file_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = doctor_command.examine
    found = [findings.ok("a", "b"), findings.warning("a", "b", "c")]
    monkeypatch.setattr(doctor, "examine", lambda options, show: found)
    assert main([]) == 0
    assert main(["--json", "/nowhere/file"]) == 2
    found.append(findings.problem("a", "b", "c"))
    assert main([]) == 1
    out, err = capsys.readouterr()
    assert out.endswith("1 problems, 1 warnings\n") and err.count("\n") == 1 and "--json /nowhere/file" in err


# -------------------------------------------------------------------------------------------------------- single checks


def test_ranges_of_versions() -> None:
    assert machine.fits("omegaconf>=2.3,<2.4", "2.3.1") and not machine.fits("omegaconf>=2.3,<2.4", "2.4.0")
    assert machine.fits("torch>=2.9", "2.13.0+cpu") and not machine.fits("torch>=2.9", "2.8.1")
    assert machine.fits("anything", "0.1") and not machine.fits("python>=3.11", "3.10.12")
    python, needed, extras = machine.requirements()
    assert python == ">=3.11" and any(text.startswith("torch>=") for text in needed)
    assert machine.EXTRAS.keys() == extras.keys() - {"test", "dev"}


def test_which_tapernorm_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}")
    assert marks(machine.check_python)[1].startswith("ok       tapernorm: ")
    monkeypatch.delenv("PYTHONPATH")
    for other, mark in ((ROOT, "ok"), (None, "warning"), (tmp_path, "warning")):
        monkeypatch.setattr(machine, "installed_root", lambda other=other: other)
        line = marks(machine.check_python)[1]
        assert line.startswith(f"{mark:<8} tapernorm: ") and (other != tmp_path or str(tmp_path) in line)


def test_packages_that_are_missing_or_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["numpy>=99", "there-is-no-such-package>=1", "torch>=2"]
    monkeypatch.setattr(machine, "requirements", lambda: (">=3.11", needed, {"joblib": ["numpy<1"]}))
    lines = marks(machine.check_packages)
    assert lines[0].startswith("problem  packages: numpy ") and "is outside numpy>=99; pip install" in lines[0]
    assert lines[1].startswith("problem  packages: there-is-no-such-package is not installed")
    assert lines[2].startswith("ok       packages: 1 within their ranges: torch")
    assert lines[3].startswith("warning  extras: numpy")


def test_a_broken_package_is_named_even_if_it_kills_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, code in {
        "dn_fine": "",
        "dn_raises": "raise OSError('libx.so: no such file')",
        "dn_kills": "import os; os.abort()",
        "dn_later": "raise ValueError",
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ["dn_fine", "dn_raises", "dn_kills", "dn_later"]
    monkeypatch.setattr(machine, "requirements", lambda: (">=3.11", names, {}))
    monkeypatch.setattr(machine, "version_of", lambda name: "1")
    broken = machine.broken_modules()
    assert broken == {
        "dn_raises": "OSError: libx.so: no such file",
        "dn_kills": f"it ends Python with status {-signal.SIGABRT}",
        "dn_later": "ValueError: ",
    }
    lines = marks(machine.check_imports, broken=broken)
    assert len(lines) == 3 and lines[1].startswith("problem  imports: dn_kills is installed but broken (it ends Python")


def test_storage_that_cannot_be_used_is_a_problem_and_a_full_one_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    options = {"runs_dir": str(tmp_path / "file" / "runs"), "cache_dir": str(tmp_path / "new")}
    runs, cache, temp = marks(machine.check_storage, **options)
    assert runs.startswith("problem  runs_dir: ") and "choose another one with runs_dir=..." in runs
    assert cache.startswith("ok       cache_dir: ") and "(will be made)" in cache and temp.startswith("ok       temp: ")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    runs, cache, temp = marks(machine.check_storage, **options)
    assert cache.startswith("warning  cache_dir: ") and "0.0 GiB free" in cache and "make room" in cache

    def no_fsync(handle: int) -> None:
        raise OSError(5, "no fsync")

    monkeypatch.setattr(os, "fsync", no_fsync)
    runs, cache, temp = marks(machine.check_storage, **options)
    assert cache.startswith("problem  cache_dir: ") and "cannot be used: no fsync" in cache
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_limits_of_memory_threads_files_and_console(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 4096))
    assert marks(machine.check_limits) == [
        "warning  limits: 256 open files are few for large data sets and W&B; ulimit -n 4096"
    ]
    monkeypatch.setattr(machine, "_cgroup", lambda *names: "1073741824\n" if "memory.max" in names else "150000 100000")
    assert marks(machine.check_memory)[0].startswith(
        "warning  memory: 1.0 GiB for this process, limited by its cgroup; "
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert machine.cores() == 1.5
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert marks(machine.check_device)[1].endswith("more threads than cores are slow: OMP_NUM_THREADS=1")
    monkeypatch.setattr(machine, "_cgroup", lambda *names: "max 100000" if "cpu.max" in names else "max")
    assert machine.cores() == 8 and "cgroup" not in marks(machine.check_memory)[0]
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    assert marks(machine.check_console)[0].startswith("warning  console: latin-1 on standard output")


def test_a_driver_without_a_device_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    line = marks(machine.check_device)[0]
    assert line.startswith("warning  device: no CUDA device; auto is ") and "although there is an NVIDIA driver" in line


@pytest.mark.parametrize(
    ("result", "compiler", "line"),
    [
        ((0, "", ""), "g++", "ok       torch.compile: works"),
        ((None, "", ""), "g++", "warning  torch.compile: is not done within"),
        ((1, "", "..."), None, "warning  torch.compile: finds no C++ compiler (g++ or clang++)"),
        ((1, "", "a\nRuntimeError: b\n\n"), "g++", "warning  torch.compile: fails (RuntimeError: b)"),
    ],
)
def test_compilation(
    monkeypatch: pytest.MonkeyPatch, result: tuple[int | None, str, str], compiler: str | None, line: str
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(doctor, "in_child", lambda *arguments, **options: result)
    monkeypatch.setattr(shutil, "which", lambda name: compiler)
    assert marks(doctor.check_compile)[0].startswith(line)


def test_a_failing_self_test_is_a_problem_and_a_slow_one_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TRAINING", "raise AssertionError('folding changes the logits by 1.0e+00')")
    line = marks(doctor.check_training)[0]
    assert line.startswith("problem  training: the self-test fails: AssertionError: folding changes the logits")
    monkeypatch.setattr(doctor, "TRAINING", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "TRAIN_SECONDS", 0.5)
    assert marks(doctor.check_training)[0].startswith("warning  training: the self-test is not done within")


def test_the_self_test_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tapernorm.model import fold
    from tapernorm.training import saving, state

    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # on a CPU a resumed run is exact
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    doctor.self_test(tmp_path / "fine")
    with monkeypatch.context() as patch:
        patch.setattr(fold, "fold", lambda model: type(model)(model.config, model.norm_config).double())
        with pytest.raises(AssertionError, match="folding changes the logits by"):
            doctor.self_test(tmp_path / "fold")
    with monkeypatch.context() as patch:
        patch.setattr(state.TrainingRun, "seed_dropout", lambda run, step, part: None)
        restore = saving.restore

        def forgetful(run: state.TrainingRun, path: Path) -> None:
            restore(run, path)
            run.optimizer.state.clear()

        patch.setattr(saving, "restore", forgetful)
        with pytest.raises(AssertionError, match="the resumed run differs from the uninterrupted one"):
            doctor.self_test(tmp_path / "resume")


def test_wandb_and_hub_say_what_they_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from tapernorm.training import tracking

    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert marks(machine.check_wandb) == ["ok       W&B: off (WANDB_MODE=disabled)"]
    monkeypatch.setattr(tracking, "account", lambda: (True, "https://server"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert marks(machine.check_wandb)[0].endswith("tracking.wandb=auto goes offline (WANDB_MODE=offline)")
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr(machine, "unreachable", lambda address: None)
    assert marks(machine.check_wandb)[0].endswith("goes online; https://server answers")
    assert marks(machine.check_hub)[0].startswith("ok       hub: ")
    monkeypatch.setattr(tracking, "account", lambda: (False, "https://server"))
    assert marks(machine.check_wandb) == ["ok       W&B: API key not present; tracking.wandb=auto goes offline"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert marks(machine.check_hub)[0].endswith("offline by HF_HUB_OFFLINE")


def test_where_gpt2s_files_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tapernorm.data import tokenizer

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    assert "GPT-2's files are not in" in marks(machine.check_tokenizer)[0]
    for url in tokenizer.GPT2_URLS:
        (tmp_path / tokenizer.hashlib.sha1(url.encode()).hexdigest()).touch()
    assert marks(machine.check_tokenizer) == [
        f"ok       tokenizer: GPT-2's files are in {tmp_path} (TIKTOKEN_CACHE_DIR)"
    ]


def test_a_check_that_fails_does_not_take_the_others_with_it() -> None:
    def check_weather(options: Options) -> Iterator[findings.Finding]:
        yield findings.ok("weather", "fine")
        raise OSError("rain\nand wind")

    (finding,) = doctor.run_check(check_weather, Options())
    assert str(finding).startswith("problem  weather: the check failed (OSError: rain and wind)")
    (finding,) = doctor.run_check(check_weather, Options(broken={"torch": "x"}), ("torch",))
    assert finding.text == "not checked, as torch cannot be imported"


def test_redaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "abcdef123")
    monkeypatch.setenv("HOME", "/home/somebody")
    text = "key abcdef123 at https://me:secret@host/a, /home/somebody/x, /home/somebody\nand /home/somebodyelse"
    assert findings.redact(text) == "key *** at https://***@host/a, ~/x, ~ and /home/somebodyelse"
