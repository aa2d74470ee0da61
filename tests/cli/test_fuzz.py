"""Whatever is asked for happens, or is refused in one line that names what to change: drawn, but the same each time."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import LayerNorm, RMSNorm

from tapernorm.cli import composition
from tapernorm.config.resolve import build, resolve
from tapernorm.config.schema import ConfigError
from tapernorm.data.prepare import prepare
from tapernorm.method.gate import Phase
from tapernorm.model.decoder import build_model
from tapernorm.model.fold import fold
from tapernorm.runtime.record import read_metrics
from tapernorm.training.loop import train
from tests.conftest import NORMS, TINY, merge


def examples(count: int) -> settings:
    """The same `count` examples on every machine, however long one takes."""
    slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(
        max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=slow, print_blob=True
    )


def refused(error: ConfigError) -> str:
    text = str(error)
    assert text and "\n" not in text, text
    assert "Error(" not in text and "Traceback" not in text
    return text


# ------------------------------------------------------------------------------------------------------- configurations

BLOCK = st.sampled_from(["attn", "mlp", "final", "0.attn", "1.mlp", "0-1.mlp", "2.attn"])  # 2 is not always there
GROUPS = {
    "norm": st.sampled_from(list(NORMS)),
    "anchor": st.sampled_from(["none", "fixed_target", "log_target", "mean_log", "batch_mean"]),
    "gate": st.sampled_from(["cosine", "linear", "sqrt", "step", "sequential", "constant"]),
    "calibration": st.sampled_from(["ema", "one_batch", "none"]),
    "tokenizer": st.sampled_from(["bpe", "bytes"]),
}


def optional(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.just("null") | values


def number(least: float, most: float) -> st.SearchStrategy[float]:
    return st.floats(least, most, allow_nan=False)


BOOLEAN = st.sampled_from(["true", "false"])
VALUES = {
    "model.n_layer": st.integers(1, 3),
    "model.n_ctx": st.integers(1, 40),
    "model.d_model": st.sampled_from([8, 12, 16, 32]),
    "model.head_dim": st.sampled_from([2, 3, 4, 8, 16]),
    "model.d_ff": optional(st.integers(1, 40)),
    "model.tied": BOOLEAN,
    "model.positions": st.sampled_from(["rotary", "learned"]),
    "model.rope_theta": number(1, 1e6),
    "model.mlp": st.sampled_from(["swiglu", "gelu"]),
    "model.biases": BOOLEAN,
    "model.dropout": number(0, 0.9),
    "model.norm_family": st.sampled_from(["rms", "layer"]),
    "model.norm_eps": optional(number(1e-12, 1)),
    "model.init_std": number(1e-3, 1),
    "norm.sites": st.lists(BLOCK, min_size=1, max_size=3).map(lambda sites: f"[{','.join(sites)}]"),
    "anchor.weight": number(0, 10),
    "anchor.absolute_weight": optional(number(0, 10)),
    "anchor.spread_weight": number(0, 10),
    "gate.k_warmup": optional(st.integers(0, 4)),
    "gate.k_taper": optional(st.integers(1, 4)),
    "gate.k_taper_share": number(0.01, 1),
    "gate.first_removal": optional(st.integers(1, 3)),
    "gate.gaps": st.sampled_from(["null", "[1,1,1]"]),
    "calibration.window": optional(st.integers(1, 4)),
    "calibration.decay": number(0, 0.999),
    "optim.lr": optional(number(1e-6, 0.1)),
    "optim.min_lr_ratio": number(0, 1),
    "optim.warmup_steps": optional(st.integers(0, 4)),
    "optim.decay_steps": optional(st.integers(1, 5)),
    "optim.weight_decay": number(0, 1),
    "optim.clip": optional(number(1e-3, 10)),
    "trainer.batch_size": st.integers(1, 4),
    "trainer.accumulation": st.integers(1, 4),
    "trainer.log_interval": st.integers(1, 3),
    "trainer.dynamics_interval": st.integers(1, 3),
    "trainer.probe_size": st.integers(1, 4),
    "trainer.val_interval": optional(st.integers(1, 3)),
    "trainer.val_tokens": st.integers(1, 600),
    "trainer.val_batch_size": st.integers(1, 9),
    "trainer.save_interval": optional(st.integers(1, 3)),
    "trainer.keep_last": st.integers(1, 3),
    "trainer.samples": st.integers(0, 1),
    "trainer.sample_tokens": st.integers(1, 8),
    "trainer.dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
    "seed": st.integers(0, 2**40),
}
FIXED = (
    "experiment=smoke",
    "dataset.stories=120",
    "dataset.valid_stories=40",
    "dataset.vocab_size=300",
    "trainer.max_steps=2",
    "trainer.device=cpu",
    "trainer.progress=none",
    "tracking.wandb=disabled",
    "report=false",
)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    groups = {name: draw(values) for name, values in GROUPS.items()}
    keys = draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=10, unique=True))
    if groups["norm"] == "baseline":  # which has no sites
        keys = [key for key in keys if key != "norm.sites"]
    return [f"{name}={choice}" for name, choice in groups.items()] + [f"{key}={draw(VALUES[key])}" for key in keys]


@pytest.fixture(scope="module", autouse=True)
def hydra_is_ready() -> Iterator[None]:
    composition.register()
    with initialize_config_dir(str(composition.CONFIGS), version_base="1.3"):
        yield


def test_any_command_line_trains_or_is_refused_in_one_line() -> None:
    outcomes: Counter[str] = Counter()

    @examples(40)
    @given(command_lines())
    def attempt(overrides: list[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                config = resolve(build(composition.plain(compose("train", [*FIXED, *overrides]))))
                summary = train(config, Path(folder))
            except ConfigError as error:
                outcomes[refused(error)] += 1
                return
            outcomes["trained"] += 1
            assert summary["steps"] == 2 and read_metrics(Path(folder))[-1]["step"] == 2

    attempt()
    assert outcomes["trained"] > 20, outcomes


# ---------------------------------------------------------------------------------------------------------- story files

PIECES = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from(
        [b"\n", b"\r\n", b"\0", b"\xef\xbb\xbf", b"<|endoftext|>", b"\n<|endoftext|>\n", b"Once upon a time. "]
    ),
    st.text(max_size=60).map(lambda text: json.dumps({"text": text}).encode() + b"\n"),
    st.sampled_from([b'{"text": 1}\n', b'{"text": null}\n', b"[]\n{", b'{"other": "x"}\n', b'{"text": "\\ud800"}\n']),
)


@examples(120)
@given(st.lists(PIECES, max_size=12).map(b"".join), st.sampled_from([".txt", ".jsonl"]), st.booleans())
def test_any_bytes_are_prepared_or_refused_in_one_line(content: bytes, suffix: str, apart: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"stories{suffix}")
        path.write_bytes(content)
        dataset = {"kind": "text", "train": str(path), "valid": str(path) if apart else None, "held_out": 0.5}
        tree = merge(TINY, {"dataset": dataset, "tokenizer": {"kind": "bytes"}, "cache_dir": f"{folder}/cache"})
        try:
            data = prepare(resolve(build(tree)))
        except ConfigError as error:
            refused(error)
            return
        for file in (data.train, data.valid):
            tokens = file.tokens
            assert not len(tokens) or int(tokens.max()) < data.tokenizer.n_vocab
            data.tokenizer.decode(tokens)


# ------------------------------------------------------------------------------------------------------------- folding


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    head_dim = draw(st.sampled_from([2, 4, 8]))
    model = {
        "n_layer": draw(st.integers(1, 3)),
        "n_ctx": draw(st.integers(2, 9)),
        "head_dim": head_dim,
        "d_model": head_dim * draw(st.integers(1, 3)),
        "d_ff": draw(st.integers(1, 20)),
        "norm_family": draw(st.sampled_from(["rms", "layer"])),
        "mlp": draw(st.sampled_from(["swiglu", "gelu"])),
        "positions": draw(st.sampled_from(["rotary", "learned"])),
        **{key: draw(st.booleans()) for key in ("tied", "biases")},
    }
    norm = dict(NORMS[draw(st.sampled_from(list(NORMS)))])
    if norm["kind"] != "standard":
        sites = draw(st.lists(st.sampled_from(["attn", "mlp", "final", "0.attn", "0-.mlp"]), min_size=1, unique=True))
        norm["sites"] = sites
    return {"model": model, "norm": norm}


@examples(120)
@given(
    models(),
    st.sampled_from([0.0, 0.0, 0.0, 1e-6, 0.5, 1.0]),
    st.sampled_from([1e-3, 1.0, 30.0]),
    st.integers(0, 2**31),
    st.booleans(),
    st.booleans(),
)
def test_folded_equals_unfolded_or_is_refused(
    tree: dict[str, Any], gate: float, scale: float, seed: int, gains: bool, table: bool
) -> None:
    """Any shape, gains, biases and constants, in float64: logits within 1e-10 of the largest."""
    config = resolve(build(merge(TINY, tree)), 23)
    model = build_model(config).double().eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        spread = scale if parameter.dim() == 1 else 0.5
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = spread * noise if "embed" not in name else noise
    for norm in model.gated_norms().values():
        norm.c.fill_(float(torch.rand((), generator=generator)) * scale + 1e-3)
    model.set_gate(gate, Phase.TAPERED if gate == 0 else Phase.TAPERING if gate < 1 else Phase.NORMALIZED)
    tokens = torch.randint(0, 23, (2, config.model.n_ctx), generator=generator)
    if gate and model.gated_norms():
        with pytest.raises(ConfigError, match="open gate cannot be folded") as caught:
            fold(model, gains=gains, table=table)
        refused(caught.value)
        return
    if table and (model.position_embed is not None or type(model.blocks[0].attn_norm) not in (RMSNorm, LayerNorm)):
        with pytest.raises(ConfigError, match="fold_table") as caught:
            fold(model, gains=gains, table=True)
        refused(caught.value)
        return
    with torch.no_grad():
        expected, found = model(tokens), fold(model, gains=gains, table=table)(tokens)
    assert torch.isfinite(expected).all()
    assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()
