"""What a machine has of what tapernorm needs: findings of one line each, with a remedy where something is amiss.

It has to work where nothing else does. So the standard library is all that is imported here, every other import is
inside the check that needs it, and what may crash the interpreter or hang happens in a process of its own with a time
limit. No finding holds a key, a password or more of a path than is needed: see `redact`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tapernorm.cli import machine
from tapernorm.cli.findings import (
    Check,
    Finding,
    Options,
    end_children,
    in_child,
    last_line,
    ok,
    ok_if,
    problem,
    redact,
    warning,
)
from tapernorm.cli.machine import INSTALL
from tapernorm.runtime.revision import __version__, git_revision

COMPILE_SECONDS, TRAIN_SECONDS = 26.0, 26.0  # they start at once

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
    from tapernorm.runtime.log import quiet
    from tapernorm.training import checkpoint
    from tapernorm.training.loop import train

    config = resolve(build({**TINY, "cache_dir": str(folder / "cache")}))

    def run(name: str, start: Path | None = None) -> tuple[Path, dict[str, Any]]:
        (folder / name).mkdir(parents=True, exist_ok=True)
        with quiet():
            summary = train(config, folder / name, start)
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

BEFORE_IMPORTS: Sequence[Check] = (machine.check_python, machine.check_packages)
AFTER_IMPORTS: Mapping[Check, tuple[str, ...]] = {  # with the modules that each needs
    machine.check_imports: (),
    machine.check_environment: (),
    machine.check_console: (),
    machine.check_limits: (),
    machine.check_memory: (),
    machine.check_storage: (),
    machine.check_device: ("torch",),
    machine.check_tokenizer: ("numpy", "pydantic"),
    machine.check_hub: ("requests",),
    machine.check_wandb: ("wandb", "requests", "pydantic"),
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
            options = replace(options, broken=machine.broken_modules())
            for check, needs in AFTER_IMPORTS.items():
                take(run_check(check, options, needs))
            for future in slow:
                take(future.result())
        finally:  # also after Ctrl-C: nothing goes on, and no temporary directory stays
            end_children()
    return findings


def run_check(check: Check, options: Options, needs: Sequence[str] = ()) -> list[Finding]:
    """The findings of a check, or that it failed: none may take the others with it."""
    topic = check.__name__.removeprefix("check_")
    if lacking := [name for name in needs if name in options.broken or machine.version_of(name) is None]:
        return [problem(topic, f"not checked, as {' and '.join(lacking)} cannot be imported", INSTALL)]
    try:
        return list(check(options))
    except Exception as error:
        text = f"the check failed ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        return [problem(topic, text, "see the problems above; if there are none, report this one")]


def as_json(findings: Sequence[Finding]) -> str:
    about = {"tapernorm": __version__, "git_revision": git_revision()}
    content = {**about, "findings": [asdict(finding) for finding in findings]}
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
