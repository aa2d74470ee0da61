"""The training configuration: every key with its type, default, range and one-line meaning.

Hydra composes YAML groups and the command line into a tree, of which resolve.build makes a frozen `Config`. What the
other programs can be told is in programs.py.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from tapernorm.config.schema import (
    DEVICES,
    SCHEMA,
    Decay,
    Device,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Seed,
    Share,
    meaning,
)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class ModelConfig:
    """A pre-norm decoder. The defaults are Llama's block (RoPE, SwiGLU, RMSNorm, no biases); GPT-2 is model=gpt2."""

    name: str = meaning("label of the size in tables and directory names", "custom")
    n_layer: Annotated[PositiveInt, Field(le=4096)] = meaning("number of blocks", 8)
    n_ctx: Annotated[PositiveInt, Field(le=1 << 22)] = meaning("context length in tokens", 512)
    d_model: PositiveInt = meaning("width of the residual stream", 64)
    head_dim: PositiveInt = meaning("width of one attention head; d_model must be a multiple of it", 32)
    d_ff: PositiveInt | None = meaning(
        "hidden width of the MLP; null: 8/3 d_model rounded up to a multiple of 8 for swiglu, 4 d_model for gelu", None
    )
    vocab_size: PositiveInt | None = meaning("null: the tokenizer's; a number must equal it", None)
    tied: bool = meaning("the head shares the embedding's matrix", True)
    positions: Literal["rotary", "learned"] = meaning("rotary turns queries and keys; learned adds a table", "rotary")
    rope_theta: Positive = meaning("rotary only: base of the frequencies", 10000.0)
    mlp: Literal["swiglu", "gelu"] = meaning("down(silu(gate) * up), or GPT-2's down(gelu(up)), tanh form", "swiglu")
    biases: bool = meaning("a bias in every projection of the blocks", False)
    dropout: Decay = meaning("of embeddings, attention and both residual branches", 0.0)
    norm_family: Literal["rms", "layer"] = meaning("what is tapered: RMSNorm or LayerNorm", "rms")
    norm_eps: Positive | None = meaning("null: 1e-6 for rms, 1e-5 for layer", None)
    init: str = meaning(
        "'random', or what to start from: a run, a checkpoint, or GPT-2 or Llama in Hugging Face form or by hub id",
        "random",
    )
    init_std: Positive = meaning("standard deviation of the initial matrices", 0.02)
    embed_std: Positive | None = meaning("the same of the token embedding; null: init_std", None)

    @property
    def n_head(self) -> int:
        return self.d_model // self.head_dim


SITES_MEANING = (
    "which norms: 'attn', 'mlp' (in every block), 'final', or with block numbers: '0.attn', '2-5.mlp', "
    "'1-.attn' (to the last block); the others stay standard"
)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class StandardNormConfig:
    """RMSNorm or LayerNorm everywhere: the baseline."""

    kind: Literal["standard"] = "standard"
    name: str = meaning("label in tables and directory names", "baseline")
    sites: ClassVar[tuple[str, ...]] = ()


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
    alpha: Positive = meaning("initial alpha", 0.5)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class DerfConfig:
    """Comparator: gamma * erf(alpha * h + s) + beta."""

    kind: Literal["derf"] = "derf"
    name: str = meaning("label in tables and directory names", "derf")
    sites: tuple[str, ...] = meaning(SITES_MEANING, ("attn", "mlp", "final"))
    alpha: Positive = meaning("initial alpha", 0.5)
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


HOLDING = ("fixed_target", "log_target", "mean_log")  # the anchors that hold the scale at a level


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class AnchorConfig:
    """The auxiliary scale loss on the residual stream that enters the final norm; acts after k_warmup.

    batch_mean, FakeLN's, has no target to wait for and acts from the first step.
    """

    kind: Literal["none", "fixed_target", "log_target", "mean_log", "batch_mean", "z_loss"] = "none"
    weight: NonNegative = meaning("lambda * s_tgt^2 for fixed_target, lambda for the log forms: dimensionless", 1.0)
    absolute_weight: NonNegative | None = meaning("fixed_target only: lambda itself, instead of weight", None)
    spread_weight: NonNegative = meaning("batch_mean only: lambda itself", 0.1)
    z_weight: NonNegative = meaning("z_loss only: lambda itself", 1e-4)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class GateConfig:
    """The one global gate: 1 until step k_warmup, then down to exactly 0 at step k_taper."""

    shape: Literal["cosine", "linear", "sqrt", "step", "sequential", "constant"] = meaning(
        "sequential falls by one n-th per removal, one layer at a time for norm=fake_ln; constant never tapers",
        "cosine",
    )
    k_warmup: NonNegativeInt | None = meaning(
        "last normalized step; null: the largest of 5 % of the run, optim.warmup_steps, min(100, 15 % of the run)", None
    )
    k_taper: PositiveInt | None = meaning("first step with gate 0; null: k_taper_share of the run", None)
    k_taper_share: Fraction = meaning("k_taper as a share of trainer.max_steps", 0.5)
    first_removal: PositiveInt | None = meaning("sequential only: k_warmup where that is null", None)
    gaps: Annotated[tuple[PositiveInt, ...], Field(min_length=3, max_length=3)] | None = meaning(
        "sequential only: steps between removals of MLP norms, of Q and K, of V; null: evenly until k_taper", None
    )


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class CalibrationConfig:
    """How the per-layer scalar c is chosen, and the level of the residual stream that it is chosen for."""

    kind: Literal["tracked", "ema", "one_batch", "none"] = meaning(
        "tracked follows the stream until the gate is 0; ema and one_batch end at k_warmup; none is c = 1", "tracked"
    )
    fit: Literal["least_squares", "inverse_mean", "log"] | None = meaning(
        "what c stands in for 1/r by; null: log for tracked, else least_squares, as published", None
    )
    decay: Decay | None = meaning("EMA decay per optimizer step; null: 0.5 for tracked, else 0.99", None)
    window: PositiveInt | None = meaning(
        "ema and fake_ln: steps before k_warmup that feed it; null: half the warmup, from 30 to 1/(1-decay)", None
    )
    level: Positive | None = meaning(
        "scale before the final norm that the stream gets at k_warmup, the function unchanged; null: its own", None
    )
    hold: bool = meaning("bring the stream back to that level until the gate has closed, as often", True)


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
        "hub id, or a local file or folder of .parquet, .jsonl, .csv or .txt files, named *train* and *valid*"
    )
    subset: str | None = meaning("the hub's configuration of the data set; null: its only one", None)
    revision: str | None = meaning("hub revision; null: the newest at the first preparation", None)
    streaming: bool = meaning("read the hub's files as a stream instead of downloading all of them first", True)
    field: str = meaning("column that holds the text", "text")
    valid_split: str | None = meaning(
        "split that validates; null: held_out of train, as for local files of which none is *valid*", "validation"
    )
    held_out: Share = meaning("share of the training documents, chosen by their hash, that validates then", 0.05)
    split_seed: Annotated[int, Field(ge=0, lt=2**64)] = meaning("of the choice of the held-out documents", 0)
    max_stories: PositiveInt | None = meaning("use only the first so many training documents", None)
    max_valid_stories: PositiveInt | None = meaning("use only the first so many validation documents", None)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class TextDatasetConfig:
    """Your own files: .txt with <|endoftext|> between documents, .jsonl, .csv, .parquet, packed or not; folders."""

    kind: Literal["text"] = "text"
    name: str = meaning("label in tables", "text")
    vocab_size: PositiveInt = meaning("vocabulary that a bpe tokenizer gets on this data set", 4096)
    train: str | tuple[str, ...] = meaning("file, folder or glob, or a list of them")
    valid: str | tuple[str, ...] | None = meaning("the same for validation; null: held_out of train", None)
    held_out: Share = meaning("share of the documents, chosen by their hash, that validates when valid is null", 0.02)
    field: str = meaning("column of .jsonl, .csv and .parquet files that holds the text", "text")


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
        "a tiktoken ranks file or a byte-level BPE's tokenizer.json, instead of training or downloading one", None
    )
    train_bytes: PositiveInt = meaning("bpe only: bytes of text that it is trained on at most", 100_000_000)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class MultipliersConfig:
    """Per role of a parameter: its learning rate times m, its weight decay over m."""

    embed: Positive | None = meaning("embeddings, a tied head with them; null: 1, or optim.lr's share^-0.75", None)
    writers: Positive | None = meaning("projections into the residual stream; null: 1, or optim.lr's share", None)
    readers: Positive | None = meaning("projections that read it, an untied head among them; null: as writers", None)
    gains: Positive = meaning("gains and biases of the norms in the blocks", 1.0)
    final_gain: Positive = meaning("gain and bias of the final norm", 1.0)
    after_step: NonNegativeInt = meaning("last step that they leave alone", 0)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class OptimConfig:
    """AdamW with decay on matrices only; linear warmup, then cosine to min_lr_ratio * lr."""

    lr: Positive | None = meaning(
        "peak rate; null: 0.04 / sqrt(d_model), times the root of share = max_steps / 300 in a shorter run", None
    )
    lr_scale: Positive = meaning("factor on that rate where lr is null: the same rates for models of all sizes", 1.0)
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = meaning("final over peak learning rate", 0.1)
    warmup_steps: NonNegativeInt | None = meaning("steps of linear warmup; null: 10 % of the run, at most 200", None)
    decay_steps: PositiveInt | None = meaning("step at which the cosine ends; null: trainer.max_steps", None)
    weight_decay: NonNegative = meaning("on matrices only", 0.1)
    beta1: Decay = meaning("AdamW's beta1", 0.9)
    beta2: Decay = meaning("AdamW's beta2", 0.95)
    eps: Positive = meaning("AdamW's epsilon", 1e-8)
    clip: Positive | None = meaning("largest gradient norm; null: no clipping", 1.0)
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
    device: Device = meaning(DEVICES, "auto")
    dtype: Literal["auto", "float32", "bfloat16"] = meaning("bfloat16 means autocast; auto: where it is faster", "auto")
    progress: Literal["auto", "bar", "lines", "none"] = meaning("auto: a bar on a terminal, lines elsewhere", "auto")


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class TrackingConfig:
    """metrics.jsonl is always written; Weights & Biases mirrors it."""

    wandb: Literal["auto", "online", "offline", "disabled"] = meaning("auto: offline without an API key", "auto")
    project: str = meaning("W&B project", "tapernorm")
    entity: str | None = meaning("W&B user or team", None)
    group: str | None = meaning("W&B group; null: the sweep's name in a sweep", None)
    tags: tuple[str, ...] = meaning("W&B tags", ())
    strict: bool = meaning("stop instead of going on offline when W&B cannot be reached", False)


@dataclass(frozen=True, kw_only=True, config=SCHEMA)
class SweepConfig:
    """What `--multirun` does beyond running its jobs."""

    name: str | None = meaning("directory under runs_dir/sweeps; null: a hash of the swept overrides", None)
    fail_fast: bool = meaning("start no further job once one has failed", False)
    dry_run: bool = meaning("list the jobs, their states and what they will cost, and start nothing", False)
    gpu: Literal["A100", "H100", "H200", "RTX4090"] = meaning("the GPU for which dry_run predicts hours", "H100")
    mfu: Fraction = meaning("the share of that GPU's peak that training reaches (model FLOP utilization)", 0.3)
    swept: tuple[str, ...] = meaning("the keys that the jobs differ in, which name them; set by the sweep itself", ())


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
