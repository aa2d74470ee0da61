"""What norms cost in decoding: the same shape with and without them, side by side, and transformers' generate() beside.

A case is a mode (eager, compile, cuda_graph), a precision of the weights and a batch size. In each case all arms take
turns in random order in one process; copies of all arms at new places in memory follow each other, because where
weights happen to lie shifts a time by a per cent or two for as long as they lie there.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from tapernorm.bench.decode import WARM_STEPS, Arms, Decoding, build_arms, load_base, operators, place, streamed_bytes
from tapernorm.bench.timing import Ratio, copy_bandwidth, interleave, ratio, seconds
from tapernorm.config.programs import BenchmarkConfig
from tapernorm.config.schema import ConfigError, to_dict
from tapernorm.model.decoder import Decoder
from tapernorm.model.generate import generate
from tapernorm.model.hf import to_stock
from tapernorm.runtime.device import keep_freed_memory, pick_device
from tapernorm.runtime.progress import clock
from tapernorm.runtime.revision import git_revision

log = logging.getLogger(__name__)

CEILING = "no_norms"
EQUAL = ("baseline", "baseline_again")  # arms whose difference is what measuring makes of none
MODES = ("eager", "cuda_graph", "compile")  # the slow ones last
FEWEST = 10  # samples under which a bootstrap interval means nothing
VERDICTS = (
    "verdict: faster or slower where the whole interval lies beyond 1 and beyond what the interval of two equal arms "
    "(baseline, baseline_again) allows for no difference"
)

Row = dict[str, Any]
progress_bar = partial(tqdm, unit="sample", leave=False, disable=None, dynamic_ncols=True)  # None: if not a terminal


@dataclass(frozen=True)
class Case:
    """One comparison of all arms."""

    mode: str
    dtype: str
    batch_size: int

    def __str__(self) -> str:
        return f"{self.mode}, {self.dtype}, batch {self.batch_size}"


def benchmark(config: BenchmarkConfig) -> dict[str, Any]:
    """Measure every case, print its table as soon as it is there, and write JSON and Markdown.

    Raises ConfigError, one line, before the first case: for a mode or device that is not there, for more tokens than
    the context.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    device = pick_device(config.device, "device")
    keep_freed_memory()
    cases = _cases(config, device)
    base = load_base(config)
    out = _check(config, base)
    arms = build_arms(base, config.arms)
    bandwidth = copy_bandwidth(device)
    report: dict[str, Any] = {
        "hardware": _hardware(device),
        "versions": {"torch": torch.__version__, "tapernorm": git_revision()},
        "date": time.strftime("%Y-%m-%d"),
        "config": to_dict(config),
        "parameters": base.n_parameters(),
        "copy_bandwidth_GB_s": bandwidth / 1e9,
        "operators": {name: operators(model) for name, model in arms.items()},
        "cases": [],
        "peer": [],
        "left_out": [],
    }
    log.info(
        f"{report['hardware']}; torch {torch.__version__}, {torch.get_num_threads()} threads; "
        f"{report['parameters']:,} parameters; copying {bandwidth / 1e9:.1f} GB/s"
    )
    start = time.monotonic()
    for number, case in enumerate(cases, 1):
        spent = time.monotonic() - start
        if config.minutes is not None and spent > 60 * config.minutes:
            report["left_out"].append(f"{case}: minutes={config.minutes:g} were over")
            continue
        eta = f", ETA {clock(spent / (number - 1) * (len(cases) - number + 1))}" if number > 1 else ""
        log.info(f"case {number} of {len(cases)}: {case}{eta}")
        try:
            rows = measure(config, arms, case, device, bandwidth)
        except Exception as error:  # such as a compiler that is missing: the other cases stand
            first_line = next(filter(str.strip, str(error).splitlines()), "")
            report["left_out"].append(f"{case}: {type(error).__name__}: {first_line}")
            log.info(report["left_out"][-1])
            continue
        report["cases"].append({**asdict(case), "rows": rows})
        for line in table(rows):
            log.info(line)
        if config.peer and case.mode == "eager" and config.arms[0] == "baseline":
            report["peer"].append({**asdict(case), **measure_peer(config, arms["baseline"], case, device)})
            log.info(peer_line(report["peer"][-1]))
    write(report, out)
    for line in [VERDICTS, *report["left_out"], f"written to {out} and {out.with_suffix('.md')}"]:
        log.info(line)
    return report


def _check(config: BenchmarkConfig, base: Decoder) -> Path:
    """Where the result goes. What is not possible is said now, not after an hour."""
    needed = config.prompt_tokens + WARM_STEPS + config.new_tokens
    if needed > base.config.n_ctx:
        raise ConfigError(
            f"prompt_tokens + new_tokens + {WARM_STEPS} = {needed} exceeds the context of {base.config.n_ctx} tokens; "
            "make prompt_tokens or new_tokens smaller"
        )
    if CEILING not in config.arms:
        raise ConfigError(f"arms=[{','.join(config.arms)}] lacks {CEILING}, which the others are compared with")
    if config.out is None:
        folder = Path("runs/benchmarks").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"decode_{base.config.name}_{time.strftime('%Y-%m-%d_%H%M%S')}.json"
    out = Path(config.out)
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"out={out}: name a file in a directory that is there")
    return out


def _cases(config: BenchmarkConfig, device: torch.device) -> list[Case]:
    modes = config.modes or (MODES if device.type == "cuda" else ("eager", "compile"))
    if "cuda_graph" in modes and device.type != "cuda":
        raise ConfigError(f"modes=[{','.join(modes)}]: cuda_graph needs a CUDA device, this is {device.type}")
    cases = [
        Case(mode, dtype, batch_size)
        for mode in sorted(modes, key=MODES.index)
        for dtype in config.dtypes
        for batch_size in config.batch_sizes
    ]
    if config.modes is None:  # compiling takes half a minute per arm, so unless it is asked for, one case has to do
        first = (config.dtypes[0], config.batch_sizes[0])
        cases = [case for case in cases if case.mode != "compile" or (case.dtype, case.batch_size) == first]
    return cases


def measure(config: BenchmarkConfig, arms: Arms, case: Case, device: torch.device, bandwidth: float) -> list[Row]:
    """One row per arm and phase (decode, prefill) of a case; times in milliseconds."""
    order = random.Random(config.seed)
    prompts = _prompts(config, arms[CEILING], case, device)
    placements = 1 if case.mode == "compile" else config.placements  # compiling takes minutes
    phases = ("decode", "prefill") if case.mode == "eager" else ("decode",)
    samples: dict[str, dict[str, list[float]]] = {phase: {name: [] for name in arms} for phase in phases}
    n_cached = config.prompt_tokens + WARM_STEPS + config.new_tokens // 2
    n_samples = placements * config.repeats * len(arms) * len(phases)
    gradients = torch.no_grad() if case.mode == "compile" else torch.inference_mode()  # which no graph is compiled in
    with progress_bar(total=n_samples) as bar, gradients:
        for _ in range(placements):
            shuffled = order.sample(list(arms), len(arms))
            placed = {name: place(arms[name], getattr(torch, case.dtype), device) for name in shuffled}
            torch.compiler.reset()
            at_work = {name: Decoding(model, case.mode, prompts, config.new_tokens) for name, model in placed.items()}
            for phase in phases:
                runs = {name: getattr(decoding, phase) for name, decoding in at_work.items()}
                interleave(runs, 1, order)  # not counted: first calls, first pages, compilation
                for name, values in interleave(runs, config.repeats, order, bar.update).items():
                    samples[phase][name] += values
            n_bytes = {name: streamed_bytes(model, case.batch_size, n_cached) for name, model in placed.items()}
            del placed, at_work, runs  # so that the next copies come to lie here, each in another one's place
    rows = []
    for phase in phases:
        tokens = case.batch_size * (config.prompt_tokens if phase == "prefill" else 1)
        for row in _compare(samples[phase], config.arms[0], placements):
            row |= {"phase": phase, "tokens_per_s": 1e3 * tokens / row["ms"]}
            if phase == "decode":
                floor_ms = 1e3 * n_bytes[row["arm"]] / bandwidth
                share = floor_ms / row["ms"]
                row |= {"GB_s": share * bandwidth / 1e9, "share_of_copy": share, "floor_ms": floor_ms}
            rows.append(row)
    return rows


def _prompts(config: BenchmarkConfig, model: Decoder, case: Case, device: torch.device) -> Tensor:
    shape = (case.batch_size, config.prompt_tokens)
    generator = torch.Generator().manual_seed(config.seed)
    return torch.randint(0, model.embed.num_embeddings, shape, generator=generator).to(device)


def _compare(samples: dict[str, list[float]], reference: str, placements: int) -> Iterator[Row]:
    """Per arm: median and quartiles in ms, speed-up over the reference, time over the arm without norms, verdict."""
    one, other = map(samples.get, EQUAL)
    control = ratio(one, other, placements) if one and other else Ratio(1.0, 1.0, 1.0)
    for name, values in samples.items():
        speedup = ratio(samples[reference], values, placements)
        low, median, high = 1e3 * np.quantile(values, [0.25, 0.5, 0.75])
        yield {
            "arm": name,
            "ms": float(median),
            "ms_quartiles": [float(low), float(high)],
            "samples": len(values),
            "all_ms": [1e3 * value for value in values],  # placement after placement
            "speedup": asdict(speedup),
            "over_no_norms": asdict(ratio(values, samples[CEILING], placements)),
            "verdict": "reference" if name == reference else verdict(speedup, control, len(values)),
        }


def verdict(speedup: Ratio, control: Ratio, samples: int) -> str:
    """'faster' or 'slower' only where the interval lies outside 1 and outside what two equal arms differed by."""
    if samples < FEWEST:
        return "too few samples"
    if speedup.low > max(1.0, control.high):
        return "faster"
    if speedup.high < min(1.0, control.low):
        return "slower"
    return "no measurable gain"


def measure_peer(config: BenchmarkConfig, baseline: Decoder, case: Case, device: torch.device) -> Row:
    """generate() of ours, of ours again and of transformers with the same weights: prompt and new tokens, greedy."""
    model = place(baseline, getattr(torch, case.dtype), device)
    try:
        stock = to_stock(model)
    except ConfigError as error:
        return {"left_out": str(error)}
    prompts = _prompts(config, model, case, device)
    new_tokens = min(64, model.config.n_ctx - config.prompt_tokens)
    ours = partial(generate, model, prompts, new_tokens, temperature=0)
    keys = {"attention_mask": torch.ones_like(prompts), "do_sample": False, "use_cache": True}
    theirs = partial(stock.generate, prompts, max_new_tokens=new_tokens, **keys)
    runs: dict[str, Callable[[], object]] = {"ours": ours, "ours_again": ours, "transformers": theirs}
    order, n = random.Random(config.seed), max(5, config.repeats // 2)
    timed = {name: partial(seconds, run, device) for name, run in runs.items()}
    with torch.inference_mode(), progress_bar(total=n * len(runs)) as bar:
        interleave(timed, 2, order)
        samples = interleave(timed, n, order, bar.update)
    return {
        "new_tokens": new_tokens,
        "ms_per_token": {name: 1e3 * float(np.median(values)) / new_tokens for name, values in samples.items()},
        "speedup": asdict(ratio(samples["transformers"], samples["ours"])),
        "control": asdict(ratio(samples["ours_again"], samples["ours"])),
    }


# ------------------------------------------------------------------------------------------------------------ reporting


def _hardware(device: torch.device) -> str:
    """The processor or GPU in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


COLUMNS = "ms | quartiles | speed-up over the first (95 %) | time over no norms (95 %) | verdict | tokens/s | GB/s"


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown lines, one table per phase."""
    lines = []
    for phase in dict.fromkeys(row["phase"] for row in rows):
        lines += ["", f"| {phase} | {COLUMNS} |", "|---" * (COLUMNS.count("|") + 2) + "|"]
        for row in rows:
            if row["phase"] == phase:
                low, high = row["ms_quartiles"]
                bandwidth = f"{row['GB_s']:.1f} ({row['share_of_copy']:.0%} of a copy)" if "GB_s" in row else ""
                cells = [row["arm"], f"{row['ms']:.3f}", f"{low:.3f}, {high:.3f}", _interval(row["speedup"])]
                cells += [_interval(row["over_no_norms"]), row["verdict"], f"{row['tokens_per_s']:,.0f}", bandwidth]
                lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def peer_line(peer: Row) -> str:
    """What `measure_peer` found, in one line."""
    if "left_out" in peer:
        return f"generate() beside transformers': left out, {peer['left_out']}"
    ms = peer["ms_per_token"]
    return (
        f"generate(), {peer['new_tokens']} tokens after the prompt: {ms['ours']:.3f} ms per token, transformers "
        f"{ms['transformers']:.3f}: {_interval(peer['speedup'])} times as fast; "
        f"ours again {_interval(peer['control'])}"
    )


def _interval(value: dict[str, float]) -> str:
    return f"{value['value']:.3f} ({value['low']:.3f} to {value['high']:.3f})"


def write(report: dict[str, Any], path: Path) -> None:
    """The report as JSON, and its tables as Markdown beside it."""
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    counts = ", ".join(f"{name} {len(names)}" for name, names in report["operators"].items())
    lines = [
        f"{report['date']}; {report['hardware']}; torch {report['versions']['torch']}; "
        f"{report['parameters']:,} parameters; copying {report['copy_bandwidth_GB_s']:.1f} GB/s.",
        "",
        f"Operators of one eager decoding step: {counts}.",
    ]
    for measured in report["cases"]:
        case = {field.name: measured[field.name] for field in dataclasses.fields(Case)}
        lines += ["", f"### {Case(**case)}", *table(measured["rows"])]
        lines += [peer_line(peer) for peer in report["peer"] if case.items() <= peer.items()]
    lines += ["", VERDICTS, *(f"Left out: {reason}" for reason in report["left_out"])]
    path.with_suffix(".md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
