"""Models for TransformerLens, whose tools take a model apart. The only module that imports transformer_lens.

TransformerLens has a decoder of its own, of which ours is a case. It is filled with our tensors; a norm that was tapered
is not in it; its hooks have the names that the community knows. docs/interpretability.md shows what that is good for.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm import checkpoint as checkpoints
from tapernorm.config import ConfigError
from tapernorm.export import read_exported
from tapernorm.fold import fold
from tapernorm.hf import fast_tokenizer, read_tokenizer
from tapernorm.model import Decoder, SwiGLU
from tapernorm.tokenizer import Tokenizer

FAMILIES: dict[type, str] = {nn.LayerNorm: "LN", nn.RMSNorm: "RMS"}  # what TransformerLens calls them


def to_hooked(source: Decoder | str | Path, *, tokenizer: Tokenizer | None = None, fold_gains: bool = False) -> Any:
    """transformer_lens's TransformerBridge with the logits (B, T, V) of `source`, in its precision, without dropout.

    source: a model (whose `tokenizer` may be given), or the directory of a run, of a checkpoint or of an exported model.

    Tapered norms are folded and gone; a LayerNorm's beta has become biases. `cfg.normalization_type` says what is left:
    None where that is nothing, else 'LN' or 'RMS', and then a norm that is gone is an nn.Identity in its place.
    With `fold_gains` those that are left lose their gains too ('LNPre', 'RMSPre'): their linear part is then W_U's.

    Raises ConfigError, one line: transformer_lens is not installed, a gate is open, norms that it does not have.
    """
    lens = _transformer_lens()
    if isinstance(source, Decoder):
        model, words = source, None if tokenizer is None else fast_tokenizer(tokenizer)
    else:
        model, words = _read(Path(source))
    name = f"{model.config.name}-{model.norm_config.name}"
    if model.taper_norms() or (fold_gains and model.norm_config.kind != "folded"):
        model = fold(model, gains=fold_gains)
    config = lens.TransformerBridgeConfig(
        model_name=name,
        n_layers=model.config.n_layer,
        n_ctx=model.config.n_ctx,
        d_model=model.config.d_model,
        d_head=model.config.head_dim,
        n_heads=model.config.n_head,
        d_mlp=model.config.d_ff,
        d_vocab=model.config.vocab_size,
        gated_mlp=model.config.mlp == "swiglu",
        act_fn={"swiglu": "silu", "gelu": "gelu_new"}[model.config.mlp],
        positional_embedding_type={"learned": "standard", "rotary": "rotary"}[model.config.positions],
        rotary_base=model.config.rope_theta,
        normalization_type=_normalization_type(model),
        eps=model.config.norm_eps,
    )
    with torch.random.fork_rng(devices=[]):  # its layers draw weights when they are made, and these are replaced
        native = lens.model_bridge.sources.native.NativeModel(config)
    _fill(native, model)
    return lens.model_bridge.sources.build_bridge_from_module(
        native.to(model.embed.weight).eval(),
        "TransformerLensNative",
        tl_config=config,
        tokenizer=words,
        model_name=name,
        post_adapter_hook=_keep_norms,
    ).eval()


def _transformer_lens() -> Any:
    try:
        import transformer_lens.model_bridge.sources.native
    except ImportError as error:
        raise ConfigError(f"transformer_lens cannot be used ({error}): pip install 'tapernorm[lens]'") from None
    return transformer_lens


def _read(path: Path) -> tuple[Decoder, Any]:
    """The model of a directory and transformers' tokenizer of it, None where that would give other ids."""
    if (path / "config.json").is_file():
        return read_exported(path).eval(), read_tokenizer(path)
    model, _, tokenizer = checkpoints.load_model(checkpoints.find(path))
    return model.eval(), fast_tokenizer(tokenizer)


def _normalization_type(model: Decoder) -> str | None:
    """TransformerLens has one type for all sites. Raises ConfigError for norms that have none."""
    layers = {site: norm for site, norm in model.norms() if not isinstance(norm, nn.Identity)}
    for site, norm in layers.items():
        if type(norm) not in FAMILIES:
            raise ConfigError(
                f"norm {model.norm_config.name}: {type(norm).__name__} at {site} is no norm of TransformerLens, "
                "which has LayerNorm, RMSNorm and none"
            )
    kinds = {FAMILIES[type(norm)] + ("Pre" if norm.weight is None else "") for norm in layers.values()}
    return kinds.pop() if kinds else None


def _keep_norms(adapter: Any) -> None:
    """Let every norm compute as the module that stands there, so that an nn.Identity among LayerNorms is none."""
    mapping = adapter.component_mapping
    for norm in (*(mapping["blocks"].submodules[name] for name in ("ln1", "ln2")), mapping["ln_final"]):
        norm.use_native_layernorm_autograd = True


def _fill(native: Any, model: Decoder) -> None:
    """Put our layers in the places of `native`, which has three matrices where we stack them in one."""
    native.tok_embed, native.head = copy.deepcopy(model.embed), _readout(model)
    native.ln_out = copy.deepcopy(model.final_norm)
    turned = model.position_embed is None
    if turned:
        half = model.config.head_dim // 2
        native.rotary.cos_cached = model.cos[:, half:].repeat_interleave(2, dim=-1)
        native.rotary.sin_cached = model.sin[:, half:].repeat_interleave(2, dim=-1)
    else:
        native.pos = copy.deepcopy(model.position_embed)
    block: Any
    for block, layer in zip(model.blocks, native.layers, strict=True):
        layer.ln1, layer.ln2 = copy.deepcopy(block.attn_norm), copy.deepcopy(block.mlp_norm)
        q, k, layer.attn.v = _parts(block.attn.qkv, 3)
        layer.attn.q, layer.attn.k = (_paired(x, model.config.n_head) for x in (q, k)) if turned else (q, k)
        (layer.attn.o,) = _parts(block.attn.out, 1)
        if isinstance(block.mlp, SwiGLU):
            layer.mlp.gate, up = _parts(block.mlp.gate_up, 2)
            setattr(layer.mlp, "in", up)
            (layer.mlp.out,) = _parts(block.mlp.down, 1)
        else:
            (layer.mlp.fc_in,), (layer.mlp.fc_out,) = _parts(block.mlp.up, 1), _parts(block.mlp.down, 1)


def _parts(projection: nn.Linear, n: int) -> list[nn.Linear]:
    """Copies of the n maps that a projection's rows are."""
    biases = [None] * n if projection.bias is None else projection.bias.chunk(n)
    return [_linear(*pair) for pair in zip(projection.weight.chunk(n), biases, strict=True)]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """An nn.Linear with copies of weight (O, I) and bias (O,)."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer


def _paired(projection: nn.Linear, n_head: int) -> nn.Linear:
    """Queries or keys in the order of TransformerLens's rotation, which turns neighbours where ours turns halves.

    Both are the same order of q and of k, so their products, the scores, stay.
    """

    def order(rows: Tensor) -> Tensor:
        return rows.view(n_head, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    return _linear(order(projection.weight), None if projection.bias is None else order(projection.bias))


def _readout(model: Decoder) -> nn.Linear:
    """W_U and b_U. A tied head is a copy, since what TransformerLens does to one matrix is not meant for the other."""
    return _linear(model.embed.weight, None) if model.head is None else _linear(model.head.weight, model.head.bias)
