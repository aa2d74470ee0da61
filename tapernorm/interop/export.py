"""A checkpoint as a model in Hugging Face form: without the norms that were tapered, or in a stock layout.

<out>/
    config.json, generation_config.json, model.safetensors
    modeling_tapernorm.py, configuration_tapernorm.py   of the tapernorm format: what computes it (interop/exported)
    tokenizer.json, tokenizer_config.json               where the tokenizers library gives our ids, else tiktoken/
    README.md, certificate.json                         the numbers, and how exactly it computes the checkpoint's
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tapernorm.config.options import (
    Config,
    FoldedNormConfig,
    ModelConfig,
    NoNormConfig,
    NormConfig,
    StandardNormConfig,
    TaperNormConfig,
)
from tapernorm.config.programs import ExportConfig
from tapernorm.config.schema import ConfigError
from tapernorm.config.sites import all_sites
from tapernorm.data.batches import validation_windows
from tapernorm.data.prepare import reuse
from tapernorm.data.tokenizer import END_OF_TEXT, Tokenizer
from tapernorm.method.norms import is_table
from tapernorm.model.decoder import Decoder
from tapernorm.model.fold import certificate, describe, fold, readers, refuse_open_gates
from tapernorm.model.hf import HUGE_EPSILON, family_of, open_pretrained, save_stock, to_stock
from tapernorm.runtime.record import METRICS_FILE, finite, read_metrics
from tapernorm.training import checkpoint

log = logging.getLogger(__name__)

TEMPLATES = Path(__file__).with_name("exported")
# Keys of ModelConfig that config.json has too.
MODEL_KEYS = ("vocab_size", "n_ctx", "n_layer", "d_model", "d_ff", "positions", "rope_theta", "mlp", "dropout", "tied")
Report = dict[str, Any]


def export(config: ExportConfig) -> Path:
    """Write config.checkpoint as the directory config.out, which is there afterwards as a whole or not at all.

    Raises ConfigError, one line: the directory exists, a gate is open, the format does not fit the model.
    """
    out = Path(config.out)
    if out.exists():
        raise ConfigError(f"out={out} exists already; name a new directory")
    path = checkpoint.find(Path(config.checkpoint))
    model, trained, tokenizer = checkpoint.load_model(path)
    model.eval()
    kind, dtype = _format(config, model), getattr(torch, config.dtype)
    exported: Any
    try:
        refuse_open_gates(model)
        text, where = _tokens(config, trained, checkpoint.read_meta(path)["data"])
        if kind == "tapernorm":
            exported, proof = _norm_free(config, path, model, text)
        else:
            exported, proof = _stock(model, kind, text)
    except ConfigError as error:
        raise ConfigError(f"checkpoint {path}: {error}") from None
    proof = finite({"text": where, **proof})
    with checkpoint.as_a_whole(out) as folder:
        if kind == "tapernorm":
            _write_norm_free(folder, exported, tokenizer, dtype)
        else:
            save_stock(exported.to(dtype), folder)
        _write_json(folder / "certificate.json", proof)
        _write_json(folder / "generation_config.json", _special_ids(tokenizer))
        note = _write_tokenizer(folder, tokenizer, trained.model.n_ctx)
        card = _card(kind, config.dtype, path, model, trained, proof, note)
        (folder / "README.md").write_text(card, encoding="utf-8")
    for line in _certified(proof):
        log.info(line)
    log.info(f"written to {out}, format {kind}")
    return out


def _format(config: ExportConfig, model: Decoder) -> str:
    """The stock layout for a baseline that has one, else tapernorm's. Raises ConfigError where these do not fit."""
    family, form, baseline = family_of(model.config), config.format, model.norm_config.kind == "standard"
    if form == "auto":
        return family if family and baseline and not config.fold_table else "tapernorm"
    if form not in ("tapernorm", family):
        raise ConfigError(f"format={form}: this model is no {form}; use format={family or 'tapernorm'}")
    if config.fold_table and form != "tapernorm":
        raise ConfigError(f"format={form} has no place for a table; use format=tapernorm, or no fold_table")
    if form == "gpt2" and not baseline and config.dtype == "float16":
        raise ConfigError(
            f"format=gpt2 dtype=float16: a removed LayerNorm is an epsilon of {HUGE_EPSILON:.2g} there, which float16 "
            "cannot hold; use dtype=float32 or bfloat16, or format=tapernorm"
        )
    return form


def _tokens(config: ExportConfig, trained: Config, key: str) -> tuple[Tensor, str]:
    """Windows (N, T) to certify on, and what they are: validation text if it is still in the cache, else random ids."""
    n_ctx = trained.model.n_ctx
    n_tokens = max(config.tokens, n_ctx)
    data = reuse(trained, key)
    if data is not None:
        windows = data.valid.windows(n_ctx)
        return validation_windows(data.valid.tokens, n_ctx, n_tokens, windows)[0], "validation tokens"
    assert trained.model.vocab_size is not None
    ids = torch.randint(
        trained.model.vocab_size, (n_tokens // n_ctx, n_ctx), generator=torch.Generator().manual_seed(0)
    )
    return ids, "random tokens"


# ------------------------------------------------------------------------------------------------------ the two formats


def _norm_free(config: ExportConfig, path: Path, model: Decoder, text: Tensor) -> tuple[Decoder, Report]:
    """The folded model and its certificate; of a checkpoint that is folded already, the one it was written with."""
    if model.norm_config.kind == "folded" and (model.norm_config.table or not config.fold_table):
        file = path / "certificate.json"
        proof = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return model, {"text": "validation tokens", **proof}  # what evaluate.py certifies on
    folded = fold(model, gains=config.fold_gains, table=config.fold_table)
    return folded, certificate(model, folded, text)


@torch.no_grad()
def _stock(model: Decoder, kind: str, text: Tensor) -> tuple[Any, Report]:
    """transformers' model, and the largest difference of a logit in float32."""
    stock = to_stock(model)
    if model.norm_config.kind != "standard":
        stock.config.tapernorm_compatibility_format = True  # for whoever wonders about its epsilon
    worst = largest = 0.0
    for row in text.split(1):
        a, b = model(row), stock(row).logits
        worst, largest = max(worst, (a - b).abs().max().item()), max(largest, a.abs().max().item())
    return stock, {"format": kind, "max_logit_error": worst, "max_logit": largest, "tokens": text.numel()}


def _write_norm_free(folder: Path, model: Decoder, tokenizer: Tokenizer, dtype: torch.dtype) -> None:
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for file in sorted(TEMPLATES.glob("*.py")):
        shutil.copyfile(file, folder / file.name)
    _write_json(folder / "config.json", norm_free_config(model, dtype) | _special_ids(tokenizer))


def norm_free_config(model: Decoder, dtype: torch.dtype = torch.float32) -> Report:
    """config.json of the tapernorm format. Raises ConfigError for norms that it does not have (DyT, Derf)."""
    names = {nn.Identity: "none", nn.RMSNorm: "rms", nn.LayerNorm: "layer"}
    layers = dict(model.norms())
    for site, norm in layers.items():
        if type(norm) not in names:
            kind = type(norm).__name__
            raise ConfigError(f"norm {model.norm_config.name}: {kind} at {site} has no Hugging Face form")
    gains = {norm.weight is not None for norm in layers.values() if not isinstance(norm, nn.Identity)}
    return {
        "architectures": ["TapernormForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_tapernorm.TapernormConfig",
            "AutoModelForCausalLM": "modeling_tapernorm.TapernormForCausalLM",
        },
        "model_type": "tapernorm",
        "dtype": str(dtype).removeprefix("torch."),
        "n_head": model.config.n_head,
        **{key: getattr(model.config, key) for key in MODEL_KEYS},
        "norms": ["table" if is_table(model.norm_config, site) else names[type(norm)] for site, norm in layers.items()],
        "norm_gain": gains != {False},
        "norm_eps": model.config.norm_eps,
        "read_biases": [getattr(reader, "bias", None) is not None for _, _, reader in readers(model)],
        "write_biases": model.config.biases,
    }


# ---------------------------------------------------------------------------------------------------------------- back


def read_exported(directory: Path) -> Decoder:
    """The model that `export` wrote into a directory, in any of its formats, as ours; its weights in float32.

    Raises ConfigError, one line, for other directories and for GPT-2's layout of a model without norms.
    """
    try:
        given = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        if given.get("tapernorm_compatibility_format"):
            raise ConfigError("its LayerNorms stand there without effect; export it with format=tapernorm")
        if given.get("model_type") != "tapernorm":
            source = open_pretrained(str(directory))
            model = Decoder(ModelConfig(**source.architecture), StandardNormConfig())
            weights = source.weights()
        else:
            model, weights = _read_norm_free(given), load_file(directory / "model.safetensors")
        model.load_state_dict(weights, strict=True)
    except ConfigError as error:
        raise ConfigError(f"{directory}: {str(error).removeprefix(f'model.init={directory}: ')}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{directory}: no exported model can be read ({type(error).__name__}: {reason})") from None
    return model


def _read_norm_free(given: Report) -> Decoder:
    """The folded model, without weights, of a config.json of the tapernorm format: `norm_free_config` backwards.

    Biases that `write_biases` does not account for are folded betas. A removed site with one was a tapered LayerNorm;
    without, it makes no difference what it was.
    """
    named = zip(all_sites(given["n_layer"]), given["norms"], given["read_biases"], strict=True)
    made = {site: bias and not (given["write_biases"] and site != "final") for site, _, bias in named}
    removed = tuple(site for site, norm in zip(made, given["norms"], strict=True) if norm == "none")
    source: NormConfig = (TaperNormConfig if any(made[site] for site in removed) else NoNormConfig)(sites=removed)
    model = ModelConfig(
        **{key: given[key] for key in MODEL_KEYS},
        head_dim=given["d_model"] // given["n_head"],
        biases=given["write_biases"],
        norm_family="layer" if any(made.values()) or "layer" in given["norms"] else "rms",
        norm_eps=given["norm_eps"],
    )
    table = given["norms"][0] == "table"
    return Decoder(model, FoldedNormConfig(source=source, gains=not given["norm_gain"], table=table))


# ------------------------------------------------------------------------------------------------------------ the rest


def _special_ids(tokenizer: Tokenizer) -> Report:
    return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eot)


def _write_json(path: Path, data: Report) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, n_ctx: int) -> str:
    """tokenizer.json if the tokenizers library gives the same ids; returns what the card says about it."""
    fast = tokenizer.to_fast()
    if fast is None:
        (folder / "tiktoken").mkdir()
        tokenizer.save(folder / "tiktoken")
        return "There is no AutoTokenizer: the tokenizers library splits text otherwise. tiktoken/ has the ranks."
    fast.save(str(folder / "tokenizer.json"))
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": n_ctx, "padding_side": "left"}
    _write_json(folder / "tokenizer_config.json", settings | special | {"clean_up_tokenization_spaces": False})
    return f"Every document began after {END_OF_TEXT} (id {tokenizer.eot}): start a prompt with it."


def _certified(proof: Report) -> list[str]:
    if "errors" in proof:
        return describe(proof)
    if "max_logit_error" in proof:
        on = f"float32, logits up to {proof['max_logit']:.3g}, {proof['tokens']:,} tokens"
        return [f"largest error of a logit {proof['max_logit_error']:.2g} ({on})"]
    return ["the checkpoint was folded without a certificate"]


def _validation_loss(path: Path, meta: Report) -> str:
    """Of the checkpoint's step, which is saved before it is validated: so the run's metrics know it."""
    run_dir = checkpoint.run_directory(path)
    rows = read_metrics(run_dir) if (run_dir / METRICS_FILE).is_file() else []
    for row in rows:
        if row["step"] == meta["step"] and row.get("val/loss") is not None:
            return f"{row['val/loss']:.4f} nats per token"
    before = meta.get("val_loss")
    return "not measured" if before is None else f"{before:.4f} nats per token, some steps earlier"


def _card(kind: str, dtype: str, path: Path, model: Decoder, trained: Config, proof: Report, note: str) -> str:
    meta, shape = checkpoint.read_meta(path), trained.model
    given = "directory, trust_remote_code=True" if kind == "tapernorm" else "directory"
    start = Path(shape.init).name if Path(shape.init).is_absolute() else shape.init  # a card is for others
    certified = "\n".join(f"    {line.strip()}" for line in _certified(proof))
    compatible = COMPATIBLE if kind == "gpt2" and trained.norm.kind != "standard" else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [tapernorm]
---
# {shape.name}, norm {trained.norm.name}

A language model trained with tapernorm (method: arXiv 2602.10408), which tapers normalization layers away.

| | |
|---|---|
| validation loss | {_validation_loss(path, meta)} ({trained.dataset.name}) |
| trained on | {meta["tokens"]:,} tokens, {meta["step"]:,} steps, started from {start} |
| parameters | {model.n_parameters():,}, stored in {dtype} |
| shape | {shape.n_layer} blocks, width {shape.d_model}, {shape.n_head} heads, context {shape.n_ctx} |
| block | {shape.positions} positions, {shape.mlp}, biases {shape.biases}, norm family {shape.norm_family} |
| norm, anchor, seed | {trained.norm.name}, {trained.anchor.kind}, {trained.seed} |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({given})
tokenizer = AutoTokenizer.from_pretrained({given})
```

{note}

Certificate (certificate.json), on {proof["text"]}:

{certified}
{compatible}"""


COMPATIBLE = f"""
This is a **compatibility format**: its LayerNorms stand there without effect, with an epsilon of {HUGE_EPSILON:.3g} \
(2^60) and gains that undo it. It computes what the norm-free model does, no faster than GPT-2, in float32 and \
bfloat16; float16 cannot hold the epsilon.
"""
