"""Hugging Face form in and out: equal logits, one-line faults, fine-tuning from a model in that form."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tapernorm.config.options import Config
from tapernorm.config.resolve import resolve
from tapernorm.config.schema import ConfigError
from tapernorm.data.tokenizer import Tokenizer
from tapernorm.method.gate import Phase
from tapernorm.model.decoder import Decoder, build_model
from tapernorm.model.hf import is_hub_form, to_gpt2, to_stock
from tapernorm.runtime.record import read_metrics
from tapernorm.training import pretrained
from tests.conftest import GPT2
from tests.model.test_gpt2 import gpt2_of
from tests.training.test_training import run

transformers = pytest.importorskip("transformers")
VOCAB = 257  # of the bytes tokenizer
BYTES = Tokenizer("bytes", {bytes([byte]): byte for byte in range(256)})


def randomized(model: Any) -> Any:
    """Gains, biases and matrices all random, logits of order one."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * noise if parameter.dim() == 1 else 0.2 * noise
    return model.eval()


def save_gpt2(directory: Path, kind: str = "GPT2LMHeadModel", **keys: Any) -> Any:
    shape = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": VOCAB}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), 256)
    model = randomized(getattr(transformers, kind)(transformers.GPT2Config(**{**shape, **ends, **keys})))
    model.save_pretrained(directory, max_shard_size=keys.get("max_shard_size", "1GB"))
    return model


@pytest.fixture
def gpt2(tmp_path: Path) -> tuple[Path, Any]:
    """A small random GPT-2 as transformers saves it, and the model."""
    return tmp_path / "gpt2", save_gpt2(tmp_path / "gpt2")


def config_from(tiny: Callable[..., Config], where: Any, norm: str = "baseline", **model: Any) -> Config:
    sections = {"tokenizer": {"kind": "bytes"}, "optim": {"lr": 1e-3}}
    return resolve(tiny(norm=norm, model=GPT2 | {"init": str(where)} | model, **sections), VOCAB)


def loaded(config: Config) -> Decoder:
    pretrained.check(config)
    model = build_model(config)
    pretrained.initialize(model, config, BYTES)
    return model.eval()


def tokens(rows: int = 3, length: int = 32) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def assert_equal_logits(ours: Any, theirs: Any, x: Tensor) -> None:
    a, b = ours(x), theirs(x).logits
    assert b.abs().max() > 1
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


# ------------------------------------------------------------------------------------------------------------------ in


@torch.no_grad()
def test_gpt2_computes_what_transformers_does(tiny: Callable[..., Config], gpt2: tuple[Path, Any]) -> None:
    directory, theirs = gpt2
    ours, x = loaded(config_from(tiny, directory)), tokens()
    assert_equal_logits(ours, theirs, x)
    cache = ours.new_cache(3)
    parts = [ours.readout(ours.trunk(part, cache=cache)) for part in x.split([9, 1, 1, 21], 1)]
    wanted = theirs(x).logits
    torch.testing.assert_close(torch.cat(parts, 1), wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())
    tapered = loaded(config_from(tiny, directory, norm="all_taper"))
    assert torch.equal(tapered(x), ours(x))


def test_other_ways_to_save_it(tiny: Callable[..., Config], tmp_path: Path) -> None:
    """Without the `transformer.` prefix and with the masks of old files; in shards; untied; a shorter context."""
    theirs = save_gpt2(tmp_path / "headless", kind="GPT2Model")
    path = tmp_path / "headless" / "model.safetensors"
    save_file(load_file(path) | {"h.0.attn.bias": torch.ones(1, 1, 32, 32).tril()}, path)
    x = tokens(2, 16)
    wanted = theirs(x).last_hidden_state @ theirs.wte.weight.T
    ours = loaded(config_from(tiny, tmp_path / "headless", n_ctx=16))
    torch.testing.assert_close(ours(x), wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())
    sharded = save_gpt2(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert_equal_logits(loaded(config_from(tiny, tmp_path / "shards")), sharded, x)
    untied = save_gpt2(tmp_path / "untied", tie_word_embeddings=False)
    assert_equal_logits(loaded(config_from(tiny, tmp_path / "untied", tied=False)), untied, x)


def test_llama_comes_in_too(tiny: Callable[..., Config], tmp_path: Path) -> None:
    config = resolve(tiny(norm="baseline", tokenizer={"kind": "bytes"}), VOCAB)
    theirs = to_stock(randomized(build_model(config)))
    theirs.save_pretrained(tmp_path / "llama")
    again = resolve(tiny(norm="baseline", tokenizer={"kind": "bytes"}, model={"init": str(tmp_path / "llama")}), VOCAB)
    assert_equal_logits(loaded(again), theirs, tokens())


def test_a_llama_that_is_more_than_ours_is_named(tiny: Callable[..., Config], tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2, "max_position_embeddings": 32}
    llama = transformers.LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1, vocab_size=VOCAB)
    transformers.LlamaForCausalLM(llama).save_pretrained(tmp_path / "grouped")
    config = tiny(norm="baseline", model={"init": str(tmp_path / "grouped")})
    with pytest.raises(ConfigError, match=r"grouped: num_key_value_heads is 1 there; only 2 can be read"):
        pretrained.check(config)


def test_fine_tuning_starts_where_it_is_and_tapers(
    tiny: Callable[..., Config], tmp_path: Path, gpt2: tuple[Path, Any]
) -> None:
    directory, theirs = gpt2
    for parameter in theirs.parameters():
        parameter.data *= 0.3
    theirs.save_pretrained(directory)
    sections = {
        "tokenizer": {"kind": "bytes"},
        "optim": {"lr": 1e-4},
        "trainer": {"log_interval": 1, "val_interval": 1},
    }
    config = tiny(norm="all_taper", model=GPT2 | {"init": str(directory), "dropout": 0.0}, **sections)
    summary = run(config, tmp_path / "run")
    first = read_metrics(tmp_path / "run")[0]
    assert summary["gate"] == 0.0 and summary["val_loss"] < first["val/loss"] + 0.05
    assert abs(first["train/loss"] - first["val/loss"]) < 0.5
    shutil.rmtree(directory)  # a resumed run does not need what it once started from
    run(config, tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000016")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"d_model": 64}, r"model\.d_model is 32 there and 64 here"),
        ({"n_layer": 3}, r"model\.n_layer is 2 there and 3 here"),
        ({"tied": False}, r"model\.tied is True there and False here"),
        ({"positions": "rotary"}, r"model\.positions is learned there and rotary here"),
        ({"norm_eps": 1e-6}, r"model\.norm_eps is 1e-05 there and 1e-06 here"),
        ({"n_layer": 3, "norm_eps": 1.0}, r": model\.n_layer is 2 .* here, model\.norm_eps is 1e-05 .*; use the same"),
        ({"n_ctx": 64}, r"model\.n_ctx is 32 there and 64 here"),
    ],
)
def test_another_shape_is_named_before_the_data_is_prepared(
    tiny: Callable[..., Config], gpt2: tuple[Path, Any], model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as fault:
        pretrained.check(config_from(tiny, gpt2[0], **model))
    assert "\n" not in str(fault.value) and f"model.init={gpt2[0]}" in str(fault.value)


def test_another_vocabulary_is_named(tiny: Callable[..., Config], gpt2: tuple[Path, Any]) -> None:
    config = resolve(tiny(norm="baseline", model=GPT2 | {"init": str(gpt2[0])}), 400)
    with pytest.raises(ConfigError, match="vocab_size is 257 there and the tokenizer has 400 ids; tokenizer=gpt2"):
        pretrained.initialize(build_model(config), config, BYTES)


def test_another_tokenizer_of_the_same_size_is_named(tiny: Callable[..., Config], gpt2: tuple[Path, Any]) -> None:
    config = config_from(tiny, gpt2[0])
    turned = Tokenizer("bytes", {bytes([255 - byte]): byte for byte in range(256)})
    for tokenizer, message in (
        (BYTES, None),
        (turned, r"another tokenizer; .* tokenizer\.ranks=.*tokenizer\.js"),
    ):
        fast = tokenizer.to_fast()
        assert fast is not None
        fast.save(str(gpt2[0] / "tokenizer.json"))
        with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
            pretrained.initialize(build_model(config), config, BYTES)


def _edit(directory: Path, **keys: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: _edit(path, model_type="tapernorm"), "a norm-free export, which has no norms left; name the run"),
        (lambda path: _edit(path, model_type="bert"), "model_type is bert there; gpt2 and llama can be read"),
        (lambda path: _edit(path, activation_function="relu"), "activation_function is relu there; only gelu_new"),
        (lambda path: _edit(path, n_head=None), r"config\.json cannot be read"),
        (lambda path: (path / "config.json").write_text("{"), r"config\.json cannot be read"),
        (lambda path: (path / "model.safetensors").write_bytes(b"nothing"), "weights cannot be read"),
        (
            lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
            r"no model\.safetensors; pytorch_model\.bin is a pickle",
        ),
        (lambda path: save_file({"x": torch.ones(1)}, path / "model.safetensors"), "its tensors are not gpt2's"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    tiny: Callable[..., Config], gpt2: tuple[Path, Any], damage: Callable[[Path], object], message: str
) -> None:
    damage(gpt2[0])
    with pytest.raises(ConfigError, match=message) as fault:
        loaded(config_from(tiny, gpt2[0]))
    assert "\n" not in str(fault.value)


def test_hub_ids(tiny: Callable[..., Config], gpt2: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked: list[str] = []

    def download(name: str, **keys: Any) -> str:
        asked.append(name)
        assert not any("bin" in pattern or "*.py" in pattern for pattern in keys["allow_patterns"])
        return str(gpt2[0])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert_equal_logits(loaded(config_from(tiny, "openai-community/gpt2")), gpt2[1], tokens())
    assert set(asked) == {"openai-community/gpt2"}

    def unreachable(name: str, **keys: Any) -> str:
        raise LocalEntryNotFoundError("no\nnetwork")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigError, match=r"openai-community/gpt2: no directory .* cache /.*model\.init=<dir") as fault:
        pretrained.check(config_from(tiny, "openai-community/gpt2"))
    assert "\n" not in str(fault.value)
    assert not is_hub_form("./runs/x") and not is_hub_form("/nowhere/at/all") and not is_hub_form("a/b/c")
    with pytest.raises(ConfigError, match=r"^model\.init=.*: checkpoint .*: no such directory"):
        pretrained.check(config_from(tiny, "/nowhere/at/all"))


# ----------------------------------------------------------------------------------------------------------------- out


def test_gpt2_goes_out_as_it_came_in(tiny: Callable[..., Config], gpt2: tuple[Path, Any]) -> None:
    ours = loaded(config_from(tiny, gpt2[0]))
    back = to_gpt2(ours).state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in gpt2[1].state_dict().items())


def test_removed_layer_norms_in_the_stock_layout() -> None:
    """No variance of a token comes near the epsilon, so the layer is linear; one epsilon serves all or none."""
    ours = gpt2_of("all_taper").float()
    theirs = to_gpt2(ours)
    for scale in (1.0, 1e4):  # a residual stream ten thousand times as large
        ours.embed.weight.data *= scale
        theirs.transformer.wte.weight.data = ours.embed.weight.data.clone()
        x = torch.randint(0, 97, (2, 32))
        a, b = ours(x), theirs(x).logits
        assert (a - b).abs().max() < 1e-4 * a.abs().max()
    with pytest.raises(ConfigError, match=r"one epsilon.* and 0\.attn does not fit"):
        to_gpt2(gpt2_of("internal_taper"))
    half = gpt2_of("all_taper")
    half.set_gate(0.5, Phase.TAPERING)
    with pytest.raises(ConfigError, match=r"and 0\.attn does not fit"):
        to_gpt2(half)


def test_what_is_neither_is_refused(tiny: Callable[..., Config]) -> None:
    model = build_model(resolve(tiny(norm="baseline", model={"biases": True}), VOCAB))
    with pytest.raises(ConfigError, match=r"model\.biases is True; llama has False"):
        to_stock(model)


def logits_of(tiny: Callable[..., Config], directory: Path, **model: Any) -> Tensor:
    config = config_from(tiny, directory, **model)
    decoder = build_model(config)
    pretrained.initialize(decoder, config, BYTES)
    with torch.no_grad():
        return decoder.eval()(torch.arange(32).reshape(1, 32))


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def test_P46_a_head_that_is_not_the_embedding_is_not_dropped(
    tiny: Callable[..., Config], gpt2: tuple[Path, Any]
) -> None:
    directory, model = gpt2
    before = logits_of(tiny, directory)
    embed = model.transformer.wte.weight.detach().clone()
    rewrite(directory, lambda theirs: theirs | {"lm_head.weight": embed})  # as some programs save a tied one
    assert torch.equal(logits_of(tiny, directory), before)
    rewrite(directory, lambda theirs: theirs | {"lm_head.weight": embed + 1e-3})
    with pytest.raises(ConfigError, match=r"tie_word_embeddings, but lm_head\.weight is not transformer\.wte\.weight"):
        logits_of(tiny, directory)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": False}))
    assert not torch.equal(logits_of(tiny, directory, tied=False), before)


@pytest.mark.parametrize("case", ["head alone", "module.", "_orig_mod.module.", "aliases", "byte order mark"])
def test_P47_other_spellings_of_the_same_model_are_read(
    tiny: Callable[..., Config], gpt2: tuple[Path, Any], case: str
) -> None:
    directory, file = gpt2[0], gpt2[0] / "config.json"
    before = logits_of(tiny, directory)
    if case == "head alone":
        rewrite(
            directory,
            lambda theirs: {name.replace("transformer.wte", "lm_head"): tensor for name, tensor in theirs.items()},
        )
    elif case == "aliases":
        given = json.loads(file.read_text())
        shape = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
        shape["n_positions"] = "max_position_embeddings"
        given.pop("n_ctx", None)
        file.write_text(json.dumps({shape.get(name, name): value for name, value in given.items()}))
    elif case == "byte order mark":
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    else:
        rewrite(directory, lambda theirs: {case + name: tensor for name, tensor in theirs.items()})
    assert torch.equal(logits_of(tiny, directory), before)
