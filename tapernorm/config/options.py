"""The training configuration: every key with its type, default, range and one-line meaning.

Hydra composes YAML groups and the command line into a tree; `build` checks that tree against the dataclasses below
and returns a frozen `Config`, after which OmegaConf is behind us. `resolve` computes every value that derives from
others, once. What the other entry points can be told is in commands.py. Nothing here imports torch, so a wrong key is
reported before anything slow happens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from tapernorm.config.schema import (
    DEVICE_PATTERN,
    SCHEMA,
    ConfigError,
    NonNegativeInt,
    PositiveInt,
    Seed,
    Share,
    meaning,
    validate,
)
from tapernorm.config.sites import STAGES, removal_order, select_sites

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
    embed_std: Annotated[float | None, Field(gt=0)] = meaning("the same of the token embedding; null: init_std", None)

    @property
    def n_head(self) -> int:
        return self.d_model // self.head_dim


# ---------------------------------------------------------------------------------------------------------------- norm

SITES_MEANING = (
    "which norms: 'attn', 'mlp' (in every block), 'final', or with block numbers: '0.attn', '2-5.mlp', "
    "'1-.attn' (to the last block); the others stay standard"
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
    """What folding leaves of a trained model's norms: written by tapernorm.model.fold, no choice for training."""

    kind: Literal["folded"] = "folded"
    name: str = meaning("label in tables and directory names", "folded")
    source: Annotated[NormConfig, Field(discriminator="kind")] = meaning("the norm that the model was trained with")
    gains: bool = meaning("standard norms are folded too: their statistic stays, without a gain", True)
    table: bool = meaning("0.attn's norm is a table by token id", False)

    @property
    def sites(self) -> tuple[str, ...]:
        return self.source.sites


AnyNormConfig = NormConfig | FoldedNormConfig


# -------------------------------------------------------------------------------------------- anchor, gate, calibration


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class AnchorConfig:
    """The auxiliary scale loss on the residual stream that enters the final norm; acts after k_warmup.

    batch_mean, FakeLN's, has no target to wait for and acts from the first step.
    """

    kind: Literal["none", "fixed_target", "log_target", "mean_log", "batch_mean", "z_loss"] = meaning(
        "which scale loss", "none"
    )
    weight: Annotated[float, Field(ge=0)] = meaning(
        "dimensionless strength: lambda * s_tgt^2 for fixed_target, lambda for the log forms", 1.0
    )
    absolute_weight: Annotated[float | None, Field(ge=0)] = meaning(
        "fixed_target only: lambda itself, instead of weight", None
    )
    spread_weight: Annotated[float, Field(ge=0)] = meaning("batch_mean only: lambda itself", 0.1)
    z_weight: Annotated[float, Field(ge=0)] = meaning("z_loss only: lambda itself", 1e-4)


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
    """How the per-layer scalar c is chosen, and the level of the residual stream that it is chosen for."""

    kind: Literal["tracked", "ema", "one_batch", "none"] = meaning(
        "tracked follows the stream until the gate has closed; ema and one_batch end at k_warmup; none is c = 1",
        "tracked",
    )
    fit: Literal["least_squares", "inverse_mean", "log"] | None = meaning(
        "what c stands in for 1/r by; null: log for tracked, else least_squares, as published", None
    )
    decay: Annotated[float | None, Field(ge=0, lt=1)] = meaning(
        "EMA decay per optimizer step; null: 0.5 for tracked, else 0.99", None
    )
    window: PositiveInt | None = meaning(
        "ema and fake_ln: steps before k_warmup that feed it; null: half the warmup, at least 30, at most 1/(1-decay)",
        None,
    )
    level: Annotated[float | None, Field(gt=0)] = meaning(
        "scale of the residual stream before the final norm that it is brought to at k_warmup, the function unchanged; "
        "null: as it is",
        None,
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
    seed: Seed = meaning("seed of the generator, apart from the run's", 0)


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
class MultipliersConfig:
    """Per role of a parameter: its learning rate times m, its weight decay over m."""

    embed: Annotated[float | None, Field(gt=0)] = meaning(
        "embeddings, a tied head with them; null: 1, or share^-0.75 where optim.lr is null", None
    )
    writers: Annotated[float | None, Field(gt=0)] = meaning(
        "projections that write to the residual stream; null: 1, or share where optim.lr is null", None
    )
    readers: Annotated[float | None, Field(gt=0)] = meaning(
        "projections that read it, an untied head among them; null: as writers", None
    )
    gains: Annotated[float, Field(gt=0)] = meaning("gains and biases of the norms in the blocks", 1.0)
    final_gain: Annotated[float, Field(gt=0)] = meaning("gain and bias of the final norm", 1.0)
    after_step: NonNegativeInt = meaning("last step that they leave alone", 0)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class OptimConfig:
    """AdamW with decay on matrices only; linear warmup, then cosine to min_lr_ratio * lr."""

    lr: Annotated[float | None, Field(gt=0)] = meaning(
        "peak learning rate; null: 0.04 / sqrt(d_model), times the root of share = max_steps / 300 in a shorter run",
        None,
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = meaning("final over peak learning rate", 0.1)
    warmup_steps: NonNegativeInt | None = meaning("steps of linear warmup; null: 10 % of the run, at most 200", None)
    decay_steps: PositiveInt | None = meaning("step at which the cosine ends; null: trainer.max_steps", None)
    weight_decay: Annotated[float, Field(ge=0)] = meaning("on matrices only", 0.1)
    beta1: Annotated[float, Field(ge=0, lt=1)] = meaning("AdamW's beta1", 0.9)
    beta2: Annotated[float, Field(ge=0, lt=1)] = meaning("AdamW's beta2", 0.95)
    eps: Annotated[float, Field(gt=0)] = meaning("AdamW's epsilon", 1e-8)
    clip: Annotated[float | None, Field(gt=0)] = meaning("largest gradient norm; null: no clipping", 1.0)
    multipliers: MultipliersConfig = MultipliersConfig()


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
    parallel: Literal["ddp", "fsdp"] = meaning(
        "under torchrun: every process holds the whole model, or a share of its matrices and their moments", "ddp"
    )
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
    swept: tuple[str, ...] = meaning("the keys that the jobs differ in, which name them; set by the sweep itself", ())


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
    seed: Seed = meaning("of initialization and batch order", 0)
    name: str | None = meaning("label in the run's directory name; null: model, norm, anchor and seed", None)
    runs_dir: str = meaning("where run directories are made", "runs")
    run_dir: str | None = meaning("this run's own directory; null: a new one under runs_dir", None)
    cache_dir: str | None = meaning("prepared data and tokenizers; null: $TAPERNORM_CACHE or ~/.cache/tapernorm", None)
    resume: str | None = meaning("'auto', or the directory of a run or checkpoint to go on from", None)
    report: bool = meaning("write report.html at the end, of the run and of its sweep", True)


def build(tree: Mapping[str, Any]) -> Config:
    """Check a plain nested mapping against the training schema and return the frozen configuration.

    Raises ConfigError, one line, as `validate` does, and for values that contradict each other.
    """
    config = validate(tree, Config)
    _check_relations(config)
    return config


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
    needs_target = config.anchor.kind not in ("none", "batch_mean")
    if k_warmup == 0 and ((tapers and config.calibration.kind != "none") or needs_target):
        raise ConfigError(
            "gate.k_warmup=0 leaves no step to calibrate on; use at least 1, or calibration=none anchor=none"
        )
    if config.anchor.absolute_weight is not None and config.anchor.kind != "fixed_target":
        own = "spread_weight" if config.anchor.kind == "batch_mean" else "weight"
        raise ConfigError(
            f"anchor.absolute_weight is for anchor=fixed_target; anchor={config.anchor.kind} has anchor.{own}"
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
        memory = math.ceil(1 / (1 - _decay(calibration)) - 1e-9)
        window = min(max(30, math.ceil(k_warmup / 2)), max(memory, 30))
    return {
        "warmup_steps": lr_warmup,
        "decay_steps": optim.decay_steps or steps,
        "k_warmup": k_warmup,
        "k_taper": k_taper,
        "window": min(window, max(k_warmup, 1)),
    }


def _decay(calibration: CalibrationConfig) -> float:
    return {"tracked": 0.5}.get(calibration.kind, 0.99) if calibration.decay is None else calibration.decay


def resolve(config: Config, vocab_size: int | None = None) -> Config:
    """Fill in every value that derives from others. Pure, idempotent; resuming uses the saved, resolved values.

    `vocab_size` is the tokenizer's, known once the data is prepared. Raises ConfigError if model.vocab_size differs.
    """
    model, trainer, multipliers = config.model, config.trainer, config.optim.multipliers
    horizons = resolve_horizons(config)
    # In a short run the gate closes while a step is a large part of a matrix: see docs/log.md.
    share = 1.0 if config.optim.lr else min(1.0, trainer.max_steps / 300)
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
        calibration=replace(
            config.calibration,
            window=horizons["window"],
            decay=_decay(config.calibration),
            fit=config.calibration.fit or ("log" if config.calibration.kind == "tracked" else "least_squares"),
        ),
        tokenizer=replace(
            config.tokenizer,
            vocab_size=(config.tokenizer.vocab_size or max(257, config.dataset.vocab_size))
            if config.tokenizer.kind == "bpe"
            else config.tokenizer.vocab_size,
        ),
        optim=replace(
            config.optim,
            lr=config.optim.lr or math.sqrt(share) * 0.04 / math.sqrt(model.d_model),
            multipliers=replace(
                multipliers,
                embed=multipliers.embed or share**-0.75,
                writers=multipliers.writers or share,
                readers=multipliers.readers or share,
            ),
            warmup_steps=horizons["warmup_steps"],
            decay_steps=horizons["decay_steps"],
        ),
        trainer=replace(
            trainer,
            val_interval=trainer.val_interval or sixth,
            save_interval=trainer.save_interval or sixth,
        ),
    )
