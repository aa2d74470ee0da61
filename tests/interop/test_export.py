"""Exported models: they load without this package, compute the same, generate, train on, and are saved again."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from tapernorm.analysis.evaluate import evaluate_checkpoint
from tapernorm.analysis.measure import save_folded
from tapernorm.config.programs import EvaluateConfig, ExportConfig
from tapernorm.config.resolve import build, resolve
from tapernorm.config.schema import ConfigError
from tapernorm.data.tokenizer import Tokenizer
from tapernorm.interop.export import _write_norm_free as write_norm_free
from tapernorm.interop.export import export, norm_free_config, read_exported
from tapernorm.model.decoder import Decoder, build_model
from tapernorm.model.fold import fold
from tapernorm.model.generate import generate
from tapernorm.training import checkpoint as checkpoints
from tapernorm.training.pretrained import load_foreign
from tests.conftest import GPT2, NORMS, TINY, merge
from tests.training.test_training import run

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("modules")
ROOT = Path(__file__).parents[2]
BYTES = Tokenizer("bytes", {bytes([byte]): byte for byte in range(256)})
VOCAB, EOT = BYTES.n_vocab, BYTES.eot
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "gpt2": GPT2, "rotary_layer": {"norm_family": "layer"}}
KINDS = NORMS | {"all_but_first": {"kind": "taper", "name": "all_but_first", "sites": ["1-.attn", "mlp", "final"]}}
MODES = ("baseline", "internal_taper", "all_taper", "fake_ln", "none")


def saved(directory: Path, norm: str, family: str, step: int = 24, tokenizer: Tokenizer = BYTES) -> Path:
    """A checkpoint of a random model with logits of order one, at gate 0 unless `step` is an earlier one."""
    tree = merge(TINY, {"norm": KINDS[norm], "model": FAMILIES[family], "tokenizer": {"kind": "bytes"}})
    config = resolve(build(tree), VOCAB)
    decoder, generator = build_model(config), torch.Generator().manual_seed(3)
    for parameter in decoder.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = parameter.data + 0.3 * noise if parameter.dim() == 1 else 0.15 * noise
    for number, layer in enumerate(decoder.gated_norms().values()):
        layer.c.fill_(0.7 + 0.1 * number)
    meta = {"gate": 0.0, "phase": "tapered", "tokens": 3072, "val_loss": 4.5, "train_loss": 4.6, "data": "gone"}
    return checkpoints.write(
        directory / "step", step, model=decoder.state_dict(), training={}, config=config, tokenizer=tokenizer, meta=meta
    )


def exported(tmp_path: Path, norm: str, family: str, **keys: Any) -> tuple[Decoder, Path]:
    """The checkpoint's own model and the directory that it is exported to."""
    path, out = saved(tmp_path, norm, family), tmp_path / f"{norm}_{family}"
    export(ExportConfig(**{"checkpoint": str(path), "out": str(out), "format": "tapernorm", **keys}))
    return checkpoints.load_model(path)[0].eval(), out


def load(out: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()


def tokens(rows: int = 3, length: int = 32) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def assert_close(a: Tensor, b: Tensor) -> None:
    assert b.abs().max() > 0.3
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("norm", MODES)
@torch.no_grad()
def test_the_same_logits_and_the_same_text_without_the_norms(tmp_path: Path, norm: str, family: str) -> None:
    ours, out = exported(tmp_path, norm, family)
    theirs, x = load(out), tokens()
    assert_close(theirs(x).logits, ours(x))
    assert_close(theirs(x, logits_to_keep=2).logits, ours(x)[:, -2:])
    kinds = [type(module) for module in theirs.modules() if isinstance(module, nn.LayerNorm | nn.RMSNorm)]
    assert len(kinds) == {"baseline": 5, "internal_taper": 1, "all_taper": 0, "fake_ln": 0, "none": 0}[norm]
    assert not any(path.suffix in (".bin", ".pt", ".pkl", ".pth") for path in out.iterdir())

    prompts = [row[:n].tolist() for row, n in zip(x, (1, 4, 11), strict=True)]
    padded = torch.tensor([[EOT] * (11 - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (11 - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    assert_close(theirs(padded, attention_mask=mask).logits[0, -1], ours(x[:1, :1])[0, -1])
    for use_cache in (True, False):
        rows = theirs.generate(padded, attention_mask=mask, max_new_tokens=15, do_sample=False, use_cache=use_cache)
        texts = [row[11:].tolist() for row in rows]
        texts = [text[: text.index(EOT)] if EOT in text else text for text in texts]
        assert texts == generate(ours, prompts, 15, temperature=0, eot=EOT)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("norm", [*MODES, "final_taper"])
@pytest.mark.parametrize("gains", [False, True])
def test_the_format_is_read_back(tmp_path: Path, norm: str, family: str, gains: bool) -> None:
    """config.json says all of a folded model: read back, it is built with the same layers and biases."""
    folded = fold(checkpoints.load_model(saved(tmp_path, norm, family))[0], gains=gains)
    write_norm_free(tmp_path, folded, BYTES, torch.float32)
    again = read_exported(tmp_path)
    assert norm_free_config(again) == norm_free_config(folded)
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens()), folded.eval()(tokens()))


@pytest.mark.parametrize("family", FAMILIES)
def test_it_trains_on_and_is_saved_again(tmp_path: Path, family: str) -> None:
    ours, out = exported(tmp_path, "internal_taper", family)
    theirs, x = load(out).train(), tokens()
    theirs.config.dropout = 0.0
    for module in theirs.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.0
    loss = theirs(x, labels=x).loss
    wanted, _ = ours.loss(x[:, :-1], x[:, 1:])
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    summed = theirs(x, labels=x, num_items_in_batch=10).loss
    assert summed.item() == pytest.approx(loss.item() * 3 * 31 / 10, rel=1e-5)
    loss.backward()
    assert all(parameter.grad is not None for parameter in theirs.parameters())
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    assert theirs(x, labels=x).loss < loss
    again = tmp_path / f"again_{family}"
    theirs.save_pretrained(again)
    assert {"modeling_tapernorm.py", "configuration_tapernorm.py", "model.safetensors"} <= {
        p.name for p in again.iterdir()
    }
    assert not any(path.suffix in (".bin", ".pt") for path in again.iterdir())
    with torch.no_grad():
        assert torch.equal(load(again)(x).logits, theirs.eval()(x).logits)


def test_it_loads_where_this_package_is_not(tmp_path: Path) -> None:
    _, out = exported(tmp_path, "all_taper", "gpt2")
    program = (
        "import sys, importlib.abc\n"
        "class Refuse(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'tapernorm': raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "batch = tokenizer(['Hello', 'A longer one'], return_tensors='pt', padding=True)\n"
        "print(model.generate(**batch, max_new_tokens=3, do_sample=False).shape)\n"
    )
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", program, str(out)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([2, 15])" in done.stdout


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    _, out = exported(tmp_path, "baseline", "llama")
    fast = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    text = "It's a café, isn't it?  数字\n"
    assert fast.encode(text) == BYTES.encode(text) and fast.decode(BYTES.encode(text)) == text
    assert (fast.eos_token_id, fast.pad_token_id, fast.padding_side) == (EOT, EOT, "left")
    other = Tokenizer("other", {bytes([byte]): byte for byte in range(256)}, pattern=r"\w+|\W")
    path = saved(tmp_path / "other", "baseline", "llama", tokenizer=other)
    export(ExportConfig(checkpoint=str(path), out=str(tmp_path / "hf")))
    assert "There is no AutoTokenizer" in (tmp_path / "hf" / "README.md").read_text()
    assert not (tmp_path / "hf" / "tokenizer.json").exists()
    assert Tokenizer.load(tmp_path / "hf" / "tiktoken").fingerprint == other.fingerprint


def test_gains_may_fold_too_and_folded_checkpoints_go_out(tmp_path: Path) -> None:
    ours, out = exported(tmp_path, "internal_taper", "gpt2", fold_gains=True)
    theirs, x = load(out), tokens()
    with torch.no_grad():
        assert_close(theirs(x).logits, ours(x))
    assert theirs.final_norm.weight is None and theirs.head is not None
    assert json.loads((out / "config.json").read_text())["norm_gain"] is False


@pytest.mark.parametrize("family", ["llama", "rotary_layer"])
@torch.no_grad()
def test_a_table_goes_along(tmp_path: Path, family: str) -> None:
    ours, out = exported(tmp_path, "all_but_first", family, fold_table=True)
    theirs, x = load(out), tokens()
    assert_close(theirs(x).logits, ours(x))
    assert not any(isinstance(module, nn.LayerNorm | nn.RMSNorm) for module in theirs.modules())
    assert json.loads((out / "config.json").read_text())["norms"] == ["table", *["none"] * 4]
    assert json.loads((out / "certificate.json").read_text())["norm_operations"] == {"unfolded": 1, "folded": 0}
    back = read_exported(out).eval()
    assert torch.equal(back(x), fold(ours, gains=False, table=True)(x))
    assert (theirs.double()(x).logits - back.double()(x)).abs().max() < 1e-12 * back(x).abs().max()
    prompts = [row[:6].tolist() for row in x]
    wanted = generate(ours, prompts, 15, temperature=0, eot=-1)
    for use_cache in (True, False):
        rows = theirs.generate(
            x[:, :6],
            attention_mask=torch.ones_like(x[:, :6]),
            max_new_tokens=15,
            do_sample=False,
            use_cache=use_cache,
            eos_token_id=-1,
        )
        assert rows[:, 6:].tolist() == wanted
    with pytest.raises(ValueError, match="give input_ids, not inputs_embeds"):
        theirs(inputs_embeds=theirs.embed(x))
    theirs.save_pretrained(tmp_path / "again")
    assert torch.equal(load(tmp_path / "again").double()(x).logits, theirs(x).logits)


def test_a_baseline_with_a_table_has_no_stock_layout(tmp_path: Path) -> None:
    _, out = exported(tmp_path, "baseline", "llama", format="auto", fold_table=True)
    assert json.loads((out / "config.json").read_text())["norms"] == ["table", *["rms"] * 4]
    path = saved(tmp_path / "plain", "all_but_first", "llama")
    model, config, _ = checkpoints.load_model(path)
    folded = fold(model)
    meta = checkpoints.read_meta(path)
    save_folded(tmp_path / "folded", folded, config, BYTES, meta, {})
    with pytest.raises(ConfigError, match="folded already"):
        export(ExportConfig(checkpoint=str(tmp_path / "folded"), out=str(tmp_path / "x"), fold_table=True))


@pytest.mark.parametrize(("dtype", "stored"), [("float32", "F32"), ("bfloat16", "BF16"), ("float16", "F16")])
def test_the_precision_of_the_weights(tmp_path: Path, dtype: str, stored: str) -> None:
    _, out = exported(tmp_path, "all_taper", "llama", dtype=dtype)
    with safe_open(out / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {stored}  # noqa: SIM118
    assert load(out).dtype == getattr(torch, dtype)


@pytest.mark.parametrize(("norm", "family"), [("baseline", "llama"), ("baseline", "gpt2"), ("all_taper", "gpt2")])
@torch.no_grad()
def test_stock_layouts_need_no_code(tmp_path: Path, norm: str, family: str) -> None:
    ours, out = exported(tmp_path, norm, family, format=family)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    a, b = ours(tokens()), theirs.eval()(tokens()).logits
    assert (a - b).abs().max() < 1e-4 * a.abs().max()
    assert not list(out.glob("*.py")) and not list(out.glob("*.bin"))
    card, settings = (out / "README.md").read_text(), json.loads((out / "config.json").read_text())
    tapered = norm == "all_taper"
    assert ("compatibility format" in card) is tapered
    assert settings.get("tapernorm_compatibility_format", False) is tapered
    assert json.loads((out / "certificate.json").read_text())["max_logit_error"] < 1e-3
    if family == "gpt2":  # what a table of evaluate.py calls it
        assert load_foreign(str(out))[1].norm.name == ("none" if tapered else "baseline")


@pytest.mark.parametrize(
    ("norm", "family", "keys", "message"),
    [
        ("baseline", "llama", {"format": "gpt2"}, "format=gpt2: this model is no gpt2; use format=llama"),
        ("baseline", "rotary_layer", {"format": "llama"}, "use format=tapernorm"),
        ("internal_taper", "gpt2", {"format": "gpt2"}, r"one epsilon.*0\.attn does not fit; the tapernorm format"),
        ("all_taper", "gpt2", {"format": "gpt2", "dtype": "float16"}, "float16 cannot hold"),
        ("all_taper", "llama", {"format": "llama"}, r"Llama has an RMSNorm with a gain at 0\.attn"),
        ("dyt", "llama", {}, r"DyT at 0\.attn has no Hugging Face form"),
        ("baseline", "llama", {"format": "llama", "fold_table": True}, "format=llama has no place for a table"),
        ("all_but_first", "gpt2", {"fold_table": True}, "fold_table: with model.positions=learned"),
        ("all_taper", "llama", {"fold_table": True}, r"fold_table: .*no standard norm at 0\.attn"),
    ],
)
def test_what_does_not_fit_is_one_line_and_leaves_nothing(
    tmp_path: Path, norm: str, family: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as fault:
        exported(tmp_path, norm, family, **keys)
    assert "\n" not in str(fault.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_an_open_gate_and_an_existing_directory_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, "all_taper", "gpt2", step=14)
    for form in ("auto", "gpt2"):
        with pytest.raises(ConfigError, match=r"open gate .*gate 0\.5 at 0\.attn"):
            export(ExportConfig(checkpoint=str(path), out=str(tmp_path / "new"), format=form))
    with pytest.raises(ConfigError, match="exists already; name a new directory"):
        export(ExportConfig(checkpoint=str(path), out=str(tmp_path)))


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **keys: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tapernorm.interop.export.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        exported(tmp_path, "all_taper", "gpt2")
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_P51_what_stock_models_return_is_returned(tmp_path: Path, family: str) -> None:
    ours, out = exported(tmp_path, "internal_taper", family)
    model, x = load(out), tokens()
    with torch.no_grad():
        plain = model(x)
        both = model(x, output_hidden_states=True, output_attentions=True)
        taps: dict[str, Tensor] = {}
        ours.trunk(x, taps=taps)
    torch.testing.assert_close(both.logits, plain.logits, rtol=1e-4, atol=1e-5)
    assert plain.hidden_states is None and plain.attentions is None
    assert len(both.hidden_states) == 3 and len(both.attentions) == 2
    torch.testing.assert_close(both.hidden_states[0], taps["0.attn"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(both.hidden_states[1], taps["1.attn"], rtol=1e-4, atol=1e-5)
    for weights in both.attentions:
        assert weights.shape == (3, 2, 32, 32) and not weights.triu(1).any()
        torch.testing.assert_close(weights.sum(-1), torch.ones(3, 2, 32))
    model.set_attn_implementation("eager")
    padding = torch.ones_like(x)
    padding[0, :5] = 0
    with torch.no_grad():
        eager = model(x, attention_mask=padding).logits
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(eager, model(x, attention_mask=padding).logits, rtol=1e-4, atol=1e-5)
        shifted = torch.cat([x[:, 1:], torch.full((3, 1), -100)], dim=1)
        assert model(x, shift_labels=shifted).loss == pytest.approx(model(x, labels=x).loss.item(), rel=1e-6)
    with pytest.raises(TypeError, match="does not know the argument token_type_ids"):
        model(x, token_type_ids=x)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_P51_packed_texts_do_not_see_each_other(tmp_path: Path, family: str) -> None:
    model, x = load(exported(tmp_path, "all_taper", family)[1]), tokens(2, 24)
    positions = torch.cat([torch.arange(9), torch.arange(15)])[None].expand(2, -1)
    with torch.no_grad():
        packed = model(x, position_ids=positions).logits
        apart = torch.cat([model(x[:, :9]).logits, model(x[:, 9:]).logits], dim=1)
        whole = model(x, position_ids=torch.arange(24)[None]).logits
        torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(whole, model(x).logits, rtol=1e-4, atol=1e-5)
    assert (packed - whole).abs().max() > 0.1


def test_P51_a_trainer_trains_evaluates_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    _, out = exported(tmp_path, "all_taper", "llama")
    rows = [{"input_ids": row, "labels": row} for row in tokens(16)]

    def trainer(folder: str, steps: int, **keys: Any) -> Any:
        given = transformers.TrainingArguments(
            output_dir=str(tmp_path / folder), max_steps=steps, per_device_train_batch_size=4, eval_strategy="steps",
            eval_steps=2, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, seed=1, **keys,
        )  # fmt: skip
        return transformers.Trainer(model=load(out), args=given, train_dataset=rows, eval_dataset=rows[:4])

    whole = trainer("whole", 4)
    whole.train()
    assert math.isfinite(whole.evaluate()["eval_loss"]) and whole.predict(rows[:4]).predictions.shape == (4, 32, VOCAB)
    again = trainer("again", 4)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name
    whole.save_model(str(tmp_path / "saved"))
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "saved")(tokens()).logits, whole.model.eval()(tokens()).logits)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_P52_an_export_knows_its_limits(tmp_path: Path, family: str) -> None:
    model = load(exported(tmp_path, "all_taper", family)[1])
    with pytest.raises(ValueError, match="there is no token to read; begin with the bos_token_id"):
        model(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="33 tokens are more than the 32 that this model knows"):
        model(tokens(1, 33))
    with pytest.raises(ValueError, match="33 tokens are more than the 32"):
        model.generate(tokens(1, 30), max_new_tokens=9, do_sample=False, eos_token_id=None)
    assert model.generate(tokens(1, 30), max_new_tokens=2, do_sample=False, eos_token_id=None).shape == (1, 32)


def test_from_a_run_to_a_card_with_its_numbers(tmp_path: Path, said: list[str]) -> None:
    """Train, export the run and its folded checkpoint; the certificate is on the run's validation text."""
    tree = merge(TINY, {"norm": NORMS["all_taper"], "model": GPT2, "optim": {"lr": 3e-3}})
    summary = run(resolve(build(tree)), tmp_path / "run")
    export(ExportConfig(checkpoint=str(tmp_path / "run"), out=str(tmp_path / "hf")))
    card, proof = (
        (tmp_path / "hf" / "README.md").read_text(),
        json.loads((tmp_path / "hf" / "certificate.json").read_text()),
    )
    for text in (f"{summary['val_loss']:.4f} nats", "3,072 tokens, 24 steps", "all_taper", "on validation tokens"):
        assert text in card
    assert proof["text"] == "validation tokens" and proof["norm_operations"]["folded"] == 0
    assert proof["errors"]["float32"]["max_logit_error"] < 1e-4
    assert said[-1].endswith("format tapernorm")
    evaluate_checkpoint(
        EvaluateConfig(checkpoint=str(tmp_path / "run"), save_folded=str(tmp_path / "folded"), samples=0)
    )
    export(ExportConfig(checkpoint=str(tmp_path / "folded"), out=str(tmp_path / "hf2")))
    with torch.no_grad():
        a, b = (load(tmp_path / name)(tokens() % 257).logits for name in ("hf", "hf2"))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_command(tmp_path: Path) -> None:
    saved(tmp_path, "internal_taper", "gpt2")
    command = [sys.executable, str(ROOT / "scripts" / "export_hf.py"), "checkpoint=step"]
    done = subprocess.run([*command, "out=hf"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "format tapernorm" in done.stdout and (tmp_path / "hf" / "config.json").is_file()
    again = subprocess.run([*command, "out=hf"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert again.returncode == 2 and again.stderr.count("\n") == 1 and "exists already" in again.stderr
