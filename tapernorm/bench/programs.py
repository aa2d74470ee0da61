"""What norms cost in decoding: the same shape with and without them, side by side, and transformers' generate() beside.

A case is a mode (eager, compile, cuda_graph), a precision of the weights and a batch size. In each case all arms take
turns in random order in one process; copies of all arms at new places in memory follow each other, because where
weights happen to lie shifts a time by a per cent or two for as long as they lie there.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from tapernorm import git_revision
from tapernorm.bench.timing import Ratio, copy_bandwidth, interleave, ratio, seconds
from tapernorm.config.options import AnyNormConfig, Config, NoNormConfig, StandardNormConfig, TaperNormConfig
from tapernorm.config.programs import BenchmarkConfig
from tapernorm.config.resolve import build, resolve
from tapernorm.config.schema import ConfigError, to_dict
from tapernorm.method.gate import Phase
from tapernorm.model.decoder import Decoder, build_model
from tapernorm.model.fold import fold
from tapernorm.model.generate import generate
from tapernorm.model.hf import to_stock
from tapernorm.model.lean import lean
from tapernorm.runtime.device import keep_freed_memory, pick_device
from tapernorm.runtime.progress import clock
from tapernorm.training import checkpoint as checkpoints

N_VOCAB = 10_000  # of random weights whose model.vocab_size is null: the size that the method was published with
CEILING = "no_norms"
EQUAL = ("baseline", "baseline_again")  # arms whose difference is what measuring makes of none
MODES = ("eager", "cuda_graph", "compile")
WARM_STEPS = 2  # at the start of every sample: the arm before has filled the processor's caches
INTERNAL, ALL = ("attn", "mlp"), ("attn", "mlp", "final")

Arms = dict[str, Decoder]
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One comparison of all arms."""

    mode: str
    dtype: str
    batch_size: int

    def __str__(self) -> str:
        return f"{self.mode}, {self.dtype}, batch {self.batch_size}"


# ---------------------------------------------------------------------------------------------------------------- arms


def build_arms(base: Decoder, names: Iterable[str]) -> Arms:
    """The arms by name, float32: models of the base's shape, with those of its weights that they have too."""
    recipes: dict[str, Callable[[], Decoder]] = {
        "baseline": lambda: _like(base, StandardNormConfig()),
        "baseline_again": lambda: _like(base, StandardNormConfig()),
        "baseline_gain_folded": lambda: fold(_like(base, StandardNormConfig())),
        "internal_taper": lambda: _tapered(base, INTERNAL),
        "internal_taper_folded": lambda: fold(_tapered(base, INTERNAL)),
        "all_taper_folded": lambda: fold(_tapered(base, ALL)),
        # Its head is a matrix of its own, as it is in the folded arms.
        "no_norms": lambda: _like(base, NoNormConfig(), tied=False),
    }
    return {name: recipes[name]().eval().requires_grad_(False) for name in names}


def _like(base: Decoder, norm: AnyNormConfig, tied: bool | None = None) -> Decoder:
    model = Decoder(dataclasses.replace(base.config, tied=base.config.tied if tied is None else tied), norm)
    given = base.state_dict()
    given.setdefault("head.weight", base.embed.weight)
    own = model.state_dict()
    model.load_state_dict({name: given[name] for name in own.keys() & given.keys()}, strict=False)
    return model


def _tapered(base: Decoder, sites: tuple[str, ...]) -> Decoder:
    model = _like(base, TaperNormConfig(name="taper", sites=sites))
    model.set_gate(0.0, Phase.TAPERED)
    return model


def load_base(config: BenchmarkConfig) -> Decoder:
    """The model that the arms take their shape and weights from: a checkpoint's, or a random one."""
    if config.checkpoint:
        return checkpoints.load_model(checkpoints.find(Path(config.checkpoint)))[0]
    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or N_VOCAB)
    tree = {"model": to_dict(model), "norm": to_dict(StandardNormConfig()), "seed": config.seed}
    trained: Config = resolve(build(tree), model.vocab_size)
    return build_model(trained)


def place(model: Decoder, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A copy at a new place in memory, with its parameters in `dtype`; rotary tables stay in float32."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.to(device)


# ------------------------------------------------------------------------------------------------------------- decoding


class Decoding:
    """One arm at work: a prompt in its cache, and the most likely tokens after it."""

    def __init__(self, model: Decoder, mode: str, prompts: Tensor, new_tokens: int) -> None:
        """prompts (B, T) ids; as many as `new_tokens` steps are timed at once."""
        self.device, self.new_tokens, self.prompts = prompts.device, new_tokens, prompts
        self.model: Any = model if mode == "compile" else lean(model)
        n_row, n_prompt = prompts.shape
        self.cache = model.new_cache(n_row, n_prompt + WARM_STEPS + new_tokens, fixed=mode != "eager")
        self.token = prompts[:, -1:].clone()
        self.step: Callable[[], object] = self._step
        self.fill()
        if mode == "compile":
            self.step = self._compiled()
        elif mode == "cuda_graph":
            self.step = self._captured().replay

    def _next(self, token: Tensor) -> Tensor:
        """(B, 1) -> (B, 1)."""
        return self.model.readout(self.model.trunk(token, cache=self.cache)[:, -1]).argmax(-1, keepdim=True)

    def _step(self) -> None:
        self.token.copy_(self._next(self.token))

    def _compiled(self) -> Callable[[], object]:
        compiled, n_prompt = torch.compile(self._next), self.cache.longest

        def step() -> None:
            self.cache.longest = n_prompt  # which only checks that there is room; a number that moves compiles twice
            self.token.copy_(compiled(self.token))

        return step

    def _captured(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # for the prompt's forward
        with torch.cuda.stream(stream):  # kernels choose themselves at their first calls, which no graph can hold
            self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph

    def fill(self) -> None:
        """Read the prompts into the cache, emptied first."""
        self.cache.truncate([0] * len(self.prompts))
        self.model.readout(self.model.trunk(self.prompts, cache=self.cache)[:, -1])

    def prefill(self) -> float:
        """Seconds to read the prompts."""
        self.cache.truncate([0] * len(self.prompts))
        return seconds(lambda: self.model.readout(self.model.trunk(self.prompts, cache=self.cache)[:, -1]), self.device)

    def decode(self) -> float:
        """Seconds per token of each row, after the prompt."""
        self.cache.truncate([self.prompts.shape[1]] * len(self.prompts))
        for _ in range(WARM_STEPS):
            self.step()

        def steps() -> None:
            for _ in range(self.new_tokens):
                self.step()

        return seconds(steps, self.device) / self.new_tokens


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def operators(model: Decoder) -> list[str]:
    """Names of the operators that one eager decoding step at batch size 1 runs, in their order."""
    prompts = torch.zeros(1, 4, dtype=torch.int64, device=model.embed.weight.device)
    decoding = Decoding(model, "eager", prompts, 1)
    with _Recorder() as recorder:
        decoding.step()
    return recorder.names


def streamed_bytes(model: Decoder, batch_size: int, n_cached: int) -> int:
    """Bytes that one decoding step has to read: every weight once, the filled cache, of an embedding only its rows."""
    config, embedding = model.config, model.embed.weight
    tables = [] if model.head is None else [model.embed]
    tables += [] if model.position_embed is None else [model.position_embed]
    weights = sum(p.numel() for p in model.parameters()) - sum(table.weight.numel() for table in tables)
    cached = 2 * config.n_layer * batch_size * n_cached * config.d_model
    return (weights + cached + batch_size * config.d_model) * embedding.element_size()


# ------------------------------------------------------------------------------------------------------------ measuring


def benchmark(config: BenchmarkConfig, say: Callable[[str], None] = print) -> dict[str, Any]:
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
    out = _out(config, base)
    needed = config.prompt_tokens + WARM_STEPS + config.new_tokens
    if needed > base.config.n_ctx:
        raise ConfigError(
            f"prompt_tokens + new_tokens + {WARM_STEPS} = {needed} exceeds the context of {base.config.n_ctx} tokens; "
            "make prompt_tokens or new_tokens smaller"
        )
    for name in (CEILING, config.arms[0]):
        if name not in config.arms:
            raise ConfigError(f"arms=[{','.join(config.arms)}] lacks {name}, which the others are compared with")
    arms = build_arms(base, config.arms)
    bandwidth = copy_bandwidth(device)
    report: dict[str, Any] = {
        "hardware": hardware(device),
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
    say(
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
        say(f"case {number} of {len(cases)}: {case}{eta}")
        try:
            rows = measure(config, arms, case, device, bandwidth)
        except Exception as error:  # such as a compiler that is missing: the other cases stand
            report["left_out"].append(f"{case}: {type(error).__name__}: {_first_line(error)}")
            say(report["left_out"][-1])
            continue
        report["cases"].append({**dataclasses.asdict(case), "rows": rows})
        for line in table(rows):
            say(line)
        if config.peer and case.mode == "eager" and config.arms[0] == "baseline":
            peer = measure_peer(config, arms["baseline"], case, device)
            report["peer"].append({**dataclasses.asdict(case), **peer})
            say(peer_line(peer))
    write(report, out)
    for line in [VERDICTS, *report["left_out"], f"written to {out} and {out.with_suffix('.md')}"]:
        say(line)
    return report


def _out(config: BenchmarkConfig, base: Decoder) -> Path:
    """Where the result goes: checked now, not after an hour."""
    if config.out is None:
        file = f"decode_{base.config.name}_{time.strftime('%Y-%m-%d_%H%M%S')}.json"
        (folder := Path("runs/benchmarks").absolute()).mkdir(parents=True, exist_ok=True)
        return folder / file
    out = Path(config.out)
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"out={out}: name a file in a directory that is there")
    return out


def _cases(config: BenchmarkConfig, device: torch.device) -> list[Case]:
    usual = ("eager", "cuda_graph", "compile") if device.type == "cuda" else ("eager", "compile")
    modes = config.modes or usual
    if "cuda_graph" in modes and device.type != "cuda":
        raise ConfigError(f"modes=[{','.join(modes)}]: cuda_graph needs a CUDA device, this is {device.type}")
    cases = [
        Case(mode, dtype, batch_size)
        for mode in sorted(modes, key=MODES.index)  # the slow ones last
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
    prompts = _prompts(config, arms, case.batch_size, device)
    placements = 1 if case.mode == "compile" else config.placements  # compiling takes minutes
    phases = ("decode", "prefill") if case.mode == "eager" else ("decode",)
    samples: dict[str, dict[str, list[float]]] = {phase: {name: [] for name in arms} for phase in phases}
    dtype = getattr(torch, case.dtype)
    n_cached = config.prompt_tokens + WARM_STEPS + config.new_tokens // 2
    with _bar(placements * config.repeats * len(arms) * len(phases)) as bar, _no_gradients(case.mode):
        for _ in range(placements):
            placed = {name: place(arms[name], dtype, device) for name in order.sample(list(arms), len(arms))}
            torch.compiler.reset()
            at_work = {name: Decoding(model, case.mode, prompts, config.new_tokens) for name, model in placed.items()}
            for phase in phases:
                runs = {name: partial(getattr(Decoding, phase), decoding) for name, decoding in at_work.items()}
                interleave(runs, 1, order)  # not counted: first calls, first pages, compilation
                for name, values in interleave(runs, config.repeats, order, bar.update).items():
                    samples[phase][name] += values
            n_bytes = {name: streamed_bytes(model, case.batch_size, n_cached) for name, model in placed.items()}
            del placed, at_work, runs  # so that the next copies come to lie here, each in another one's place
    rows = []
    for phase in phases:
        for row in _compare(samples[phase], config.arms[0], placements):
            tokens = case.batch_size * (config.prompt_tokens if phase == "prefill" else 1)
            row |= {"phase": phase, "tokens_per_s": 1e3 * tokens / row["ms"]}
            if phase == "decode":
                gb_s = n_bytes[row["arm"]] / row["ms"] / 1e6
                row |= {
                    "GB_s": gb_s,
                    "share_of_copy": gb_s * 1e9 / bandwidth,
                    "floor_ms": n_bytes[row["arm"]] / bandwidth * 1e3,
                }
            rows.append(row)
    return rows


def _compare(samples: dict[str, list[float]], reference: str, placements: int) -> Iterator[Row]:
    """Per arm: median and quartiles in ms, speed-up over the reference, time over the arm without norms, verdict."""
    one, other = map(samples.get, EQUAL)
    control = ratio(one, other, placements) if one and other else Ratio(1.0, 1.0, 1.0)
    for name, values in samples.items():
        speedup = ratio(samples[reference], values, placements)
        low, median, high = torch.tensor(values, dtype=torch.float64).quantile(
            torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
        )
        yield {
            "arm": name,
            "ms": 1e3 * median.item(),
            "ms_quartiles": [1e3 * low.item(), 1e3 * high.item()],
            "samples": len(values),
            "all_ms": [1e3 * value for value in values],  # placement after placement
            "speedup": dataclasses.asdict(speedup),
            "over_no_norms": dataclasses.asdict(ratio(values, samples[CEILING], placements)),
            "verdict": "reference" if name == reference else verdict(speedup, control, len(values)),
        }


VERDICTS = (
    "verdict: faster or slower where the whole interval lies beyond 1 and beyond what the interval of two equal arms "
    "(baseline, baseline_again) allows for no difference"
)
FEWEST = 10  # samples under which a bootstrap interval means nothing


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
    prompts = _prompts(config, {"baseline": model}, case.batch_size, device)
    new_tokens = min(64, model.config.n_ctx - config.prompt_tokens)

    def theirs() -> object:
        return stock.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new_tokens, do_sample=False, use_cache=True
        )

    def ours() -> object:
        return generate(model, prompts, new_tokens, temperature=0)

    runs = {"ours": ours, "ours_again": ours, "transformers": theirs}
    order, n = random.Random(config.seed), max(5, config.repeats // 2)
    timed = {name: partial(seconds, run, device) for name, run in runs.items()}
    with torch.inference_mode(), _bar(n * len(runs)) as bar:
        interleave(timed, 2, order)
        samples = interleave(timed, n, order, bar.update)
    medians = {name: 1e3 * float(torch.tensor(values).median()) / new_tokens for name, values in samples.items()}
    return {
        "new_tokens": new_tokens,
        "ms_per_token": medians,
        "speedup": dataclasses.asdict(ratio(samples["transformers"], samples["ours"])),
        "control": dataclasses.asdict(ratio(samples["ours_again"], samples["ours"])),
    }


def _prompts(config: BenchmarkConfig, arms: Arms, batch_size: int, device: torch.device) -> Tensor:
    n_vocab = next(iter(arms.values())).embed.num_embeddings
    generator = torch.Generator().manual_seed(config.seed)
    return torch.randint(0, n_vocab, (batch_size, config.prompt_tokens), generator=generator).to(device)


def _no_gradients(mode: str) -> Any:
    return torch.no_grad() if mode == "compile" else torch.inference_mode()  # what a compiled graph can be made under


def _bar(total: int) -> Any:
    return tqdm(total=total, unit="sample", leave=False, disable=not sys.stderr.isatty(), dynamic_ncols=True)


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")


# ------------------------------------------------------------------------------------------------------------ reporting


def hardware(device: torch.device) -> str:
    """The processor or GPU in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


COLUMNS = (
    "",
    "ms",
    "quartiles",
    "speed-up over the first (95 %)",
    "time over no norms (95 %)",
    "verdict",
    "tokens/s",
    "GB/s",
)


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown lines, one table per phase."""
    lines = []
    for phase in dict.fromkeys(row["phase"] for row in rows):
        lines += ["", f"| {phase}{' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        for row in rows:
            if row["phase"] == phase:
                low, high = row["ms_quartiles"]
                bandwidth = f"{row['GB_s']:.1f} ({row['share_of_copy']:.0%} of a copy)" if "GB_s" in row else ""
                cells = [row["arm"], f"{row['ms']:.3f}", f"{low:.3f}, {high:.3f}", _interval(row["speedup"])]
                cells += [_interval(row["over_no_norms"]), row["verdict"], f"{row['tokens_per_s']:,.0f}", bandwidth]
                lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def peer_line(peer: Row) -> str:
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
    counts = {name: len(names) for name, names in report["operators"].items()}
    lines = [
        f"{report['date']}; {report['hardware']}; torch {report['versions']['torch']}; "
        f"{report['parameters']:,} parameters; copying {report['copy_bandwidth_GB_s']:.1f} GB/s.",
        "",
        "Operators of one eager decoding step: " + ", ".join(f"{name} {n}" for name, n in counts.items()) + ".",
    ]
    for case in report["cases"]:
        peers = [
            peer for peer in report["peer"] if all(peer[key] == case[key] for key in ("mode", "dtype", "batch_size"))
        ]
        lines += ["", f"### {Case(case['mode'], case['dtype'], case['batch_size'])}", *table(case["rows"])]
        lines += [peer_line(peer) for peer in peers]
    lines += ["", VERDICTS, *(f"Left out: {reason}" for reason in report["left_out"])]
    path.with_suffix(".md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
