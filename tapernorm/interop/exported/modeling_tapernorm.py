"""A pre-norm decoder whose normalization layers may be gone: h + attn(norm(h)), then h + mlp(norm(h)).

Shapes: B batch, T new tokens, S tokens with those in the cache, D width, H heads, K head width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_tapernorm import TapernormConfig

# What this version of transformers calls the keys and values that it hands from step to step.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


def build_norm(config, site):
    """What is left of the norm at a site, by its place in the forward pass."""
    kind = config.norms[site]
    if kind in ("none", "table"):
        return nn.Identity()
    layer = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}[kind]
    return layer(config.d_model, eps=config.norm_eps, elementwise_affine=config.norm_gain)


def rotate(x, angles):
    """Rotary embedding of heads (B, H, T, K) by angles (B, 1, T, K/2): the two halves of K turn into each other."""
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.index, self.n_head, self.dropout = index, config.n_head, config.dropout
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=config.read_biases[2 * index])
        self.out = nn.Linear(config.d_model, config.d_model, bias=config.write_biases)

    def forward(self, x, mask, angles, cache, weigh):
        """(B, T, D), and with `weigh` the attention's weights (B, H, T, S), which take memory; else None."""
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)  # each (B, H, T, K)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        if cache is not None:
            k, v = cache.update(k, v, self.index)
        rate = self.dropout if self.training else 0.0
        causal, weights = mask is None and T > 1, None
        if weigh:
            scores = (q @ k.transpose(-1, -2)).float() / q.shape[-1] ** 0.5
            if causal:
                mask = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
            if mask is not None:
                scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
            weights = scores.softmax(-1).to(v.dtype)
            y = F.dropout(weights, rate) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate, is_causal=causal)
        return F.dropout(self.out(y.transpose(1, 2).reshape(B, T, D)), rate), weights


class SwiGLU(nn.Module):
    def __init__(self, config, bias):
        super().__init__()
        self.gate_up = nn.Linear(config.d_model, 2 * config.d_ff, bias=bias)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.write_biases)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class GELU(nn.Module):
    def __init__(self, config, bias):
        super().__init__()
        self.up = nn.Linear(config.d_model, config.d_ff, bias=bias)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.write_biases)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.dropout = config.dropout
        self.attn_norm = build_norm(config, 2 * index)
        self.attn = Attention(config, index)
        self.mlp_norm = build_norm(config, 2 * index + 1)
        self.mlp = {"swiglu": SwiGLU, "gelu": GELU}[config.mlp](config, config.read_biases[2 * index + 1])

    def forward(self, h, mask, angles, cache, weigh, read=None):
        y, weights = self.attn(self.attn_norm(h) if read is None else read, mask, angles, cache, weigh)
        h = h + y
        return h + F.dropout(self.mlp(self.mlp_norm(h)), self.dropout, self.training), weights


class TapernormForCausalLM(PreTrainedModel, GenerationMixin):
    """Token ids (B, T) -> logits (B, T, V). Padding, at either side, is what attention_mask says."""

    config_class = TapernormConfig
    _no_split_modules = ("Block",)
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.table = nn.Embedding(config.vocab_size, config.d_model) if config.norms[0] == "table" else None
        self.position_embed = nn.Embedding(config.n_ctx, config.d_model) if config.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.n_layer))
        self.final_norm = build_norm(config, -1)
        bias = config.read_biases[-1]
        self.head = None if config.tied else nn.Linear(config.d_model, config.vocab_size, bias=bias)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def set_input_embeddings(self, value):
        self.embed = value

    def get_output_embeddings(self):
        return self.head

    def set_output_embeddings(self, value):
        self.head = value

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        num_items_in_batch=None,
        return_dict=None,
        output_hidden_states=None,
        output_attentions=None,
        **others,
    ):
        """attention_mask: (B, S), 1 for tokens and 0 for padding. labels: (B, T), shifted here; -100 is ignored.

        shift_labels: (B, T), shifted already. logits_to_keep: logits of the last so many tokens alone; 0: of all.
        position_ids that begin again within a row, without a mask, part it into texts that do not see each other.
        hidden_states: the embeddings, what each block leaves, and the last of these after the final norm.
        """
        # Not in the signature: Trainer takes every name with 'label' in it for one that the data must have.
        shift_labels = others.pop("shift_labels", None)
        if unknown := others.keys() - {"cache_position"}:  # which says nothing that the cache does not know
            raise TypeError(f"this model does not know the argument {sorted(unknown)[0]}")
        cache = past_key_values if cache is None else cache
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if use_cache and cache is None:
            cache = DynamicCache()
        h = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        if self.table is not None and input_ids is None:
            raise ValueError("a norm of this model is a table by token id: give input_ids, not inputs_embeds")
        read = None if self.table is None else self.table(input_ids)
        n_past = 0 if cache is None else int(cache.get_seq_length())
        if h.shape[1] == 0:
            raise ValueError("there is no token to read; begin with the bos_token_id")
        if n_past + h.shape[1] > self.config.n_ctx:
            raise ValueError(
                f"{n_past + h.shape[1]} tokens are more than the {self.config.n_ctx} that this model knows"
            )
        positions = self._positions(h, attention_mask, n_past) if position_ids is None else position_ids
        angles = None
        if self.position_embed is not None:
            h = h + self.position_embed(positions)
        else:
            K = self.config.d_model // self.config.n_head
            even = torch.arange(0, K, 2, dtype=torch.float32, device=h.device)
            frequency = 1.0 / self.config.rope_theta ** (even / K)
            angles = (positions[..., None].float() * frequency)[:, None]
        h = F.dropout(h, self.config.dropout, self.training)
        mask = self._mask(h, attention_mask, n_past)
        if position_ids is not None and attention_mask is None and n_past == 0:
            text = (position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)
            if text[:, -1].max() > 0:
                same = text[:, :, None] == text[:, None]
                mask = (same & torch.ones_like(same[0]).tril())[:, None]
        weigh = self._asked("output_attentions", output_attentions)
        weigh = weigh or self.config._attn_implementation == "eager"
        states, attentions = [h], []
        for block in self.blocks:
            (h, weights), read = block(h, mask, angles, cache, weigh, read), None
            states.append(h)
            attentions.append(weights)
        states[-1] = h = self.final_norm(h)
        h = h if isinstance(logits_to_keep, int) and not logits_to_keep else _last(h, logits_to_keep)
        logits = F.linear(h, self.embed.weight) if self.head is None else self.head(h)
        loss = None
        if labels is not None or shift_labels is not None:
            more = {"num_items_in_batch": num_items_in_batch, "shift_labels": shift_labels}
            loss = self.loss_function(logits, labels, self.config.vocab_size, **more)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=tuple(states) if self._asked("output_hidden_states", output_hidden_states) else None,
            attentions=tuple(attentions) if self._asked("output_attentions", output_attentions) else None,
            **{CACHE: cache if use_cache else None},
        )
        as_dict = getattr(self.config, "return_dict", True) if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    def _asked(self, name, given):
        return bool(getattr(self.config, name, False) if given is None else given)

    @staticmethod
    def _positions(h, attention_mask, n_past):
        """(B, T), or (1, T): a token's place among those of its row that are not padding."""
        T = h.shape[1]
        if attention_mask is None or attention_mask.dim() != 2:
            return torch.arange(n_past, n_past + T, device=h.device)[None]
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -T:]

    @staticmethod
    def _mask(h, attention_mask, n_past):
        """(B, 1, T, S): which tokens each token sees; None where causality alone decides.

        Padding sees itself, so that no row of the softmax is empty.
        """
        T = h.shape[1]
        if attention_mask is not None and attention_mask.dim() == 4:
            return attention_mask
        if attention_mask is None and (T == 1 or n_past == 0):
            return None
        slots = torch.arange(n_past + T, device=h.device)
        own = slots[n_past:, None]
        seen = (slots <= own)[None]
        if attention_mask is not None:
            seen = (seen & attention_mask.bool()[:, None]) | (slots == own)
        return seen[:, None]


def _last(h, logits_to_keep):
    return h[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else h[:, logits_to_keep]
