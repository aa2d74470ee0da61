"""Models in Hugging Face form, read and written. The only module that imports transformers, and only where it is used.

Two stock layouts are known, each equal to a choice of `ModelConfig`: GPT2LMHeadModel's, whose linear maps are stored as
(in, out), and LlamaForCausalLM's, which has several matrices where we have one. Weights are read from safetensors
alone: nothing that is read can execute code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from tapernorm.config.options import ModelConfig
from tapernorm.config.schema import ConfigError
from tapernorm.data.tokenizer import END_OF_TEXT, Tokenizer
from tapernorm.method.gate import Phase
from tapernorm.method.norms import LayerForm
from tapernorm.model.decoder import Decoder

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", flags=re.ASCII)  # owner/name, or name

# What a stock architecture is among ours.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"norm_family": "layer", "positions": "learned", "mlp": "gelu", "biases": True},
    "llama": {"norm_family": "rms", "positions": "rotary", "mlp": "swiglu", "biases": False},
}
# Values of a config.json that these architectures are; transformers' defaults where the file has none.
STOCK: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    "llama": {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "rope_scaling": (None,)},
}
SHAPE = {  # in the words of ModelConfig and of config.json
    "n_layer": {"gpt2": "n_layer", "llama": "num_hidden_layers"},
    "d_model": {"gpt2": "n_embd", "llama": "hidden_size"},
    "n_head": {"gpt2": "n_head", "llama": "num_attention_heads"},
    "d_ff": {"gpt2": "n_inner", "llama": "intermediate_size"},
    "n_ctx": {"gpt2": "n_positions", "llama": "max_position_embeddings"},
    "vocab_size": {"gpt2": "vocab_size", "llama": "vocab_size"},
    "norm_eps": {"gpt2": "layer_norm_epsilon", "llama": "rms_norm_eps"},
    "tied": {"gpt2": "tie_word_embeddings", "llama": "tie_word_embeddings"},
}
DEFAULTS: dict[str, dict[str, Any]] = {  # transformers', of what a config.json may lack
    "gpt2": {"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    "llama": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False},
}
PREFIX = {"gpt2": "transformer.", "llama": "model."}  # of all names but the head's
# Our layers and theirs, which stacked by rows are ours.
LAYERS = {
    "gpt2": {
        "embed": ["wte"],
        "position_embed": ["wpe"],
        "blocks.{}.attn_norm": ["h.{}.ln_1"],
        "blocks.{}.attn.qkv": ["h.{}.attn.c_attn"],
        "blocks.{}.attn.out": ["h.{}.attn.c_proj"],
        "blocks.{}.mlp_norm": ["h.{}.ln_2"],
        "blocks.{}.mlp.up": ["h.{}.mlp.c_fc"],
        "blocks.{}.mlp.down": ["h.{}.mlp.c_proj"],
        "final_norm": ["ln_f"],
    },
    "llama": {
        "embed": ["embed_tokens"],
        "blocks.{}.attn_norm": ["layers.{}.input_layernorm"],
        "blocks.{}.attn.qkv": [f"layers.{{}}.self_attn.{part}_proj" for part in "qkv"],
        "blocks.{}.attn.out": ["layers.{}.self_attn.o_proj"],
        "blocks.{}.mlp_norm": ["layers.{}.post_attention_layernorm"],
        "blocks.{}.mlp.gate_up": ["layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj"],
        "blocks.{}.mlp.down": ["layers.{}.mlp.down_proj"],
        "final_norm": ["norm"],
    },
}
NO_WEIGHTS = re.compile(r".*\.attn\.(masked_)?bias|.*rotary_emb\.inv_freq")  # masks and tables of older versions
WRAPPERS = re.compile(r"^((_orig_mod|module)\.)+")  # of torch.compile and of data-parallel training
ALIASES = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
           "n_positions": "max_position_embeddings"}  # fmt: skip
# LayerNorm's epsilon that leaves (x - mean) / 2^30: a token's variance would have to reach 2^47 to move it by 1e-4.
HUGE_EPSILON = 2.0**60


def family_of(config: ModelConfig) -> str | None:
    """The stock architecture that a model is, None if it is neither."""
    return next((name for name, keys in FAMILIES.items() if all(getattr(config, k) == keys[k] for k in keys)), None)


def _names(family: str, n_layer: int, tied: bool) -> dict[str, list[str]]:
    """Names of our tensors, and of theirs without the family's prefix."""
    names = {} if tied else {"head.weight": ["lm_head.weight"]}
    for ours, parts in LAYERS[family].items():
        kinds = ["weight"] if family == "llama" or ours.endswith("embed") else ["weight", "bias"]
        for index in range(n_layer if "{}" in ours else 1):
            for kind in kinds:
                names[f"{ours.format(index)}.{kind}"] = [f"{part.format(index)}.{kind}" for part in parts]
    return names


def _turned(family: str, ours: str, tensor: Tensor) -> Tensor:
    """A tensor between the two conventions: GPT-2's matrices of the blocks are transposed."""
    return tensor.t() if family == "gpt2" and ours.startswith("blocks.") and tensor.dim() == 2 else tensor


# ------------------------------------------------------------------------------------------------------------------ in


@dataclass(frozen=True)
class Pretrained:
    """A model in Hugging Face form: `architecture` in the words of ModelConfig (n_ctx is the longest it knows)."""

    where: str
    directory: Path
    family: str
    architecture: dict[str, Any]

    def weights(self) -> dict[str, Tensor]:
        """Its tensors under our names, float32. Raises ConfigError, one line, for files that do not hold them."""
        prefix, given = PREFIX[self.family], _read_safetensors(self.where, self.directory)
        theirs = {
            WRAPPERS.sub("", name).removeprefix(prefix): tensor
            for name, tensor in given.items()
            if not NO_WEIGHTS.fullmatch(name)
        }
        tied = self.architecture["tied"]
        if tied and "lm_head.weight" in theirs:
            head, embed = theirs.pop("lm_head.weight"), f"{LAYERS[self.family]['embed'][0]}.weight"
            if not torch.equal(head, theirs.setdefault(embed, head)):
                raise ConfigError(
                    f"model.init={self.where}: config.json says tie_word_embeddings, but lm_head.weight is not "
                    f"{prefix}{embed}; write false there if both are meant"
                )
        names = _names(self.family, self.architecture["n_layer"], tied)
        wanted = {name for parts in names.values() for name in parts}
        if odd := [*sorted(wanted - theirs.keys()), *sorted(theirs.keys() - wanted)]:
            raise ConfigError(
                f"model.init={self.where}: its tensors are not {self.family}'s ({', '.join(odd[:3])}, ...)"
            )
        return {
            ours: torch.cat([_turned(self.family, ours, theirs[part]) for part in parts]).float().contiguous()
            for ours, parts in names.items()
        }


def is_hub_form(where: str) -> bool:
    """Whether `model.init` names a model in Hugging Face form rather than a run or checkpoint of ours."""
    path = Path(where).expanduser()
    return (path / "config.json").is_file() if path.exists() else HUB_ID.fullmatch(where) is not None


def open_pretrained(where: str) -> Pretrained:
    """Read the config.json of a local directory or hub id.

    Raises ConfigError, one line: no such model, no network, or an architecture that is not one of ours.
    """
    path = Path(where).expanduser()
    directory = path if path.is_dir() else _download(where)
    try:
        given = json.loads((directory / "config.json").read_text(encoding="utf-8-sig"))
        return Pretrained(where, directory, given.get("model_type"), _architecture(given))
    except ConfigError as error:
        raise ConfigError(f"model.init={where}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model.init={where}: its config.json cannot be read ({reason})") from None


def _architecture(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of ModelConfig for a config.json. Raises ConfigError where it is not one of ours."""
    family = given.get("model_type")
    if family == "tapernorm":
        raise ConfigError("a norm-free export, which has no norms left; name the run that it was made from")
    if family not in FAMILIES:
        raise ConfigError(f"model_type is {family} there; {' and '.join(FAMILIES)} can be read")
    if family == "gpt2":  # both names stand for the same in transformers
        given = {name: given[alias] for name, alias in ALIASES.items() if alias in given} | dict(given)
    rope = given.get("rope_parameters") or {}
    given = DEFAULTS[family] | {"rope_type": rope.get("rope_type")} | dict(given)
    if "n_ctx" in given:  # of old GPT-2s
        given.setdefault("n_positions", given["n_ctx"])
    shape: dict[str, Any] = {ours: given[theirs[family]] for ours, theirs in SHAPE.items()}
    heads = shape.pop("n_head")
    shape["head_dim"] = shape["d_model"] // heads
    shape["d_ff"] = shape["d_ff"] or 4 * shape["d_model"]
    known = STOCK[family]
    if family == "llama":
        shape["rope_theta"] = float(rope.get("rope_theta") or given.get("rope_theta") or 10000.0)
        ours = {"num_key_value_heads": heads, "head_dim": shape["head_dim"], "rope_type": "default"}
        known = known | {key: (value, None) for key, value in ours.items()}
    for key, allowed in known.items():
        if given.get(key, allowed[0]) not in allowed:
            raise ConfigError(f"{key} is {given[key]} there; only {allowed[0]} can be read")
    return FAMILIES[family] | shape


def _download(where: str) -> Path:
    """The hub's files in its own cache, downloaded if they are not there."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    patterns = ["config.json", "model*.safetensors", "model.safetensors.index.json"]
    try:
        return Path(snapshot_download(where, allow_patterns=patterns, etag_timeout=10))
    except RepositoryNotFoundError:
        reason = "and the hub has no model of that name"
    except Exception as error:  # whatever the network, the proxy or the cache raise, the way out is the same
        reason = f"and the hub cannot be reached ({type(error).__name__})"
    raise ConfigError(
        f"model.init={where}: no directory here, not in the cache {constants.HF_HUB_CACHE}, {reason}; "
        "model.init=<directory> takes one that was downloaded elsewhere"
    ) from None


def _read_safetensors(where: str, directory: Path) -> dict[str, Tensor]:
    index = directory / "model.safetensors.index.json"
    try:
        if (directory / "model.safetensors").is_file():
            return load_file(directory / "model.safetensors")
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            return {name: x for shard in shards for name, x in load_file(directory / Path(shard).name).items()}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"model.init={where}: its weights cannot be read ({error})") from None
    pickled = any(directory.glob("pytorch_model*.bin"))
    hint = "; pytorch_model.bin is a pickle, which is not opened: save it as safetensors first" if pickled else ""
    raise ConfigError(f"model.init={where}: there is no model.safetensors{hint}")


# ----------------------------------------------------------------------------------------------------------------- out


def to_stock(model: Decoder) -> Any:
    """transformers' model with this model's tensors, computing the same logits: see `to_gpt2` and `to_llama`."""
    return to_gpt2(model) if family_of(model.config) == "gpt2" else to_llama(model)


def to_llama(model: Decoder) -> Any:
    """transformers' LlamaForCausalLM with this model's matrices and gains, computing the same logits.

    Raises ConfigError, one line, for a model whose norms are not all RMSNorm with a gain, and where transformers is
    not installed.
    """
    _check_family(model, "llama")
    for site, norm in model.norms():
        if not isinstance(norm, nn.RMSNorm) or norm.weight is None:
            raise ConfigError(f"norm {model.norm_config.name}: Llama has an RMSNorm with a gain at {site}")
    rope = {"rope_type": "default", "rope_theta": model.config.rope_theta}
    keys = {"num_key_value_heads": model.config.n_head, "rope_parameters": rope, "attention_bias": False}
    return _stock(model, "llama", keys, model.state_dict())


def to_gpt2(model: Decoder) -> Any:
    """transformers' GPT2LMHeadModel with this model's tensors, computing the same logits.

    Where every norm is tapered (gate 0) its LayerNorms stay in the graph without effect, up to rounding:

        (x - mean) / sqrt(var + eps) * (sqrt(eps) c gamma_t) + beta = (x - mean) * c * gamma_t + beta    for eps >> var

    with eps = 2^60. GPT-2 has one epsilon for all its LayerNorms, so a model that keeps some has no such form. Raises
    ConfigError, one line, for it, for other norms, and where transformers is not installed.
    """
    _check_family(model, "gpt2")
    state, layers = model.state_dict(), dict(model.norms())
    tapered = [site for site, norm in layers.items() if isinstance(norm, LayerForm) and norm.phase is Phase.TAPERED]
    for site, norm in layers.items():
        name = "final_norm" if site == "final" else f"blocks.{site}_norm"
        if isinstance(norm, LayerForm) and len(tapered) == len(layers):
            state[f"{name}.weight"] = HUGE_EPSILON**0.5 * norm.end_gain()
        elif not isinstance(norm, nn.LayerNorm) or norm.weight is None:
            raise ConfigError(
                f"norm {model.norm_config.name}: GPT-2 has LayerNorms with one epsilon, so either none or all of them "
                f"can be tapered (gate 0, not folded), and {site} does not fit; the tapernorm format takes any"
            )
    keys: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.config.dropout)
    if tapered:
        keys["layer_norm_epsilon"] = HUGE_EPSILON
    return _stock(model, "gpt2", keys, state)


def _check_family(model: Decoder, family: str) -> None:
    for key, value in FAMILIES[family].items():
        own = getattr(model.config, key)
        if own != value and key != "norm_family":  # which the norms themselves will tell better
            raise ConfigError(f"model.{key} is {own}; {family} has {value}")


def _stock(model: Decoder, family: str, keys: Mapping[str, Any], state: Mapping[str, Tensor]) -> Any:
    """transformers' model of our shape with our tensors in it, on our device, in our precision and mode."""
    transformers, config = _transformers(), model.config
    shape = {theirs[family]: getattr(config, ours) for ours, theirs in SHAPE.items()}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    stock_config = transformers.AutoConfig.for_model(family, **{**shape, **ends, **keys})
    stock: Any = transformers.AutoModelForCausalLM.from_config(stock_config)
    theirs: dict[str, Tensor] = {}
    for ours, parts in _names(family, config.n_layer, config.tied).items():
        for part, tensor in zip(parts, state[ours].chunk(len(parts)), strict=True):
            name = part if part.startswith("lm_head") else PREFIX[family] + part
            theirs[name] = _turned(family, ours, tensor).detach().clone()
    theirs.setdefault("lm_head.weight", state["embed.weight"].detach().clone())
    stock.load_state_dict(theirs, strict=True)
    return stock.to(model.embed.weight).train(model.training)


def save_stock(stock: Any, directory: Path) -> None:
    """Its save_pretrained, without the bar that transformers shows for one file."""
    logging = _transformers().utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        stock.save_pretrained(directory)
    finally:
        if shown:
            logging.enable_progress_bar()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError("transformers is not installed: pip install 'transformers>=5'") from None
    return transformers


# ----------------------------------------------------------------------------------------------------------- tokenizers


def fast_tokenizer(tokenizer: Tokenizer) -> Any | None:
    """transformers' tokenizer with the same ids, end-of-text in front of every text as in training.

    None where the tokenizers library gives other ids.
    """
    fast = tokenizer.to_fast()
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    build = _transformers().PreTrainedTokenizerFast
    return None if fast is None else build(tokenizer_object=fast, name_or_path="", add_bos_token=True, **special)


def read_tokenizer(directory: Path) -> Any | None:
    """The same of an exported model's directory, None where no such tokenizer was written."""
    found = (directory / "tokenizer_config.json").is_file()
    return _transformers().PreTrainedTokenizerFast.from_pretrained(directory, add_bos_token=True) if found else None
