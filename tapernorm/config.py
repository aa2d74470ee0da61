"""The typed configuration: every key with its type, default, range and one-line meaning.

Hydra composes YAML groups and the command line into a tree; `build` checks that tree against the dataclasses below
and returns a frozen `Config`, after which OmegaConf is behind us. `resolve` computes every value that derives from
others, once. Nothing here imports torch, so a wrong key is reported before anything slow happens.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

SCHEMA = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
DEVICE_PATTERN = r"^(auto|cpu|mps|cuda(:\d+)?)$"
Schema = TypeVar("Schema")
Share = Annotated[float, Field(gt=0, lt=1)]


class ConfigError(ValueError):
    """A configuration that cannot run. The message is one line that names the key and what to do."""


def meaning(text: str, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field with its one-line meaning (shown by `--help`) and, optionally, a default."""
    if default is dataclasses.MISSING:
        return Field(description=text)
    return Field(default=default, description=text)


# --------------------------------------------------------------------------------------------------------------- model


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class ModelConfig:
    """A pre-norm decoder. The defaults are Llama's block (RoPE, SwiGLU, RMSNorm, no biases); GPT-2 is model=gpt2."""

    name: str = meaning("label of the size in tables and directory names", "custom")
    n_layer: PositiveInt = meaning("number of blocks", 8)
    n_ctx: PositiveInt = meaning("context length in tokens", 512)
    d_model: PositiveInt = meaning("width of the residual stream", 64)
    head_dim: PositiveInt = meaning("width of one attention head; d_model must be a multiple of it", 32)
    d_ff: PositiveInt | None = meaning(
        "hidden width of the MLP; null: 8/3 d_model rounded up to a multiple of 8 for swiglu, 4 d_model for gelu", None
    )
    vocab_size: PositiveInt | None = meaning("null: the tokenizer's; a number must equal it", None)
    tied: bool = meaning("the head shares the embedding's matrix", True)
    positions: Literal["rotary", "learned"] = meaning("rotary turns queries and keys; learned adds a table", "rotary")
    rope_theta: Annotated[float, Field(gt=0)] = meaning("rotary only: base of the frequencies", 10000.0)
    mlp: Literal["swiglu", "gelu"] = meaning(
        "down(silu(gate) * up), or down(gelu(up)) with GPT-2's tanh form", "swiglu"
    )
    biases: bool = meaning("a bias in every projection of the blocks", False)
    dropout: Annotated[float, Field(ge=0, lt=1)] = meaning("of embeddings, attention and both residual branches", 0.0)
    norm_family: Literal["rms", "layer"] = meaning("what is tapered: RMSNorm or LayerNorm", "rms")
    norm_eps: Annotated[float | None, Field(gt=0)] = meaning("null: 1e-6 for rms, 1e-5 for layer", None)
    init: str = meaning(
        "'random', or what to start from: directory of a run or checkpoint; GPT-2 or Llama in Hugging Face form, "
        "directory or hub id",
        "random",
    )
    init_std: Annotated[float, Field(gt=0)] = meaning("standard deviation of the initial matrices", 0.02)

    @property
    def n_head(self) -> int:
        return self.d_model // self.head_dim


# ---------------------------------------------------------------------------------------------------------------- norm

SITE_PATTERN = re.compile(r"(?:(\d+)(?:-(\d+))?\.)?(attn|mlp)|final")
SITES_MEANING = (
    "which norms: 'attn', 'mlp' (in every block), 'final', or with block numbers: '0.attn', '2-5.mlp'; "
    "the others stay standard"
)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class StandardNormConfig:
    """RMSNorm or LayerNorm everywhere: the baseline."""

    kind: Literal["standard"] = "standard"
    name: str = meaning("label in tables and directory names", "baseline")

    @property
    def sites(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class TaperNormConfig:
    """TaperNorm: a standard norm that a global gate turns into a fixed linear map."""

    kind: Literal["taper"] = "taper"
    name: str = meaning("label in tables and directory names", "custom_taper")
    sites: tuple[str, ...] = meaning(SITES_MEANING, ("attn", "mlp"))


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class FakeNormConfig:
    """Comparator: standard norms whose statistics are frozen one after the other, in the steps of the gate."""

    kind: Literal["fake"] = "fake"
    name: str = meaning("label in tables and directory names", "fake_ln")
    sites: tuple[str, ...] = meaning(SITES_MEANING, ("attn", "mlp", "final"))


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class DyTConfig:
    """Comparator: gamma * tanh(alpha * h) + beta."""

    kind: Literal["dyt"] = "dyt"
    name: str = meaning("label in tables and directory names", "dyt")
    sites: tuple[str, ...] = meaning(SITES_MEANING, ("attn", "mlp", "final"))
    alpha: Annotated[float, Field(gt=0)] = meaning("initial alpha", 0.5)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class DerfConfig:
    """Comparator: gamma * erf(alpha * h + s) + beta."""

    kind: Literal["derf"] = "derf"
    name: str = meaning("label in tables and directory names", "derf")
    sites: tuple[str, ...] = meaning(SITES_MEANING, ("attn", "mlp", "final"))
    alpha: Annotated[float, Field(gt=0)] = meaning("initial alpha", 0.5)
    shift: float = meaning("initial s", 0.0)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class NoNormConfig:
    """Comparator: no normalization at all."""

    kind: Literal["none"] = "none"
    name: str = meaning("label in tables and directory names", "none")
    sites: tuple[str, ...] = meaning(SITES_MEANING, ("attn", "mlp", "final"))


NormConfig = StandardNormConfig | TaperNormConfig | FakeNormConfig | DyTConfig | DerfConfig | NoNormConfig
GATED = ("taper", "fake")  # the kinds that the gate takes away


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class FoldedNormConfig:
    """What folding leaves of a trained model's norms: written by tapernorm.fold, no choice for training."""

    kind: Literal["folded"] = "folded"
    name: str = meaning("label in tables and directory names", "folded")
    source: Annotated[NormConfig, Field(discriminator="kind")] = meaning("the norm that the model was trained with")
    gains: bool = meaning("standard norms are folded too: their statistic stays, without a gain", True)

    @property
    def sites(self) -> tuple[str, ...]:
        return self.source.sites


AnyNormConfig = NormConfig | FoldedNormConfig


def select_sites(patterns: tuple[str, ...], n_layer: int) -> list[str]:
    """The site names ('0.attn', '0.mlp', ..., 'final') that `patterns` select, in the order of the forward pass.

    Raises ConfigError for a pattern that is malformed or names a block that the model lacks.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        match = SITE_PATTERN.fullmatch(pattern)
        if match is None:
            raise ConfigError(f"norm.sites: '{pattern}' is not a site; write attn, mlp, final, 0.attn or 2-5.mlp")
        first, last, site = match.groups()
        if site is None:
            chosen.add("final")
            continue
        blocks = range(n_layer) if first is None else range(int(first), int(last or first) + 1)
        if not blocks or blocks[-1] >= n_layer:
            raise ConfigError(f"norm.sites: '{pattern}' is outside the model's blocks 0 to {n_layer - 1}")
        chosen.update(f"{block}.{site}" for block in blocks)
    return [name for name in all_sites(n_layer) if name in chosen]


def all_sites(n_layer: int) -> list[str]:
    """Names of every norm of a model: '<block>.attn', '<block>.mlp' per block, then 'final'."""
    return [f"{block}.{site}" for block in range(n_layer) for site in ("attn", "mlp")] + ["final"]


STAGES = ("mlp", "qk", "v", "final")  # in the order of their removal


def removal_order(sites: tuple[str, ...], n_layer: int) -> list[tuple[str, str]]:
    """(stage, site) of every removal of a sequence, in its order, block after block within a stage.

    All MLP norms, then the attention norms for what Q and K read, then these for what V reads, then the final norm.
    """
    chosen = select_sites(sites, n_layer)
    kinds = {"mlp": "mlp", "qk": "attn", "v": "attn", "final": "final"}
    return [(stage, site) for stage in STAGES for site in chosen if site.rpartition(".")[2] == kinds[stage]]


def removal_turns(sites: tuple[str, ...], n_layer: int) -> dict[str, tuple[float, ...]]:
    """By site the gate values at which its removals come: the i-th of all n, i = 1..n, at g = 1 - i/n."""
    order = removal_order(sites, n_layer)
    turns: dict[str, tuple[float, ...]] = {}
    for number, (_, site) in enumerate(order, 1):
        turns[site] = (*turns.get(site, ()), 1.0 - number / len(order))
    return turns


# -------------------------------------------------------------------------------------------- anchor, gate, calibration


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class AnchorConfig:
    """The auxiliary scale loss on the residual stream that enters the final norm; acts after k_warmup.

    batch_mean, FakeLN's, has no target to wait for and acts from the first step.
    """

    kind: Literal["none", "fixed_target", "log_target", "mean_log", "batch_mean"] = meaning("which scale loss", "none")
    weight: Annotated[float, Field(ge=0)] = meaning(
        "dimensionless strength: lambda * s_tgt^2 for fixed_target, lambda for the log forms", 1.0
    )
    absolute_weight: Annotated[float | None, Field(ge=0)] = meaning(
        "fixed_target only: lambda itself, instead of weight", None
    )
    spread_weight: Annotated[float, Field(ge=0)] = meaning("batch_mean only: lambda itself", 0.1)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class GateConfig:
    """The one global gate: 1 until step k_warmup, then down to exactly 0 at step k_taper."""

    shape: Literal["cosine", "linear", "sqrt", "step", "sequential", "constant"] = meaning(
        "sequential falls by one n-th per removal, one layer at a time for norm=fake_ln; constant never tapers",
        "cosine",
    )
    k_warmup: NonNegativeInt | None = meaning(
        "last normalized step; null: max(5 % of the run, end of the learning-rate warmup, min(100, 15 % of the run))",
        None,
    )
    k_taper: PositiveInt | None = meaning("first step with gate 0; null: k_taper_share of the run", None)
    k_taper_share: Annotated[float, Field(gt=0, le=1)] = meaning("k_taper as a share of trainer.max_steps", 0.5)
    first_removal: PositiveInt | None = meaning("sequential only: k_warmup where that is null", None)
    gaps: Annotated[tuple[PositiveInt, ...], Field(min_length=3, max_length=3)] | None = meaning(
        "sequential only: steps from one removal to the next of MLP norms, of Q and K, of V, which decides k_taper; "
        "null: evenly until k_taper",
        None,
    )


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class CalibrationConfig:
    """How the per-layer scalar c (and the anchor's target) is estimated at the end of the warmup."""

    kind: Literal["ema", "one_batch", "none"] = meaning("ema over steps, the last step alone, or c = 1", "ema")
    decay: Annotated[float, Field(ge=0, lt=1)] = meaning("EMA decay per optimizer step", 0.99)
    window: PositiveInt | None = meaning(
        "steps before k_warmup that feed the EMA; null: half the warmup, at least 30, at most 1/(1-decay)", None
    )


# ------------------------------------------------------------------------------------------------- dataset, tokenizer


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class ToyDatasetConfig:
    """Stories from the embedded generator: any number, no file, no network."""

    kind: Literal["toy"] = "toy"
    name: str = meaning("label in tables", "toy")
    vocab_size: PositiveInt = meaning("vocabulary that a bpe tokenizer gets on this data set", 2048)
    stories: PositiveInt = meaning("training stories to generate", 20000)
    valid_stories: PositiveInt = meaning("validation stories to generate", 1000)
    seed: NonNegativeInt = meaning("seed of the generator, apart from the run's", 0)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class HubDatasetConfig:
    """A text data set of the Hugging Face hub through the datasets library, or a local copy of it."""

    kind: Literal["hub", "tinystories"] = meaning("'tinystories' is what older configurations call it", "hub")
    name: str = meaning("label in tables", "hub")
    vocab_size: PositiveInt = meaning("vocabulary that a bpe tokenizer gets on this data set", 10000)
    path: str = meaning(
        "hub id, or a local file or folder of .parquet, .jsonl, .jsonl.zst or .txt files, named *train* and *valid*"
    )
    subset: str | None = meaning("the hub's configuration of the data set; null: its only one", None)
    revision: str | None = meaning("hub revision; null: the newest at the first preparation", None)
    streaming: bool = meaning("read the hub's files as a stream instead of downloading all of them first", True)
    field: str = meaning("column that holds the text", "text")
    valid_split: str | None = meaning(
        "the hub's split that validates; null: held_out of train, as with local files of which none is named *valid*",
        "validation",
    )
    held_out: Share = meaning("share of the training documents, chosen by their hash, that validates then", 0.05)
    split_seed: Annotated[int, Field(ge=0, lt=2**64)] = meaning("of the choice of the held-out documents", 0)
    max_stories: PositiveInt | None = meaning("use only the first so many training documents", None)
    max_valid_stories: PositiveInt | None = meaning("use only the first so many validation documents", None)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class TextDatasetConfig:
    """Your own files: .txt with <|endoftext|> separators, .jsonl, .parquet, folders or globs."""

    kind: Literal["text"] = "text"
    name: str = meaning("label in tables", "text")
    vocab_size: PositiveInt = meaning("vocabulary that a bpe tokenizer gets on this data set", 4096)
    train: str | tuple[str, ...] = meaning("file, folder or glob, or a list of them")
    valid: str | tuple[str, ...] | None = meaning(
        "the same for validation; null: held_out of the training documents", None
    )
    held_out: Share = meaning("share of the documents, chosen by their hash, that validates when valid is null", 0.02)
    field: str = meaning("column of .jsonl and .parquet files that holds the text", "text")


PlainDatasetConfig = ToyDatasetConfig | HubDatasetConfig | TextDatasetConfig


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class FilteredDatasetConfig:
    """The sequences of one data set without token ids that never occur in another one's training split."""

    kind: Literal["filtered"] = "filtered"
    name: str = meaning("label in tables", "filtered")
    source: Annotated[PlainDatasetConfig, Field(discriminator="kind")] = meaning("a data set: the sequences")
    reference: Annotated[PlainDatasetConfig, Field(discriminator="kind")] = meaning("a data set: the allowed ids")

    @property
    def vocab_size(self) -> int:
        return self.source.vocab_size


DatasetConfig = PlainDatasetConfig | FilteredDatasetConfig


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class TokenizerConfig:
    """Text to token ids; all of them encode through tiktoken."""

    kind: Literal["bpe", "gpt2", "bytes"] = meaning("bpe is trained on the data set; gpt2 is the stock one", "bpe")
    vocab_size: Annotated[int | None, Field(ge=257)] = meaning("bpe only; null: the data set's vocab_size", None)
    ranks: str | None = meaning(
        "a tiktoken ranks file, or a tokenizer.json of a byte-level BPE, to use instead of training or downloading one",
        None,
    )
    train_bytes: PositiveInt = meaning("bpe only: bytes of text that it is trained on at most", 100_000_000)


# ----------------------------------------------------------------------------------------------------- optim, trainer


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class OptimConfig:
    """AdamW with decay on matrices only; linear warmup, then cosine to min_lr_ratio * lr."""

    lr: Annotated[float | None, Field(gt=0)] = meaning("peak learning rate; null: 0.04 / sqrt(d_model)", None)
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = meaning("final over peak learning rate", 0.1)
    warmup_steps: NonNegativeInt | None = meaning("steps of linear warmup; null: 10 % of the run, at most 200", None)
    decay_steps: PositiveInt | None = meaning("step at which the cosine ends; null: trainer.max_steps", None)
    weight_decay: Annotated[float, Field(ge=0)] = meaning("on matrices only", 0.1)
    beta1: Annotated[float, Field(ge=0, lt=1)] = meaning("AdamW's beta1", 0.9)
    beta2: Annotated[float, Field(ge=0, lt=1)] = meaning("AdamW's beta2", 0.95)
    eps: Annotated[float, Field(gt=0)] = meaning("AdamW's epsilon", 1e-8)
    clip: Annotated[float | None, Field(gt=0)] = meaning("largest gradient norm; null: no clipping", 1.0)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class TrainerConfig:
    """Length, batch, intervals (in optimizer steps) and machine."""

    max_steps: PositiveInt = meaning("optimizer steps", 300)
    batch_size: PositiveInt = meaning("sequences of n_ctx tokens per optimizer step", 8)
    accumulation: PositiveInt = meaning("microbatches that an optimizer step is split into", 1)
    log_interval: PositiveInt = meaning("steps between lines of training metrics", 10)
    dynamics_interval: PositiveInt = meaning("steps between measurements on the probe batch", 20)
    probe_size: PositiveInt = meaning("sequences in the fixed probe batch", 4)
    val_interval: PositiveInt | None = meaning("steps between validations; null: a sixth of the run", None)
    val_tokens: PositiveInt = meaning("validation tokens, always the same ones", 65536)
    val_batch_size: PositiveInt = meaning("sequences per validation forward; does not change the loss", 8)
    save_interval: PositiveInt | None = meaning("steps between checkpoints; null: a sixth of the run", None)
    keep_last: PositiveInt = meaning("checkpoints to keep, beside the best of those that were validated", 2)
    samples: NonNegativeInt = meaning("stories to print at the end", 3)
    sample_tokens: PositiveInt = meaning("tokens per sample at most", 120)
    compile: bool = meaning("torch.compile the training step, one graph per phase", False)
    device: Annotated[str, Field(pattern=DEVICE_PATTERN)] = meaning("auto, cpu, cuda, cuda:1, mps", "auto")
    dtype: Literal["auto", "float32", "bfloat16"] = meaning("bfloat16 means autocast; auto: where it is faster", "auto")
    progress: Literal["auto", "bar", "lines", "none"] = meaning("auto: a bar on a terminal, lines elsewhere", "auto")


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class TrackingConfig:
    """metrics.jsonl is always written; Weights & Biases mirrors it."""

    wandb: Literal["auto", "online", "offline", "disabled"] = meaning(
        "auto: online with an API key, else offline", "auto"
    )
    project: str = meaning("W&B project", "tapernorm")
    entity: str | None = meaning("W&B user or team", None)
    group: str | None = meaning("W&B group; null: the sweep's name in a sweep", None)
    tags: tuple[str, ...] = meaning("W&B tags", ())
    strict: bool = meaning("stop instead of going on offline when W&B cannot be reached", False)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class SweepConfig:
    """What `--multirun` does beyond running its jobs."""

    name: str | None = meaning(
        "directory of the sweep under runs_dir/sweeps; null: a hash of the swept overrides", None
    )
    fail_fast: bool = meaning("start no further job once one has failed", False)
    dry_run: bool = meaning("list the jobs and their states, and start nothing", False)


# ---------------------------------------------------------------------------------------------------------------- root


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class Config:
    """Everything that determines a run."""

    model: ModelConfig = ModelConfig()
    norm: Annotated[AnyNormConfig, Field(discriminator="kind")] = TaperNormConfig()
    anchor: AnchorConfig = AnchorConfig()
    gate: GateConfig = GateConfig()
    calibration: CalibrationConfig = CalibrationConfig()
    dataset: Annotated[DatasetConfig, Field(discriminator="kind")] = ToyDatasetConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    optim: OptimConfig = OptimConfig()
    trainer: TrainerConfig = TrainerConfig()
    tracking: TrackingConfig = TrackingConfig()
    sweep: SweepConfig = SweepConfig()
    seed: NonNegativeInt = meaning("of initialization and batch order", 0)
    name: str | None = meaning("label in the run's directory name; null: model, norm, anchor and seed", None)
    runs_dir: str = meaning("where run directories are made", "runs")
    run_dir: str | None = meaning("this run's own directory; null: a new one under runs_dir", None)
    cache_dir: str | None = meaning("prepared data and tokenizers; null: $TAPERNORM_CACHE or ~/.cache/tapernorm", None)
    resume: str | None = meaning("'auto', or the directory of a run or checkpoint to go on from", None)
    report: bool = meaning("write report.html at the end, of the run and of its sweep", True)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class EvaluateConfig:
    """What evaluate.py can be told; everything else comes from the checkpoint."""

    checkpoint: str | tuple[str, ...] = meaning(
        "directory of a run (its newest checkpoint), of one checkpoint or of a sweep, a pattern, GPT-2 or Llama in "
        "Hugging Face form (directory or hub id), or a list of them"
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
    samples: NonNegativeInt | None = meaning("stories to print; null: 3, or none when checkpoints are compared", None)
    sample_tokens: PositiveInt = meaning("tokens per sample at most", 120)
    prompt: str = meaning("text that the samples continue", "")
    temperature: Annotated[float, Field(ge=0)] = meaning("of sampling; 0 is greedy", 0.8)
    seed: NonNegativeInt = meaning("of sampling", 0)
    device: Annotated[str, Field(pattern=DEVICE_PATTERN)] = meaning("auto, cpu, cuda, cuda:1, mps", "auto")
    progress: Literal["auto", "bar", "lines", "none"] = meaning("auto: a bar on a terminal, lines elsewhere", "auto")
    cache_dir: str | None = meaning("prepared data; null: $TAPERNORM_CACHE or ~/.cache/tapernorm", None)
    fold: bool = meaning("evaluate the folded model too, and certify that it computes the same", False)
    fold_gains: bool = meaning(
        "fold the gains of the norms that stay, too, which unties a tied head if the final norm stays", True
    )
    save_folded: str | None = meaning("new directory for the folded model as a checkpoint; implies fold", None)
    out: str | None = meaning(
        "where to write the result as JSON; null: evaluation.json in the run, or comparison.json above several", None
    )


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class GenerateConfig:
    """What scripts/generate.py can be told; everything else comes from the checkpoint."""

    checkpoint: str = meaning("directory of a run (its newest checkpoint) or of one checkpoint")
    prompt: str = meaning("text that the samples continue", "")
    samples: PositiveInt = meaning("continuations to print", 1)
    max_tokens: PositiveInt = meaning("tokens per continuation at most", 200)
    temperature: Annotated[float, Field(ge=0)] = meaning("of sampling; 0 is greedy", 0.8)
    top_k: PositiveInt | None = meaning("draw among the so many most probable tokens; null: all", None)
    top_p: Annotated[float | None, Field(gt=0, le=1)] = meaning(
        "draw among the fewest most probable tokens that hold this share; null: all", None
    )
    seed: NonNegativeInt = meaning("of sampling", 0)
    device: Annotated[str, Field(pattern=DEVICE_PATTERN)] = meaning("auto, cpu, cuda, cuda:1, mps", "auto")
    stream: bool = meaning("print text as it is produced", True)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class ExportConfig:
    """What scripts/export_hf.py can be told; everything else comes from the checkpoint."""

    checkpoint: str = meaning("directory of a run (its newest checkpoint) or of one checkpoint")
    out: str = meaning("new directory for the model in Hugging Face form")
    format: Literal["auto", "tapernorm", "gpt2", "llama"] = meaning(
        "tapernorm: norm-free, with its own code; gpt2, llama: the stock layout; auto: the stock one for a baseline",
        "auto",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = meaning("of the weights", "float32")
    fold_gains: bool = meaning("tapernorm: fold the gains of the norms that stay, too, which may untie the head", False)
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
    minutes: Annotated[float | None, Field(gt=0)] = meaning("start no further case after so long; null: no limit", None)
    seed: NonNegativeInt = meaning("of weights, prompts and order", 0)
    threads: PositiveInt | None = meaning("CPU threads; null: torch's choice", None)
    device: Annotated[str, Field(pattern=DEVICE_PATTERN)] = meaning("auto, cpu, cuda, cuda:1, mps", "auto")
    out: str | None = meaning(
        "where to write the result as JSON, with the table beside it as .md; null: a new file in runs/benchmarks", None
    )


def build(tree: Mapping[str, Any]) -> Config:
    """Check a plain nested mapping against the training schema and return the frozen configuration.

    Raises ConfigError, one line, as `validate` does, and for values that contradict each other.
    """
    config = validate(tree, Config)
    _check_relations(config)
    return config


def validate(tree: Mapping[str, Any], schema: type[Schema]) -> Schema:
    """Check a plain nested mapping against a dataclass of this module and return its frozen instance.

    Raises ConfigError, one line: unknown keys with the nearest valid one, wrong types and ranges, missing values
    (`???`), and 'None' where null was meant. Every fault is reported, joined by '; '.
    """
    faults = [fault for key, value in leaves(tree) if (fault := _string_fault(key, value))]
    if faults:
        raise ConfigError("; ".join(faults))
    try:
        # JSON is the strict mode that still takes lists for tuples and mappings for dataclasses.
        return TypeAdapter(schema).validate_json(json.dumps(tree))
    except (TypeError, ValueError) as error:
        if not isinstance(error, ValidationError):
            raise ConfigError(f"the configuration holds a value that is no plain data: {error}") from None
        # Of a list whose items are wrong, pydantic says that it is too short as well.
        wrong = {item["loc"][:-1] for item in error.errors()}
        told = [item for item in error.errors() if item["type"] != "too_short" or item["loc"] not in wrong]
        lines = [_explain(item, tree, schema) for item in told]
        raise ConfigError("; ".join(dict.fromkeys(lines))) from None


def to_dict(config: Any) -> dict[str, Any]:
    """A plain nested dict (lists, numbers, strings) of a configuration dataclass; `build` reads it back."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def write_yaml(path: Path, data: Any) -> None:
    """Plain data as YAML, keys in their order; the directory is made if it is missing."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), encoding="utf-8")


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ('optim.lr', value) for every leaf of a nested mapping; lists count as leaves."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _string_fault(key: str, value: Any) -> str | None:
    if value == "???":
        return f"{key} is missing: give it a value, as in {key}=..."
    if value in ("None", "NULL"):
        return f"{key}='{value}' is a string; write {key}=null"
    return None


def _explain(item: Any, tree: Mapping[str, Any], schema: type) -> str:
    """One pydantic error as 'key=value: what is wrong'."""
    path = [str(part) for part in item["loc"]]
    node: Any = tree
    keys = []
    for part in path:  # pydantic adds the tags of unions to the path; the tree does not have them
        if isinstance(node, Mapping) and part in node:
            keys.append(part)
            node = node[part]
        elif isinstance(node, list) and part.isdigit():
            keys[-1] += f"[{part}]"
            node = node[int(part)]
    key = ".".join(keys)
    match item["type"]:
        case "unexpected_keyword_argument":
            section = ".".join(keys[:-1])
            valid = [name for name, _ in fields_of(section, tree, schema)]
            return unknown_key(key, [f"{section}.{name}" if section else name for name in valid])
        case "missing":
            full = ".".join([*keys, path[-1]])
            return f"{full} is missing: give it a value, as in {full}=..."
        case "union_tag_not_found":
            return f"{key}.kind is missing: choose a {key} group, as in {key}=<name>"
        case "union_tag_invalid":
            return f"{key}.kind={node.get('kind')!r}: choose one of {item['ctx']['expected_tags']}"
        case "too_short" | "too_long":
            return f"{key}={node!r}: should have {item['ctx'].get('min_length') or item['ctx']['max_length']} items"
        case "tuple_type":
            return f"{key}={node!r}: should be a list, as in {key}=[{node}]"
        case "string_pattern_mismatch":
            section = ".".join(keys[:-1])
            choices = dict(fields_of(section, tree, schema))[keys[-1]]
            return f"{key}={node!r}: should be one of {choices}"
    shown = "null" if node is None else repr(node)
    return f"{key}={shown}: {item['msg'][0].lower()}{item['msg'][1:]}"


# What other projects call our keys.
ALIASES = {
    "learning_rate": "optim.lr",
    "n_embd": "model.d_model",
    "hidden_size": "model.d_model",
    "n_layers": "model.n_layer",
    "block_size": "model.n_ctx",
    "max_iters": "trainer.max_steps",
    "epochs": "trainer.max_steps",
}


def unknown_key(key: str, valid: list[str]) -> str:
    """'unknown key ...' with the nearest of the valid keys, or with the keys that its section has."""
    section, _, last = key.rpartition(".")
    same_section = [name for name in valid if name.rpartition(".")[0] == section]
    by_last = {alias: name for alias, name in ALIASES.items() if name in valid}
    by_last.update({name.rpartition(".")[2]: name for name in [*valid, *same_section]})  # the same section wins
    near = difflib.get_close_matches(last, by_last, n=1, cutoff=0.6)
    if near:
        return f"unknown key '{key}'; did you mean '{by_last[near[0]]}'?"
    listed = ", ".join(name.rpartition(".")[2] for name in same_section)
    return f"unknown key '{key}'; " + (f"{section or 'the top level'} has {listed}" if listed else "see --help")


def fields_of(section: str, tree: Mapping[str, Any] | None = None, schema: type = Config) -> list[tuple[str, str]]:
    """(field, meaning) of a section such as 'optim' ('' for the root); a union is decided by the tree's `kind`."""
    return [(name, text) for name, text, _ in _fields(class_of(section, tree, schema))]


def all_keys(schema: type = Config, prefix: str = "") -> list[tuple[str, str]]:
    """(dotted key, meaning) of every leaf of the schema, all variants of the unions included."""
    found: dict[str, str] = {}
    for name, text, kinds in _fields(schema):
        for kind in kinds:
            found.update(all_keys(kind, f"{prefix}{name}."))
        if not kinds:
            found[f"{prefix}{name}"] = text
    return list(found.items())


def _fields(cls: Any) -> list[tuple[str, str, list[type]]]:
    """(field, meaning, dataclasses that it may hold) of a dataclass of this module."""
    hints = typing.get_type_hints(cls)
    return [
        (
            name,
            info.description or "",
            [kind for kind in _members(hints[name]) if hasattr(kind, "__dataclass_fields__")],
        )
        for name, info in cls.__pydantic_fields__.items()
    ]


def _members(hint: Any) -> list[type]:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return list(typing.get_args(hint))
    return [hint]


def class_of(section: str, tree: Mapping[str, Any] | None = None, schema: type = Config) -> type:
    """The dataclass of a section such as 'optim' or 'dataset.source'; a union is decided by the tree's `kind`."""
    cls = schema
    node: Any = tree
    kinds: list[type] = []
    for part in filter(None, section.split(".")):
        node = node.get(part) if isinstance(node, Mapping) else None
        if part == "suite":  # data sets by name: the next part is one
            kinds = _members(DatasetConfig)
            continue
        kinds = kinds or {name: members for name, _, members in _fields(cls)}[part]
        wanted = node.get("kind") if isinstance(node, Mapping) else None
        cls = next((kind for kind in kinds if wanted in _tags(kind)), kinds[0])
        kinds = []
    return cls


def _tags(cls: Any) -> tuple[str, ...]:
    """The values of `kind` that mean this dataclass."""
    field = cls.__pydantic_fields__.get("kind")
    return typing.get_args(field.annotation) if field else ()


# ------------------------------------------------------------------------------------------------- relations, resolve


def _check_relations(config: Config) -> None:
    """Ranges that involve more than one key."""
    model, trainer, gate = config.model, config.trainer, config.gate
    norm = config.norm.source if config.norm.kind == "folded" else config.norm
    if model.d_model % model.head_dim:
        raise ConfigError(f"model.d_model={model.d_model} is not a multiple of model.head_dim={model.head_dim}")
    if model.positions == "rotary" and model.head_dim % 2:
        raise ConfigError(f"model.head_dim={model.head_dim}: rotary embeddings need an even width")
    if trainer.batch_size % trainer.accumulation:
        raise ConfigError(
            f"trainer.batch_size={trainer.batch_size} is not a multiple of trainer.accumulation={trainer.accumulation}"
        )
    select_sites(norm.sites, model.n_layer)
    if norm.kind != "standard" and not norm.sites:
        raise ConfigError("norm.sites=[] selects no norm; use norm=baseline for a model without tapered norms")
    if trainer.val_tokens < model.n_ctx:
        raise ConfigError(
            f"trainer.val_tokens={trainer.val_tokens} is less than one context, model.n_ctx={model.n_ctx}"
        )
    horizons = resolve_horizons(config)
    k_warmup, k_taper = horizons["k_warmup"], horizons["k_taper"]
    tapers = norm.kind in GATED and gate.shape != "constant"
    if gate.shape == "step":
        k_taper = k_warmup + 1
    if tapers and not k_warmup < k_taper <= trainer.max_steps:
        how = "; gate.first_removal is k_warmup" if gate.k_warmup is None and gate.shape == "sequential" else ""
        if gate.k_taper is None and removal_waits(config):
            how += f"; gate.gaps={list(gate.gaps or ())} put the last removal at step {k_taper}"
        raise ConfigError(
            f"gate.k_warmup={k_warmup} < gate.k_taper={k_taper} <= trainer.max_steps={trainer.max_steps} must hold{how}"
        )
    if tapers and (waits := removal_waits(config)) and k_taper != k_warmup + 1 + sum(waits):
        raise ConfigError(
            f"gate.k_taper={k_taper}: gate.gaps={list(gate.gaps or ())} reaches the last removal at step "
            f"{k_warmup + 1 + sum(waits)}; leave one of the two out"
        )
    if k_warmup > trainer.max_steps:
        raise ConfigError(f"gate.k_warmup={k_warmup} lies beyond trainer.max_steps={trainer.max_steps}")
    if k_warmup == 0 and ((tapers and config.calibration.kind != "none") or config.anchor.kind != "none"):
        raise ConfigError(
            "gate.k_warmup=0 leaves no step to calibrate on; use at least 1, or calibration=none anchor=none"
        )
    if config.anchor.absolute_weight is not None and config.anchor.kind != "fixed_target":
        raise ConfigError(
            f"anchor.absolute_weight is for anchor=fixed_target; anchor={config.anchor.kind} has anchor.weight"
        )


def removal_waits(config: Config) -> list[int]:
    """Steps from each removal to the next one where `gate.gaps` decides them, else nothing."""
    gaps = config.gate.gaps
    if config.gate.shape != "sequential" or gaps is None or config.norm.kind not in GATED:
        return []
    stages = [stage for stage, _ in removal_order(config.norm.sites, config.model.n_layer)]
    return [gaps[STAGES.index(stage)] for stage in stages[:-1]]


def resolve_horizons(config: Config) -> dict[str, int]:
    """Steps that derive from the length of the run (method: gate schedule, statistics window)."""
    steps = config.trainer.max_steps
    optim, gate, calibration = config.optim, config.gate, config.calibration
    lr_warmup = min(200, math.ceil(0.1 * steps)) if optim.warmup_steps is None else optim.warmup_steps
    k_warmup = gate.k_warmup
    if k_warmup is None and gate.shape == "sequential":
        k_warmup = gate.first_removal
    if k_warmup is None:
        k_warmup = max(math.ceil(0.05 * steps), lr_warmup, min(100, math.floor(0.15 * steps)), 1)
        k_warmup = min(k_warmup, max(1, steps - 1))  # a trial of two steps has a taper, too
    k_taper = gate.k_taper
    if k_taper is None and (waits := removal_waits(config)):
        k_taper = k_warmup + 1 + sum(waits)
    if k_taper is None:
        k_taper = max(round(gate.k_taper_share * steps), k_warmup + 1)
    window = calibration.window
    if window is None:
        memory = math.ceil(1 / (1 - calibration.decay) - 1e-9)
        window = min(max(30, math.ceil(k_warmup / 2)), max(memory, 30))
    return {
        "warmup_steps": lr_warmup,
        "decay_steps": optim.decay_steps or steps,
        "k_warmup": k_warmup,
        "k_taper": k_taper,
        "window": min(window, max(k_warmup, 1)),
    }


def resolve(config: Config, vocab_size: int | None = None) -> Config:
    """Fill in every value that derives from others. Pure, idempotent; resuming uses the saved, resolved values.

    `vocab_size` is the tokenizer's, known once the data is prepared. Raises ConfigError if model.vocab_size differs.
    """
    model, trainer = config.model, config.trainer
    horizons = resolve_horizons(config)
    if vocab_size is not None and model.vocab_size not in (None, vocab_size):
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} differs from the tokenizer's {vocab_size}; use null, or its tokenizer"
        )
    sixth = max(1, math.ceil(trainer.max_steps / 6))
    replace = dataclasses.replace
    return replace(
        config,
        model=replace(
            model,
            d_ff=model.d_ff or (4 * model.d_model if model.mlp == "gelu" else 8 * math.ceil(model.d_model * 8 / 3 / 8)),
            norm_eps=model.norm_eps or {"rms": 1e-6, "layer": 1e-5}[model.norm_family],
            vocab_size=model.vocab_size or vocab_size,
        ),
        gate=replace(config.gate, k_warmup=horizons["k_warmup"], k_taper=horizons["k_taper"]),
        calibration=replace(config.calibration, window=horizons["window"]),
        tokenizer=replace(
            config.tokenizer,
            vocab_size=(config.tokenizer.vocab_size or max(257, config.dataset.vocab_size))
            if config.tokenizer.kind == "bpe"
            else config.tokenizer.vocab_size,
        ),
        optim=replace(
            config.optim,
            lr=config.optim.lr or 0.04 / math.sqrt(model.d_model),
            warmup_steps=horizons["warmup_steps"],
            decay_steps=horizons["decay_steps"],
        ),
        trainer=replace(
            trainer,
            val_interval=trainer.val_interval or sixth,
            save_interval=trainer.save_interval or sixth,
        ),
    )
