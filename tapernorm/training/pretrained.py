"""Where a model starts from (model.init) if not at random: a run of ours, or a model in Hugging Face form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tapernorm.config.options import Config, ModelConfig, StandardNormConfig, TokenizerConfig
from tapernorm.config.resolve import resolve
from tapernorm.config.schema import ConfigError
from tapernorm.data.tokenizer import END_OF_TEXT, GPT2_VOCAB, Tokenizer, build_tokenizer
from tapernorm.method.gate import GateSchedule
from tapernorm.model.decoder import Decoder
from tapernorm.model.hf import HUGE_EPSILON, Pretrained, is_hub_form, open_pretrained
from tapernorm.training import checkpoint

# Keys of ModelConfig that do not decide which function the weights are of; n_ctx does where positions are learned.
FREE = ("name", "n_ctx", "vocab_size", "dropout", "init", "init_std", "embed_std")
FRESH = (".c", "taper_weight")  # endings of what calibration will set
GPT2_SIZES = {(12, 768): "gpt2", (24, 1024): "gpt2_medium", (36, 1280): "gpt2_large", (48, 1600): "gpt2_xl"}


def check(config: Config) -> None:
    """Refuse in one line (ConfigError), before the data is prepared, a source that is not there or of another shape."""
    where = config.model.init
    if is_hub_form(where):
        return _compare(where, open_pretrained(where).architecture, resolve(config).model)
    try:
        checkpoint.find(Path(where))
    except ConfigError as error:
        raise ConfigError(f"model.init={where}: {error}") from None


def initialize(model: Decoder, config: Config, tokenizer: Tokenizer) -> None:
    """Start `model` from the weights that model.init names: its norms are then normalized (gate 1).

    Raises ConfigError, one line, if the vocabularies, shapes or norms do not fit.
    """
    where = config.model.init
    weights = _foreign(where, config, tokenizer) if is_hub_form(where) else _own(where, config, tokenizer)
    if "position_embed.weight" in weights:  # a shorter context has the first positions
        weights["position_embed.weight"] = weights["position_embed.weight"][: config.model.n_ctx]
    _load(model, weights, where)


def check_foreign(where: str) -> None:
    """Refuse in one line (ConfigError) what `load_foreign` cannot read; the weights are not looked at."""
    try:
        _tokenizer_of(open_pretrained(where))
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.init=", "checkpoint=")) from None


def load_foreign(where: str, device: torch.device | str = "cpu") -> tuple[Decoder, Config, Tokenizer]:
    """A model in Hugging Face form as it is, with a configuration that says so and its tokenizer.

    Raises ConfigError, one line, for what cannot be read and where the tokenizer is not known.
    """
    try:
        source = open_pretrained(where)
        shape = source.architecture
        size = (shape["n_layer"], shape["d_model"])
        name = GPT2_SIZES.get(size, Path(where).name) if source.family == "gpt2" else Path(where).name
        # A compatibility format's norms stand there without effect, and a table must not call it a baseline.
        norm = StandardNormConfig(name="none" if shape["norm_eps"] >= HUGE_EPSILON else "baseline")
        config = resolve(Config(model=ModelConfig(name=name, init=where, **shape), norm=norm))
        tokenizer = _tokenizer_of(source)
        model = Decoder(config.model, config.norm)
        _load(model, source.weights(), where)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.init=", "checkpoint=")) from None
    kind = TokenizerConfig(kind="gpt2" if tokenizer.name == "gpt2" else "bpe")
    return model.to(device), dataclasses.replace(config, tokenizer=kind), tokenizer


def _tokenizer_of(source: Pretrained) -> Tokenizer:
    """The one beside the weights, if its form can be read; else GPT-2's, if the vocabulary has its size."""
    vocab_size, beside = source.architecture["vocab_size"], source.directory / "tiktoken"
    tokenizer = Tokenizer.load(beside) if beside.is_dir() else Tokenizer.from_fast(source.directory / "tokenizer.json")
    if tokenizer is None and source.family == "gpt2" and vocab_size == GPT2_VOCAB:
        tokenizer = build_tokenizer(TokenizerConfig(kind="gpt2"), None)
    if tokenizer is None or tokenizer.n_vocab != vocab_size:
        what = "no tokenizer.json" if tokenizer is None else f"a tokenizer of {tokenizer.n_vocab} ids"
        raise ConfigError(
            f"model.init={source.where}: it has {what} of a byte-level BPE that splits text as GPT-2's does, with "
            f"{vocab_size} ids, {END_OF_TEXT} the last; evaluate GPT-2 or a stock export of scripts/export_hf.py"
        )
    return tokenizer


def _foreign(where: str, config: Config, tokenizer: Tokenizer) -> dict[str, Tensor]:
    source = open_pretrained(where)
    _compare(where, source.architecture, config.model)
    there, here = source.architecture["vocab_size"], config.model.vocab_size
    if there != here:
        hint = "tokenizer=gpt2 is GPT-2's" if source.family == "gpt2" else "use the tokenizer that it was trained with"
        raise ConfigError(f"model.init={where}: vocab_size is {there} there and the tokenizer has {here} ids; {hint}")
    beside = source.directory / "tokenizer.json"
    if tokenizer.same_as_fast(beside) is False:
        raise ConfigError(f"model.init={where}: it has another tokenizer; use tokenizer=bpe tokenizer.ranks={beside}")
    return source.weights()


def _own(where: str, config: Config, tokenizer: Tokenizer) -> dict[str, Tensor]:
    path = checkpoint.find(Path(where))
    meta, source = checkpoint.read_meta(path), resolve(checkpoint.read_config(path))
    _compare(where, vars(source.model), config.model)
    if Tokenizer.load(path).fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"model.init={where}: it has another tokenizer; use tokenizer.ranks={path}/tokenizer.tiktoken"
        )
    gate = GateSchedule.from_config(source).value(meta["step"])
    if gate != 1.0:
        raise ConfigError(
            f"model.init={where}: its gate is {gate:.3g}; tapering starts from a normalized model (gate 1)"
        )
    return checkpoint.read_weights(path)


def _compare(where: str, there: Mapping[str, Any], here: ModelConfig) -> None:
    pairs = ((name, there[name], own) for name, own in vars(here).items() if name in there and name not in FREE)
    if other := [f"model.{name} is {theirs} there and {own} here" for name, theirs, own in pairs if theirs != own]:
        raise ConfigError(f"model.init={where}: {', '.join(other)}; use the same model")
    if here.positions == "learned" and here.n_ctx > there["n_ctx"]:
        raise ConfigError(
            f"model.init={where}: model.n_ctx is {there['n_ctx']} there and {here.n_ctx} here; it has no more positions"
        )


def _load(model: Decoder, weights: Mapping[str, Tensor], where: str) -> None:
    own, taken = ({k: v for k, v in some.items() if not k.endswith(FRESH)} for some in (model.state_dict(), weights))
    if other := sorted(own.keys() ^ taken.keys()):
        raise ConfigError(f"model.init={where}: other layers ({', '.join(other[:3])}, ...); use the same norms")
    for name, tensor in taken.items():
        if tensor.shape != own[name].shape:
            there, here = tuple(tensor.shape), tuple(own[name].shape)
            raise ConfigError(f"model.init={where}: {name} is {there} there and {here} here; use the same model")
    model.load_state_dict(taken, strict=False)
