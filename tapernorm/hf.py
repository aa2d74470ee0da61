"""Hugging Face forms of our models. The only module that imports transformers, and only when it is used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.config import ConfigError
from tapernorm.model import Decoder


def to_llama(model: Decoder) -> Any:
    """transformers' LlamaForCausalLM with this model's matrices and gains, computing the same logits.

    Raises ConfigError, one line, for a model whose norms are not all RMSNorm with a gain, and where transformers is
    not installed.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise ConfigError("transformers is not installed: pip install 'transformers>=5'") from None
    config: Any = model.config  # resolved: nothing is null
    for site, norm in model.norms():
        if not isinstance(norm, nn.RMSNorm) or norm.weight is None:
            raise ConfigError(f"norm {model.norm_config.name}: Llama has an RMSNorm with a gain at {site}")
    llama: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            num_key_value_heads=config.n_head,
            max_position_embeddings=config.n_ctx,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tied,
            attention_bias=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )
    llama.load_state_dict(_llama_state(model), strict=True)
    return llama.to(model.embed.weight).train(model.training)


def _llama_state(model: Decoder) -> dict[str, Tensor]:
    head = model.embed.weight if model.head is None else model.head.weight
    state = {"model.embed_tokens.weight": model.embed.weight, "lm_head.weight": head}
    state["model.norm.weight"] = dict(model.norms())["final"].weight  # type: ignore[assignment]
    blocks: list[Any] = list(model.blocks)
    for index, block in enumerate(blocks):
        name = f"model.layers.{index}"
        q, k, v = block.attn.qkv.weight.chunk(3)
        gate, up = block.mlp.gate_up.weight.chunk(2)
        state |= {
            f"{name}.self_attn.q_proj.weight": q,
            f"{name}.self_attn.k_proj.weight": k,
            f"{name}.self_attn.v_proj.weight": v,
            f"{name}.self_attn.o_proj.weight": block.attn.out.weight,
            f"{name}.mlp.gate_proj.weight": gate,
            f"{name}.mlp.up_proj.weight": up,
            f"{name}.mlp.down_proj.weight": block.mlp.down.weight,
            f"{name}.input_layernorm.weight": block.attn_norm.weight,
            f"{name}.post_attention_layernorm.weight": block.mlp_norm.weight,
        }
    with torch.no_grad():
        return {name: tensor.detach().clone() for name, tensor in state.items()}
