"""Compare two runs, or one command at two commits: loss by loss, and setting by setting where these differ.

Examples:
  python scripts/dev/compare.py runs/A runs/B
  python scripts/dev/compare.py --commits HEAD~1 HEAD -- experiment=smoke norm=all_taper

A commit is checked out in a temporary directory, so uncommitted changes are not in it; W&B stays out of it.
Exit status: 0 every logged loss is bit-identical, 1 some loss is not, 2 there was nothing to compare.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tapernorm.cli import errors as faults
from tapernorm.config.schema import ConfigError, leaves
from tapernorm.runtime.record import METRICS, read_metrics
from tapernorm.runtime.saved import OWN, show, within

ROOT = Path(__file__).resolve().parents[2]
LOSSES = ("train/loss", "val/loss")


# ---------------------------------------------------------------------------------------------------------- comparing


def compare(a: Path, b: Path, metrics: Sequence[str]) -> bool:
    """Print what two runs' metrics and settings have in common and what not; True if the metrics are identical."""
    settings = differing_settings(a, b)
    rows = [{row["step"]: row for row in read_metrics(directory)} for directory in (a, b)]
    if not any(name in row for run in rows for row in run.values() for name in metrics):
        raise ConfigError(f"{a} and {b} have logged no {' and no '.join(metrics)}")
    same = [compare_metric(name, *rows) for name in metrics]
    print("\nsettings: " + ("no difference" if not settings else f"{len(settings)} differ"))
    for key, old, new in settings:
        print(f"  {key}: {old} -> {new}")
    return all(same)


def compare_metric(name: str, a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]]) -> bool:
    """Print a table of one metric over the steps that have it, and one line that says it all; True if identical."""
    steps = sorted(step for step in a.keys() | b.keys() if name in a.get(step, {}) or name in b.get(step, {}))
    print(f"\n{name}\n{'step':>8}  {'A':>12}  {'B':>12}  difference")
    gaps: dict[int, float] = {}
    differing = []
    for step in steps:
        left, right = (rows.get(step, {}).get(name) for rows in (a, b))
        if left is not None and right is not None:
            gaps[step] = right - left
        if left != right:
            differing.append(step)
        print(f"{step:>8}  {number(left)}  {number(right)}  {format(gaps[step], '+.2e') if step in gaps else '-'}")
    if not differing:
        print(f"{name}: bit-identical at {len(steps)} steps")
        return True
    largest = max(gaps, key=lambda step: abs(gaps[step]), default=None)
    text = f"{name}: {len(differing)} of {len(steps)} steps differ, the first is step {differing[0]}"
    print(text if largest is None else f"{text}; the largest difference is {gaps[largest]:+.2e}, at step {largest}")
    return False


def number(value: float | None) -> str:
    return f"{'-' if value is None else format(value, '.6f'):>12}"


def differing_settings(a: Path, b: Path) -> list[tuple[str, str, str]]:
    """(key, value in a, value in b) of the resolved configurations; where the runs are does not count."""
    old, new = (dict(leaves(read_settings(directory))) for directory in (a, b))
    return [
        (key, show(old[key]) if key in old else "(no such key)", show(new[key]) if key in new else "(no such key)")
        for key in dict.fromkeys([*old, *new])
        if not within(key, OWN) and (key not in old or key not in new or old[key] != new[key])
    ]


def read_settings(directory: Path) -> dict[str, Any]:
    try:
        return yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{directory / 'config.yaml'} cannot be read ({error}); name a run's directory") from None


# ------------------------------------------------------------------------------------------------------------ commits


@contextmanager
def checkout(commit: str, directory: Path) -> Iterator[Path]:
    """A working tree of a commit, as long as it is needed."""
    git("worktree", "add", "--quiet", "--detach", str(directory), commit)
    try:
        yield directory
    finally:
        git("worktree", "remove", "--force", str(directory))


def git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def train_at(revision: str, overrides: Sequence[str], folder: Path, side: str) -> Path:
    """Run train.py of a commit from the current directory; the directory of the run."""
    try:
        commit = git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except ConfigError:
        raise ConfigError(f"{revision} is no commit of {ROOT}") from None
    run_dir = folder / f"run-{side}"
    print(f"{side}: {revision} ({commit[:10]})", flush=True)
    with checkout(commit, folder / f"tree-{side}") as tree:
        done = subprocess.run(
            [sys.executable, str(tree / "train.py"), *overrides, f"run_dir={run_dir}"],
            env={**os.environ, "WANDB_MODE": "disabled"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if done.returncode:
        last = (done.stdout.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"train.py at {revision} ended with status {done.returncode}: {last}")
    return run_dir


# --------------------------------------------------------------------------------------------------------------- main


def main(arguments: Sequence[str] | None = None) -> int:
    head, _, rest = (__doc__ or "").partition("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=head, epilog=rest, formatter_class=form)
    parser.add_argument("sides", nargs=2, metavar="A B", help="run directories or, with --commits, git revisions")
    parser.add_argument("overrides", nargs="*", help="after --: the arguments of train.py for both commits")
    parser.add_argument("--commits", action="store_true", help="A and B are commits")
    parser.add_argument("--metrics", nargs="+", default=LOSSES, choices=METRICS, metavar="NAME", help="default: losses")
    given = parser.parse_args(arguments)
    if given.overrides and not given.commits:
        parser.error("arguments of train.py need --commits")
    try:
        if not given.commits:
            a, b = map(Path, given.sides)
            print(f"A: {a}\nB: {b}")
            return 0 if compare(a, b, given.metrics) else 1
        with tempfile.TemporaryDirectory(prefix="compare-") as folder:
            sides = zip(given.sides, "AB", strict=True)
            a, b = [train_at(revision, given.overrides, Path(folder), side) for revision, side in sides]
            return 0 if compare(a, b, given.metrics) else 1
    except ConfigError as error:
        faults.stop(str(error))


if __name__ == "__main__":
    raise SystemExit(main())
