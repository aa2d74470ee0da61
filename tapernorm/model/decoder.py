"""One pre-norm decoder for two families: Llama's block (RoPE, SwiGLU, no biases) and GPT-2's (learned positions, GELU,
biases, dropout). Equal to transformers' LlamaForCausalLM and GPT2LMHeadModel.

A folded model may have a bias where `model.biases` has none: there a LayerNorm's beta has moved into its reader.

Shape legend: B batch, T time, D width of the residual stream, H heads, K head width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapernorm.config.options import AnyNormConfig, Config, ModelConfig
from tapernorm.config.sites import all_sites
from tapernorm.method.gate import Phase
from tapernorm.method.norms import GatedNorm, TaperNorm, build_norm, is_table, needs_bias, widened
from tapernorm.model.cache import KVCache, LayerCache

Angles = tuple[Tensor, Tensor]  # cos and sin of the positions of a forward


def rotary_table(n_ctx: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i/K), each (T, K), the two halves of K alike but for the sign of sin:

    the first half of a head turns by -sin times the second, the second by +sin times the first.
    """
    frequency = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(n_ctx, dtype=torch.float32), frequency)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of heads (B, H, T, K) by tables (T, K), or (B, 1, T, K) where rows differ."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class Attention(nn.Module):
    """Causal self-attention: (B, T, D) -> (B, T, D). With `cache`, also to what is in it (and then without dropout).

    A pair of inputs is what Q and K read, and what V reads: see `norms.FakeNorm`.
    `angles` are the rotary tables (cos, sin) of the positions, None where positions are learned.
    """

    def __init__(self, config: ModelConfig, bias: bool) -> None:
        super().__init__()
        self.n_head, self.head_dim, self.dropout = config.n_head, config.head_dim, config.dropout
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=config.biases or bias)
        self.out = nn.Linear(config.d_model, config.d_model, bias=config.biases)

    def project(self, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """(B, T, 3 D): queries, keys, values."""
        if isinstance(x, Tensor):
            return self.qkv(x)
        sizes = [2 * x[1].shape[-1], x[1].shape[-1]]
        weights = self.qkv.weight.split(sizes)
        biases = (None, None) if self.qkv.bias is None else self.qkv.bias.split(sizes)
        return torch.cat([F.linear(part, w, b) for part, w, b in zip(x, weights, biases, strict=True)], -1)

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor], angles: Angles | None, cache: LayerCache | None = None
    ) -> Tensor:
        projected = self.project(x)
        B, T, D = *projected.shape[:2], projected.shape[2] // 3
        heads = projected.view(B, T, 3 * self.n_head, self.head_dim).transpose(1, 2)
        qk, v = heads.split([2 * self.n_head, self.n_head], dim=1)
        if angles is not None:
            qk = rotate(qk, *angles).to(v.dtype)
        q, k = qk.chunk(2, dim=1)  # each (B, H, T, K), as v
        if cache is None:
            rate = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        else:
            y = cache.attend(q, k, v)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are the halves of one matrix. (B, T, D) -> (B, T, D)."""

    def __init__(self, d_model: int, d_ff: int, read_bias: bool, write_bias: bool) -> None:
        super().__init__()
        self.gate_up = nn.Linear(d_model, 2 * d_ff, bias=read_bias)
        self.down = nn.Linear(d_ff, d_model, bias=write_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class GELU(nn.Module):
    """down(gelu(up(x))), gelu(x) = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), GPT-2's. (B, T, D) -> (B, T, D)."""

    def __init__(self, d_model: int, d_ff: int, read_bias: bool, write_bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=read_bias)
        self.down = nn.Linear(d_ff, d_model, bias=write_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """h + attn(norm(h)), then h + mlp(norm(h)). `taps`, if given, receives every norm's input by site.

    `read`, if given, is what attention reads instead of norm(h).
    """

    def __init__(self, config: ModelConfig, norm: AnyNormConfig, index: int) -> None:
        super().__init__()
        assert config.d_ff is not None, "of a resolved configuration"
        self.dropout, self.sites = config.dropout, (f"{index}.attn", f"{index}.mlp")
        read_biases = [needs_bias(norm, config, site) for site in self.sites]
        self.attn_norm = build_norm(norm, config, self.sites[0])
        self.attn = Attention(config, read_biases[0])
        self.mlp_norm = build_norm(norm, config, self.sites[1])
        mlp = {"swiglu": SwiGLU, "gelu": GELU}[config.mlp]
        self.mlp = mlp(config.d_model, config.d_ff, config.biases or read_biases[1], config.biases)

    def forward(
        self,
        h: Tensor,
        angles: Angles | None,
        taps: dict[str, Tensor] | None = None,
        cache: LayerCache | None = None,
        read: Tensor | None = None,
    ) -> Tensor:
        rate = self.dropout if self.training else 0.0
        if taps is not None:
            taps[self.sites[0]] = h
        y = self.attn(self.attn_norm(h) if read is None else read, angles, cache)
        h = h + (F.dropout(y, rate) if rate else y)
        if taps is not None:
            taps[self.sites[1]] = h
        y = self.mlp(self.mlp_norm(h))
        return h + (F.dropout(y, rate) if rate else y)


class Decoder(nn.Module):
    """Token ids (B, T) -> logits (B, T, V). Needs a resolved configuration.

    `trunk` gives the residual stream h_L that enters the final norm, `readout` the logits of it: the two halves that
    the anchor and the observers look between.

    A folded model may have a `table` N (V, D), N_i = norm(E_i), in the place of 0.attn's norm: see `fold`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, norm: AnyNormConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("model.vocab_size is the tokenizer's: see tapernorm.config.resolve")
        self.config, self.norm_config = config, norm
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.table = nn.Embedding(config.vocab_size, config.d_model) if is_table(norm, "0.attn") else None
        self.position_embed = nn.Embedding(config.n_ctx, config.d_model) if config.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(config, norm, index) for index in range(config.n_layer))
        self.final_norm = build_norm(norm, config, "final")
        bias = needs_bias(norm, config, "final")
        self.head = None if config.tied else nn.Linear(config.d_model, config.vocab_size, bias=bias)
        if self.position_embed is None:
            cos, sin = rotary_table(config.n_ctx, config.head_dim, config.rope_theta)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Matrices ~ N(0, init_std^2), those that write to the residual stream divided by sqrt(2 n_layer); biases 0.

        Norms draw nothing, so models that differ only in their norms start from equal matrices.
        """
        writer_scale = 1.0 / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_writer = name.endswith(("attn.out.weight", "mlp.down.weight"))
                std = self.config.init_std * (writer_scale if is_writer else 1.0)
                if name == "embed.weight":
                    std = self.config.embed_std or std
                nn.init.normal_(parameter, std=std, generator=generator)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)

    def trunk(self, tokens: Tensor, taps: dict[str, Tensor] | None = None, cache: KVCache | None = None) -> Tensor:
        """(B, T) ids -> h_L (B, T, D). `taps`, if given, receives the input of every norm: '0.attn', ..., 'final'.

        With a `cache` (see `new_cache`) the ids continue its rows, and join them.
        """
        positions = slice(tokens.shape[1]) if cache is None else cache.extend(tokens.shape[1])
        h, angles = self.embed(tokens), None
        if self.position_embed is None:
            angles = self.cos[positions], self.sin[positions]
        else:  # (T, D), or (B, 1, T, D) where rows differ
            h = h + self.position_embed.weight[positions].view(-1, *h.shape[1:])
        if self.config.dropout and self.training:
            h = F.dropout(h, self.config.dropout)
        read = None if self.table is None else self.table(tokens)
        for index, block in enumerate(self.blocks):
            h, read = block(h, angles, taps, None if cache is None else cache.layers[index], read), None
        if taps is not None:
            taps["final"] = h
        return h

    def readout(self, h: Tensor) -> Tensor:
        """h_L (B, T, D) -> logits (B, T, V)."""
        x = self.final_norm(h)
        return F.linear(x, self.embed.weight) if self.head is None else self.head(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.readout(self.trunk(tokens))

    def loss(self, tokens: Tensor, targets: Tensor, log_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy in nats per token, and h_L (B, T, D).

        `log_scale` is a zero that requires a gradient: h_L is read as h_L * (1 + log_scale), so its gradient is
        d loss / d ln(scale), the radial gradient of the cross-entropy. The numbers are not changed by it.
        """
        h = self.trunk(tokens)
        read = h if log_scale is None else h * (1.0 + log_scale)
        logits = self.readout(read)
        return F.cross_entropy(widened(logits).flatten(0, 1), targets.flatten()), h

    def new_cache(self, n_row: int, n_slot: int | None = None, *, fixed: bool = False) -> KVCache:
        """An empty cache for `n_row` rows of at most `n_slot` tokens (default: the context) for `trunk`.

        Raises ValueError for more slots than the context has positions.
        """
        config, weight = self.config, self.embed.weight
        n_slot = config.n_ctx if n_slot is None else n_slot
        if n_slot > config.n_ctx:
            raise ValueError(f"{n_slot} slots: the model has {config.n_ctx} positions")
        kind = weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        shape = config.n_layer, n_row, config.n_head, n_slot, config.head_dim
        return KVCache(shape, dtype, weight.device, fixed)

    def norms(self) -> Iterator[tuple[str, nn.Module]]:
        """(site, norm) in the order of the forward pass."""
        blocks = [module for block in self.blocks for module in (block.attn_norm, block.mlp_norm)]
        yield from zip(all_sites(self.config.n_layer), [*blocks, self.final_norm], strict=True)

    def gated_norms(self) -> dict[str, GatedNorm]:
        """The layers that the gate takes away, by site; empty for a baseline."""
        return {site: norm for site, norm in self.norms() if isinstance(norm, GatedNorm)}

    def taper_norms(self) -> dict[str, TaperNorm]:
        """The tapered layers by site."""
        return {site: norm for site, norm in self.norms() if isinstance(norm, TaperNorm)}

    def set_gate(self, gate: float, phase: Phase) -> None:
        """Set the one global gate in every layer that has it."""
        for norm in self.gated_norms().values():
            norm.set_gate(gate, phase)

    @property
    def is_homogeneous(self) -> bool:
        """Whether every norm still divides by its input's scale, so that the residual stream's does not matter."""
        return all(isinstance(norm, GatedNorm | nn.RMSNorm | nn.LayerNorm) for _, norm in self.norms())

    def divide_eps(self, kappa: float) -> None:
        """Divide eps of every norm, and of the configuration, by kappa^2: r(h / kappa) is then r(h) / kappa."""
        assert self.config.norm_eps is not None
        self.config = dataclasses.replace(self.config, norm_eps=self.config.norm_eps / kappa**2)
        for _, norm in self.norms():
            if hasattr(norm, "eps"):
                norm.eps = self.config.norm_eps  # type: ignore[assignment]

    def n_parameters(self) -> int:
        """Number of parameters that the folded or baseline model has: each gain once, gamma_t not counted."""
        return sum(p.numel() for name, p in self.named_parameters() if not name.endswith("taper_weight"))


def build_model(config: Config, device: torch.device | str = "cpu") -> Decoder:
    """The decoder of a resolved configuration, its weights drawn from config.seed alone (on the CPU, so that every
    device starts from the same numbers)."""
    model = Decoder(config.model, config.norm)
    model.reset_parameters(torch.Generator().manual_seed(config.seed))
    return model.to(device)
