"""Models in TransformerLens: the same logits, the usual hooks, and a sum over components that is the logits exactly."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformer_lens", reason="the extra is absent: pip install -c constraints.txt -e '.[lens]'")

from tapernorm.config.programs import ExportConfig
from tapernorm.config.schema import ConfigError
from tapernorm.data.tokenizer import Tokenizer
from tapernorm.interop.export import export
from tapernorm.interop.lens import to_hooked
from tapernorm.model.decoder import Decoder
from tapernorm.model.fold import fold
from tapernorm.model.generate import generate
from tapernorm.training import checkpoint as checkpoints
from tests.interop.test_export import BYTES, EOT, FAMILIES, MODES, exported, saved, tokens

TYPES = {"baseline": {"llama": "RMS"}, "internal_taper": {"llama": "RMS"}}  # else LN, and None where no norm is left
N_LAYER = 2


def model(tmp_path: Path, norm: str, family: str) -> Decoder:
    """A random model at gate 0, in float64."""
    return checkpoints.load_model(saved(tmp_path, norm, family))[0].double().eval()


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest of b."""
    assert b.abs().max() > 0.3
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("norm", MODES)
@torch.no_grad()
def test_the_same_logits_without_the_norms(tmp_path: Path, norm: str, family: str) -> None:
    ours, x = model(tmp_path, norm, family), tokens()
    state = torch.random.get_rng_state()
    hooked = to_hooked(ours)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert distance(hooked(x), ours(x)) < 1e-13
    wanted = None if norm in ("all_taper", "fake_ln", "none") else TYPES[norm].get(family, "LN")
    assert hooked.cfg.normalization_type == wanted
    left = [m for m in hooked.original_model.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)]
    assert len(left) == {"baseline": 5, "internal_taper": 1, "all_taper": 0, "fake_ln": 0, "none": 0}[norm]
    pre = to_hooked(ours, fold_gains=True)
    assert distance(pre(x), ours(x)) < 1e-13
    assert pre.cfg.normalization_type == (None if wanted is None else f"{wanted}Pre")
    single = to_hooked(ours.float())
    assert single(x).dtype is torch.float32
    assert distance(single(x), ours(x)) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_cache_has_the_usual_names(tmp_path: Path, family: str) -> None:
    ours, x = model(tmp_path, "internal_taper", family), tokens()
    taps: dict[str, Tensor] = {}
    ours.trunk(x, taps)
    logits, cache = to_hooked(ours).run_with_cache(x)
    for index in range(N_LAYER):
        assert distance(cache["resid_pre", index], taps[f"{index}.attn"]) < 1e-13
        assert distance(cache["resid_mid", index], taps[f"{index}.mlp"]) < 1e-13
        assert cache[f"blocks.{index}.attn.hook_pattern"].shape == (3, 2, 32, 32)
        assert cache[f"blocks.{index}.attn.hook_z"].shape == (3, 32, 2, 16)
        assert cache[f"blocks.{index}.mlp.hook_post"].shape == (3, 32, ours.config.d_ff)
        torch.testing.assert_close(cache["attn_scores", index].softmax(-1), cache["pattern", index])
    assert distance(cache["resid_post", N_LAYER - 1], taps["final"]) < 1e-13
    assert cache["ln_final.hook_scale"].shape == (3, 32, 1)
    assert distance(logits, ours(x)) < 1e-13


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_an_ablated_head_is_one_whose_rows_of_w_o_are_zero(tmp_path: Path, family: str) -> None:
    ours, x = model(tmp_path, "all_taper", family), tokens()
    hooked = to_hooked(ours)

    def ablate(z: Tensor, hook: Any) -> Tensor:
        z[:, :, 1] = 0
        return z

    ablated = hooked.run_with_hooks(x, fwd_hooks=[("blocks.0.attn.hook_z", ablate)])
    ours.blocks[0].attn.out.weight[:, 16:] = 0  # type: ignore[union-attr, index, operator]
    assert distance(ablated, ours(x)) < 1e-13
    assert distance(hooked(x), ours(x)) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_without_norms_the_logits_are_the_sum_over_components(tmp_path: Path, family: str) -> None:
    """By hand: every head, every MLP, the embeddings and the biases, each through W_U alone."""
    ours, x = model(tmp_path, "all_taper", family), tokens()
    hooked = to_hooked(ours)
    _, cache = hooked.run_with_cache(x)
    parts = [cache["embed"]] + ([cache["pos_embed"]] if family == "gpt2" else [])
    for index in range(N_LAYER):
        z, w_o = cache["z", index], hooked.W_O[index]
        parts += [z[:, :, head] @ w_o[head] for head in range(2)]
        parts += [cache["mlp_out", index]]
    if family == "gpt2":
        parts += [hooked.b_O[index].expand_as(parts[0]) for index in range(N_LAYER)]
    total = torch.stack([part @ hooked.W_U for part in parts]).sum(0) + hooked.b_U
    assert distance(total, ours(x)) < 1e-13
    assert hooked.b_U.abs().max() == 0 if family == "llama" else hooked.b_U.abs().max() > 0.1  # W beta
    for neurons in (False, True):
        stack, labels = cache.get_full_resid_decomposition(expand_neurons=neurons, apply_ln=True, return_labels=True)
        assert {"L0H0", "L1H1", "embed", "bias"} <= set(labels)
        assert distance(stack.sum(0) @ hooked.W_U + hooked.b_U, ours(x)) < 1e-13
    attribution = cache.logit_attrs(cache.decompose_resid(), tokens=x).sum(0) + hooked.b_U[x]
    assert distance(attribution, ours(x).gather(-1, x[..., None])[..., 0]) < 1e-13


@torch.no_grad()
def test_a_kept_norm_of_the_first_block_leaves_the_sum_whole(tmp_path: Path) -> None:
    ours, x = model(tmp_path, "all_but_first", "llama"), tokens()
    hooked = to_hooked(ours)
    assert [type(m) for m in hooked.original_model.modules() if isinstance(m, nn.RMSNorm)] == [nn.RMSNorm]
    _, cache = hooked.run_with_cache(x)
    parts = cache.get_full_resid_decomposition(expand_neurons=False)
    assert distance(parts.sum(0) @ hooked.W_U + hooked.b_U, ours(x)) < 1e-13


@torch.no_grad()
def test_removing_the_last_mlp_takes_its_share_only_without_a_final_norm(tmp_path: Path) -> None:
    def remove(x: Tensor, hook: Any) -> Tensor:
        return torch.zeros_like(x)

    errors = {}
    for norm in ("all_taper", "internal_taper"):
        hooked, x = to_hooked(model(tmp_path, norm, "gpt2"), fold_gains=True), tokens()
        logits, cache = hooked.run_with_cache(x)
        share = cache.apply_ln_to_stack(cache["mlp_out", 1][None])[0] @ hooked.W_U
        change = logits - hooked.run_with_hooks(x, fwd_hooks=[("blocks.1.hook_mlp_out", remove)])
        errors[norm] = distance(share, change)
    assert errors["all_taper"] < 1e-13 and errors["internal_taper"] > 0.05


def test_the_example_of_the_documentation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, "all_taper", "gpt2")
    text = (Path(__file__).parents[2] / "docs" / "interpretability.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    exec(compile(block.replace("runs/RUN", str(tmp_path / "step")), "docs/interpretability.md", "exec"), {})
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()] == [
        *("L0H0", "L0H1", "L1H0", "L1H1", "0_mlp_out", "1_mlp_out", "embed", "pos_embed", "bias")
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("norm", ["internal_taper", "baseline"])
@torch.no_grad()
def test_a_final_norm_leaves_a_sum_at_the_scale_of_each_token(tmp_path: Path, norm: str, family: str) -> None:
    ours, x = model(tmp_path, norm, family), tokens()
    hooked = to_hooked(ours, fold_gains=True)
    _, cache = hooked.run_with_cache(x)
    stack = cache.get_full_resid_decomposition(expand_neurons=False)
    scaled = cache.apply_ln_to_stack(stack)
    assert distance(scaled.sum(0) @ hooked.W_U + hooked.b_U, ours(x)) < 1e-13
    assert distance(stack.sum(0) @ hooked.W_U + hooked.b_U, ours(x)) > 0.1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("norm", MODES)
@torch.no_grad()
def test_its_compatibility_mode_keeps_the_probabilities(tmp_path: Path, norm: str, family: str) -> None:
    ours, x = model(tmp_path, norm, family), tokens()
    hooked = to_hooked(ours)
    hooked.enable_compatibility_mode()
    torch.testing.assert_close(hooked(x).log_softmax(-1), ours(x).log_softmax(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_generates_the_same(tmp_path: Path, family: str) -> None:
    ours, prompt = model(tmp_path, "all_taper", family), tokens(1, 5)
    made = to_hooked(ours).generate(
        prompt, max_new_tokens=12, do_sample=False, verbose=False, stop_at_eos=False, return_type="tokens"
    )
    assert made[0, 5:].tolist() == generate(ours, [prompt[0].tolist()], 12, temperature=0, eot=-1)[0]


@torch.no_grad()
def test_directories_of_checkpoints_and_of_exported_models(tmp_path: Path) -> None:
    x = tokens()
    for norm, family, form in (
        ("all_taper", "gpt2", "tapernorm"),
        ("internal_taper", "rotary_layer", "tapernorm"),
        ("baseline", "gpt2", "gpt2"),
        ("baseline", "llama", "llama"),
    ):
        ours, out = exported(tmp_path, norm, family, format=form)
        for source in (tmp_path / "step", str(out)):
            hooked = to_hooked(source)
            assert distance(hooked(x), ours(x)) < 1e-5
            assert hooked.to_tokens("a café").tolist() == [[EOT, *BYTES.encode("a café")]]
            assert hooked.to_tokens("it", prepend_bos=False).tolist() == [BYTES.encode("it")]
    export(
        ExportConfig(checkpoint=str(tmp_path / "step"), out=str(tmp_path / "half"), format="llama", dtype="bfloat16"),
    )
    hooked = to_hooked(tmp_path / "half")
    assert hooked(x).dtype is torch.float32 and distance(hooked(x), ours(x)) < 3e-2


@torch.no_grad()
def test_texts_of_different_lengths_are_what_they_are_alone(tmp_path: Path) -> None:
    texts = ["Hello", "A longer one"]
    for family in FAMILIES:
        hooked = to_hooked(saved(tmp_path / family, "all_taper", family))
        for side, rows in (("left", slice(-6, None)), ("right", slice(6))):
            assert distance(hooked(texts, padding_side=side)[0, rows], hooked("Hello")[0]) < 1e-5


def test_text_where_the_tokenizers_library_splits_otherwise_stays_ids(tmp_path: Path) -> None:
    other = Tokenizer("other", {bytes([byte]): byte for byte in range(256)}, pattern=r"\w+|\W")
    path = saved(tmp_path, "all_taper", "llama", tokenizer=other)
    export(ExportConfig(checkpoint=str(path), out=str(tmp_path / "hf")))
    for source in (path, tmp_path / "hf"):
        assert to_hooked(source).tokenizer is None
    decoder = checkpoints.load_model(path)[0]
    assert to_hooked(decoder).tokenizer is None and to_hooked(decoder, tokenizer=BYTES).tokenizer is not None


def test_a_folded_model_is_taken_as_it_is(tmp_path: Path) -> None:
    ours = model(tmp_path, "internal_taper", "gpt2")
    with torch.no_grad():
        hooked = to_hooked(fold(ours), fold_gains=False)
        assert hooked.cfg.normalization_type == "LNPre" and distance(hooked(tokens()), ours(tokens())) < 1e-13


def test_what_does_not_fit_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(source: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message) as fault:
            to_hooked(source)
        assert "\n" not in str(fault.value)

    refused(tmp_path / "nothing", "no such directory")
    refused(saved(tmp_path / "dyt", "dyt", "llama"), r"norm dyt: DyT at 0\.attn is no norm of TransformerLens")
    table = fold(checkpoints.load_model(saved(tmp_path / "table", "all_but_first", "llama"))[0], table=True)
    refused(table, r"0\.attn is a table by token id, which TransformerLens has no place for")
    refused(saved(tmp_path / "open", "all_taper", "gpt2", step=14), r"open gate .*gate 0\.5 at 0\.attn")
    _, out = exported(tmp_path, "all_taper", "gpt2", format="gpt2")
    refused(out, "all_taper_gpt2: its LayerNorms stand there without effect; export it with format=tapernorm")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    refused(tmp_path / "bert", "bert: model_type is bert there")
    (tmp_path / "bert" / "config.json").write_text(json.dumps({"model_type": "tapernorm", "n_layer": 2}))
    refused(tmp_path / "bert", r"bert: no exported model can be read \(KeyError: 'norms'\)")
    monkeypatch.setitem(sys.modules, "transformer_lens", None)
    monkeypatch.delitem(sys.modules, "transformer_lens.model_bridge.sources.native")
    refused(out, r"transformer_lens cannot be used \(.*\): pip install -c constraints\.txt -e '\.\[lens\]'")


def test_no_network_is_tried(tmp_path: Path) -> None:
    path = saved(tmp_path, "all_taper", "gpt2")
    program = (
        "import socket, sys\n"
        "def refuse(*arguments, **keys): raise SystemExit('the network was tried')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from tapernorm.interop.lens import to_hooked\n"
        "print(to_hooked(sys.argv[1]).run_with_cache('Hello')[0].shape)\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 6, 257])" in done.stdout
