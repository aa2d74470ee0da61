"""Configuration of a pre-norm decoder whose normalization layers may be gone."""

from transformers import PretrainedConfig


class TapernormConfig(PretrainedConfig):
    """norms: what is left at each site in the order of the forward pass (attention and MLP of each block, then final):

    'none' (the layer is gone), 'rms' or 'layer', with a gain if `norm_gain`; the first may be 'table' (its output is
    looked up by token id). read_biases: whether the projection that reads the site has a bias.
    positions: 'rotary' or 'learned'. mlp: 'swiglu' or 'gelu' (tanh form).
    """

    model_type = "tapernorm"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # a list: transformers adds to it
    attribute_map = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_ctx",
    }

    def __init__(
        self,
        vocab_size=257,
        n_ctx=512,
        n_layer=8,
        d_model=64,
        n_head=2,
        d_ff=176,
        positions="rotary",
        rope_theta=10000.0,
        mlp="swiglu",
        dropout=0.0,
        tied=True,
        norms=None,
        norm_gain=True,
        norm_eps=1e-6,
        read_biases=None,
        write_biases=False,
        initializer_range=0.02,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **kwargs,
    ):
        self.vocab_size, self.n_ctx = vocab_size, n_ctx
        self.n_layer, self.d_model, self.n_head, self.d_ff = n_layer, d_model, n_head, d_ff
        self.positions, self.rope_theta, self.mlp, self.dropout, self.tied = positions, rope_theta, mlp, dropout, tied
        self.norms = ["none"] * (2 * n_layer + 1) if norms is None else list(norms)
        self.norm_gain, self.norm_eps = norm_gain, norm_eps
        self.read_biases = [False] * (2 * n_layer + 1) if read_biases is None else list(read_biases)
        self.write_biases = write_biases
        self.initializer_range, self.use_cache = initializer_range, use_cache
        kwargs["tie_word_embeddings"] = False  # a tied model has no second matrix that could be tied
        super().__init__(bos_token_id=bos_token_id, eos_token_id=eos_token_id, pad_token_id=pad_token_id, **kwargs)
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id
