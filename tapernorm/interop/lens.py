"""Models for TransformerLens, whose tools take a model apart. The only module that imports transformer_lens.

TransformerLens has a decoder of its own, which is filled with our tensors. A norm that was taken away is not in it, and
its hooks have the names that the community knows. docs/interpretability.md shows what that is good for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.config.schema import ConfigError
from tapernorm.data.tokenizer import Tokenizer
from tapernorm.interop.export import read_exported
from tapernorm.model.decoder import Angles, Decoder, SwiGLU, rotate
from tapernorm.model.decoder import Attention as SelfAttention
from tapernorm.model.fold import fold
from tapernorm.model.hf import fast_tokenizer, read_tokenizer
from tapernorm.training import checkpoint

FAMILIES: dict[type, str] = {nn.LayerNorm: "LN", nn.RMSNorm: "RMS"}  # what TransformerLens calls them


def to_hooked(source: Decoder | str | Path, *, tokenizer: Tokenizer | None = None, fold_gains: bool = False) -> Any:
    """transformer_lens's TransformerBridge with the logits (B, T, V) of `source`, in its precision, without dropout.

    source: a model (whose `tokenizer` may be given), or the directory of a run, a checkpoint or an exported model.

    Gated norms are folded and gone; a LayerNorm's beta has become biases. `cfg.normalization_type` says what is left:
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
    if model.gated_norms() or (fold_gains and model.norm_config.kind != "folded"):
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
        how = "pip install -c constraints.txt -e '.[lens]'"
        raise ConfigError(f"transformer_lens cannot be used ({error}): {how}") from None
    return transformer_lens


def _read(path: Path) -> tuple[Decoder, Any]:
    """The model of a directory and transformers' tokenizer of it, None where that would give other ids."""
    if (path / "config.json").is_file():
        return read_exported(path).eval(), read_tokenizer(path)
    model, _, tokenizer = checkpoint.load_model(checkpoint.find(path))
    return model.eval(), fast_tokenizer(tokenizer)


def _normalization_type(model: Decoder) -> str | None:
    """TransformerLens has one type for all sites. Raises ConfigError for norms that have none."""
    name, kinds = model.norm_config.name, set()
    if model.table is not None:
        raise ConfigError(
            f"norm {name}: 0.attn is a table by token id, which TransformerLens has no place for; "
            "take the model without fold_table"
        )
    for site, norm in model.norms():
        if type(norm) in FAMILIES:
            kinds.add(FAMILIES[type(norm)] + ("Pre" if norm.weight is None else ""))
        elif not isinstance(norm, nn.Identity):
            raise ConfigError(
                f"norm {name}: {type(norm).__name__} at {site} is no norm of TransformerLens, "
                "which has LayerNorm, RMSNorm and none"
            )
    return kinds.pop() if kinds else None


def _keep_norms(adapter: Any) -> None:
    """Let every norm compute as the module that stands there, so that an nn.Identity among LayerNorms is none."""
    mapping = adapter.component_mapping
    for norm in (*(mapping["blocks"].submodules[name] for name in ("ln1", "ln2")), mapping["ln_final"]):
        norm.use_native_layernorm_autograd = True


def _fill(native: Any, model: Decoder) -> None:
    """Put copies of our layers in the places of `native`, which has several matrices where we stack them in one."""
    native.tok_embed, native.pos = copy.deepcopy(model.embed), copy.deepcopy(model.position_embed)
    native.rotary = None  # see Attention
    block: Any
    for block, layer in zip(model.blocks, native.layers, strict=True):
        layer.ln1, layer.ln2 = copy.deepcopy(block.attn_norm), copy.deepcopy(block.mlp_norm)
        layer.attn = Attention(block.attn, None if model.position_embed is not None else (model.cos, model.sin))
        (down,) = _parts(block.mlp.down, 1)
        if isinstance(block.mlp, SwiGLU):
            layer.mlp.gate, up = _parts(block.mlp.gate_up, 2)
            setattr(layer.mlp, "in", up)
            layer.mlp.out = down
        else:
            (layer.mlp.fc_in,), layer.mlp.fc_out = _parts(block.mlp.up, 1), down
    native.ln_out = copy.deepcopy(model.final_norm)
    # A tied head too is a copy: what is done to W_U, such as centering it, is not meant for W_E.
    head: Any = model.embed if model.head is None else model.head
    native.head = _linear(head.weight, getattr(head, "bias", None))


class Attention(nn.Module):
    """Causal attention: (B, T, D) -> (B, T, D), and softmax's argument (B, H, T, T), -inf where a token does not look.

    It stands in the place of TransformerLens's own, which turns neighbouring features where ours turns the halves of a
    head, and shows the pattern once more as its hook_attn_scores.
    """

    accepts_pattern_fn = True  # the pattern is handed to its hook before it is used, so that hooks can change it

    def __init__(self, source: SelfAttention, angles: Angles | None) -> None:
        super().__init__()
        self.n_head, self.angles = source.n_head, angles
        self.q, self.k, self.v = _parts(source.qkv, 3)
        (self.o,) = _parts(source.out, 1)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        pattern_fn: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """attention_mask: (B, T), 0 for padding, which sees nothing but itself. position_ids: (B, T)."""
        B, T, _ = hidden_states.shape
        layers = (self.q, self.k, self.v)
        q, k, v = (layer(hidden_states).view(B, T, self.n_head, -1).transpose(1, 2) for layer in layers)
        if self.angles is not None:
            angles = [table.to(q)[position_ids].unsqueeze(1) for table in self.angles]
            q, k = rotate(q, *angles), rotate(k, *angles)
        unseen = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
        if attention_mask is not None:
            unseen = unseen | ~attention_mask.bool()[:, None, None]
            unseen.diagonal(dim1=-2, dim2=-1).fill_(False)  # no row of the softmax is empty
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(unseen, -torch.inf)
        pattern = scores.softmax(-1)
        y = (pattern if pattern_fn is None else pattern_fn(pattern)) @ v
        return self.o(y.transpose(1, 2).reshape(B, T, -1)), scores


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
