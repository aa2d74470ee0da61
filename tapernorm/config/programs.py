"""What the entry points other than train.py can be told. Nothing here imports torch."""

from __future__ import annotations

import typing
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from tapernorm.config.options import DatasetConfig, ModelConfig
from tapernorm.config.schema import (
    DEVICES,
    SCHEMA,
    Device,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Seed,
    meaning,
)

GAINS = "fold the gains of the norms that stay, too, which unties a tied head"
TABLE = "make a standard norm of 0.attn, which with rotary positions reads the token alone, a table (vocabulary, width)"


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class EvaluateConfig:
    """What evaluate.py can be told; everything else comes from the checkpoint."""

    checkpoint: str | tuple[str, ...] = meaning(
        "a run (its newest checkpoint), checkpoint, sweep, pattern, or GPT-2 or Llama in Hugging Face form; or several"
    )
    baseline: str | None = meaning("run or checkpoint that the others are compared with; null: the first", None)
    dataset: Annotated[DatasetConfig, Field(discriminator="kind")] | None = meaning(
        "a group: other text to evaluate on, its validation split; null: the checkpoint's own", None
    )
    suite: dict[str, Annotated[DatasetConfig, Field(discriminator="kind")]] | None = meaning(
        "a group: several data sets by name, in one table with the published losses", None
    )
    tokens: PositiveInt | None = meaning("validation tokens; null: as many as in training, or all of other text", None)
    batch_size: PositiveInt = meaning("sequences per forward; does not change the loss", 8)
    worst: NonNegativeInt = meaning("documents to list, by their mean and by their total loss", 3)
    samples: NonNegativeInt | None = meaning("stories to print; null: 3, or none where there is a table", None)
    sample_tokens: PositiveInt = meaning("tokens per sample at most", 120)
    prompt: str = meaning("text that the samples continue", "")
    temperature: NonNegative = meaning("of sampling; 0 is greedy", 0.8)
    seed: Seed = meaning("of sampling", 0)
    device: Device = meaning(DEVICES, "auto")
    progress: Literal["auto", "bar", "lines", "none"] = meaning("auto: a bar on a terminal, lines elsewhere", "auto")
    cache_dir: str | None = meaning("prepared data; null: $TAPERNORM_CACHE or ~/.cache/tapernorm", None)
    fold: bool = meaning("evaluate the folded model too, and certify that it computes the same", False)
    fold_gains: bool = meaning(f"{GAINS} if the final norm stays", True)
    fold_table: bool = meaning(f"{TABLE}; implies fold", False)
    save_folded: str | None = meaning("new directory for the folded model as a checkpoint; implies fold", None)
    out: str | None = meaning(
        "the result's JSON file; null: evaluation.json in the run, or comparison.json above several", None
    )


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class GenerateConfig:
    """What scripts/generate.py can be told; everything else comes from the checkpoint."""

    checkpoint: str = meaning("directory of a run (its newest checkpoint) or of one checkpoint")
    prompt: str = meaning("text that the samples continue", "")
    samples: PositiveInt = meaning("continuations to print", 1)
    max_tokens: PositiveInt = meaning("tokens per continuation at most", 200)
    temperature: NonNegative = meaning("of sampling; 0 is greedy", 0.8)
    top_k: PositiveInt | None = meaning("draw among the so many most probable tokens; null: all", None)
    top_p: Fraction | None = meaning("draw among the fewest most probable tokens of this share; null: all", None)
    seed: Seed = meaning("of sampling", 0)
    device: Device = meaning(DEVICES, "auto")
    stream: bool = meaning("print text as it is produced", True)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class ExportConfig:
    """What scripts/export_hf.py can be told; everything else comes from the checkpoint."""

    checkpoint: str = meaning("directory of a run (its newest checkpoint) or of one checkpoint")
    out: str = meaning("new directory for the model in Hugging Face form")
    format: Literal["auto", "tapernorm", "gpt2", "llama"] = meaning(
        "tapernorm: norm-free, with its own code; gpt2, llama: the stock layout; auto: stock for a baseline", "auto"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = meaning("of the weights", "float32")
    fold_gains: bool = meaning(f"tapernorm: {GAINS} if the final norm stays", False)
    fold_table: bool = meaning(f"tapernorm: {TABLE}", False)
    tokens: PositiveInt = meaning("tokens to certify on, at least one context", 1024)


ArmName = Literal[
    "baseline",
    "baseline_again",
    "baseline_gain_folded",
    "internal_taper",
    "internal_taper_folded",
    "all_taper_folded",
    "no_norms",
]
ARMS: tuple[ArmName, ...] = typing.get_args(ArmName)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class BenchmarkConfig:
    """What scripts/benchmark_decode.py can be told."""

    model: ModelConfig = meaning("the shape; random weights unless a checkpoint is given", ModelConfig())
    checkpoint: str | None = meaning("directory of a run or checkpoint whose shape and weights to use", None)
    arms: Annotated[tuple[ArmName, ...], Field(min_length=2)] = meaning(
        "what is compared; the first one is the reference of the speed-ups", ARMS
    )
    batch_sizes: tuple[PositiveInt, ...] = meaning("sequences that are decoded side by side", (1, 8))
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = meaning("of the weights", ("float32", "bfloat16"))
    modes: Annotated[tuple[Literal["eager", "compile", "cuda_graph"], ...] | None, Field(min_length=1)] = meaning(
        "null: eager, on a CUDA device cuda_graph, and compile for the first precision and batch size alone", None
    )
    prompt_tokens: PositiveInt = meaning("tokens of the prompt", 64)
    new_tokens: PositiveInt = meaning("tokens decoded per sample of the time", 16)
    repeats: PositiveInt = meaning("samples per arm and placement in memory", 10)
    placements: PositiveInt = meaning("times that all arms are copied to other places in memory (compile: once)", 6)
    peer: bool = meaning("also compare generate() with transformers' on its own model with the same weights", True)
    minutes: Positive | None = meaning("start no further case after so long; null: no limit", None)
    seed: Seed = meaning("of weights, prompts and order", 0)
    threads: PositiveInt | None = meaning("CPU threads; null: torch's choice", None)
    device: Device = meaning(DEVICES, "auto")
    out: str | None = meaning("the result's JSON file, a table .md beside it; null: a new one in runs/benchmarks", None)
