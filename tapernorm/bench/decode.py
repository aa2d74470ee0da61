"""Models with and without norms, decoding side by side: what `benchmark` measures."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tapernorm.bench.timing import seconds
from tapernorm.config.options import AnyNormConfig, NoNormConfig, StandardNormConfig, TaperNormConfig
from tapernorm.config.programs import BenchmarkConfig
from tapernorm.config.resolve import build, resolve
from tapernorm.config.schema import to_dict
from tapernorm.method.gate import Phase
from tapernorm.model.decoder import Decoder, build_model
from tapernorm.model.fold import fold
from tapernorm.model.lean import lean
from tapernorm.training import checkpoint

N_VOCAB = 10_000  # of random weights whose model.vocab_size is null: the size that the method was published with
WARM_STEPS = 2  # at the start of every sample: the arm before has filled the processor's caches
INTERNAL, ALL = ("attn", "mlp"), ("attn", "mlp", "final")

Arms = dict[str, Decoder]


def build_arms(base: Decoder, names: Iterable[str]) -> Arms:
    """The arms by name, float32: models of the base's shape, with those of its weights that they have too."""
    baseline = partial(_like, base, StandardNormConfig())
    recipes: dict[str, Callable[[], Decoder]] = {
        "baseline": baseline,
        "baseline_again": baseline,
        "baseline_gain_folded": lambda: fold(baseline()),
        "internal_taper": lambda: _tapered(base, INTERNAL),
        "internal_taper_folded": lambda: fold(_tapered(base, INTERNAL)),
        "all_taper_folded": lambda: fold(_tapered(base, ALL)),
        # Its head is a matrix of its own, as it is in the folded arms.
        "no_norms": lambda: _like(base, NoNormConfig(), tied=False),
    }
    return {name: recipes[name]().eval().requires_grad_(False) for name in names}


def _like(base: Decoder, norm: AnyNormConfig, tied: bool | None = None) -> Decoder:
    model = Decoder(dataclasses.replace(base.config, tied=base.config.tied if tied is None else tied), norm)
    given = {"head.weight": base.embed.weight, **base.state_dict()}
    model.load_state_dict({name: given[name] for name in model.state_dict().keys() & given.keys()}, strict=False)
    return model


def _tapered(base: Decoder, sites: tuple[str, ...]) -> Decoder:
    model = _like(base, TaperNormConfig(name="taper", sites=sites))
    model.set_gate(0.0, Phase.TAPERED)
    return model


def load_base(config: BenchmarkConfig) -> Decoder:
    """The model that the arms take their shape and weights from: a checkpoint's, or a random one."""
    if config.checkpoint:
        return checkpoint.load_model(checkpoint.find(Path(config.checkpoint)))[0]
    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or N_VOCAB)
    tree = {"model": to_dict(model), "norm": to_dict(StandardNormConfig()), "seed": config.seed}
    return build_model(resolve(build(tree), model.vocab_size))


def place(model: Decoder, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A copy at a new place in memory, with its parameters in `dtype`; rotary tables stay in float32."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.to(device)


class Decoding:
    """One arm at work: a prompt in its cache, and the most likely tokens after it."""

    def __init__(self, model: Decoder, mode: str, prompts: Tensor, new_tokens: int) -> None:
        """prompts (B, T) ids; as many as `new_tokens` steps are timed at once."""
        self.new_tokens, self.prompts = new_tokens, prompts
        self.model: Any = model if mode == "compile" else lean(model)
        n_row, n_prompt = prompts.shape
        self.cache = model.new_cache(n_row, n_prompt + WARM_STEPS + new_tokens, fixed=mode != "eager")
        self.token = prompts[:, -1:].clone()
        self.step: Callable[[], object] = self._step
        self.prefill()
        if mode == "compile":
            self.step = self._compiled()
        elif mode == "cuda_graph":
            self.step = self._captured().replay

    def _logits(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, V), of the last token."""
        return self.model.readout(self.model.trunk(tokens, cache=self.cache)[:, -1])

    def _next(self, token: Tensor) -> Tensor:
        """(B, 1) -> (B, 1)."""
        return self._logits(token).argmax(-1, keepdim=True)

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

    def prefill(self) -> float:
        """Seconds to read the prompts into the cache, emptied first."""
        self.cache.truncate([0] * len(self.prompts))
        return seconds(lambda: self._logits(self.prompts), self.prompts.device)

    def decode(self) -> float:
        """Seconds per token of each row, after the prompt."""
        self.cache.truncate([self.prompts.shape[1]] * len(self.prompts))
        for _ in range(WARM_STEPS):
            self.step()

        def steps() -> None:
            for _ in range(self.new_tokens):
                self.step()

        return seconds(steps, self.prompts.device) / self.new_tokens


@torch.inference_mode()
def operators(model: Decoder) -> list[str]:
    """Names of the operators that one eager decoding step at batch size 1 runs, in their order."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler tells that it starts and stops
    prompts = torch.zeros(1, 4, dtype=torch.int64, device=model.embed.weight.device)
    decoding = Decoding(model, "eager", prompts, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        decoding.step()
    called = [event for event in profile.events() if event.cpu_parent is None]  # not by another operator
    return [event.name for event in sorted(called, key=lambda event: event.time_range.start)]


def streamed_bytes(model: Decoder, batch_size: int, n_cached: int) -> int:
    """Bytes that one decoding step has to read: every weight once, the filled cache, of an embedding only its rows."""
    config, embedding = model.config, model.embed.weight
    tables = [] if model.head is None else [model.embed]
    tables += [] if model.position_embed is None else [model.position_embed]
    weights = sum(p.numel() for p in model.parameters()) - sum(table.weight.numel() for table in tables)
    cached = 2 * config.n_layer * batch_size * n_cached * config.d_model
    return (weights + cached + batch_size * config.d_model) * embedding.element_size()
