"""A small GPT-2 trained and saved by transformers, freed of its norms here by every recipe, loaded by transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from torch import Tensor, nn

from tapernorm.cli import composition
from tapernorm.config.options import Config
from tapernorm.config.programs import ExportConfig
from tapernorm.config.resolve import build, resolve
from tapernorm.data.prepare import Prepared, prepare
from tapernorm.interop.export import export
from tapernorm.model.decoder import build_model
from tapernorm.model.generate import generate
from tapernorm.runtime.record import read_metrics
from tapernorm.training import checkpoint as checkpoints
from tapernorm.training import pretrained
from tapernorm.training.loop import train
from tests.conftest import SHARED

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("modules")
N_CTX, STEPS = 64, 60
EXPERIMENTS = ("vanilla", "taper_internal", "taper_all", "fake_ln")
# Everything that is smaller than in the published recipe; what an experiment is made of stays its own.
SCALED_DOWN = [
    "model.n_layer=2 model.d_model=48 model.head_dim=16 model.n_ctx=64 model.vocab_size=null model.dropout=0.05",
    "tokenizer=bpe optim.lr=0.001 optim.warmup_steps=6 gate.first_removal=12 gate.gaps=[2,2,3]",
    f"trainer.max_steps={STEPS} trainer.batch_size=16 trainer.accumulation=1 trainer.val_tokens=4096",
    "trainer.samples=0 trainer.device=cpu trainer.progress=none tracking=none report=false",
]


def scaled_down(experiment: str, start: Path) -> Config:
    """The experiment as it composes, with a small model and few steps; real text where it lies beside the checkout."""
    text = ["dataset=toy_tiny"]
    if (SHARED / "tinystories_valid.txt").is_file():
        text = ["dataset=text", f"dataset.train={SHARED}/tinystories_valid.txt", "dataset.vocab_size=512"]
    given = [f"experiment=gpt2/{experiment}", *" ".join(SCALED_DOWN).split(), *text, f"model.init={start}"]
    composition.register()
    with initialize_config_dir(str(composition.CONFIGS), version_base="1.3"):
        return build(composition.plain(compose("train", given)))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A small GPT2LMHeadModel after 300 steps of training in plain torch, and where transformers saved it."""
    directory = tmp_path_factory.mktemp("start") / "gpt2"
    data = prepare(scaled_down("vanilla", directory))
    torch.manual_seed(0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), data.tokenizer.eot)
    shape = {"n_layer": 2, "n_embd": 48, "n_head": 3, "n_positions": N_CTX, "vocab_size": data.tokenizer.n_vocab}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **ends))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    starts = np.random.default_rng(0).integers(0, len(data.train.tokens) - N_CTX, (300, 16))
    for batch in starts:
        x = torch.from_numpy(np.stack([data.train.tokens[i : i + N_CTX] for i in batch]).astype(np.int64))
        model(x, labels=x).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    return directory, model.eval()


@pytest.fixture(scope="module", params=EXPERIMENTS)
def tuned(request: pytest.FixtureRequest, gpt2: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(experiment, configuration, data, run's directory, summary)."""
    config = scaled_down(request.param, gpt2[0])
    directory = tmp_path_factory.mktemp(request.param)
    summary = train(config, directory)
    data = prepare(config)
    return request.param, resolve(config, data.tokenizer.n_vocab), data, directory, summary


def windows(data: Prepared) -> tuple[Tensor, Tensor]:
    flat = torch.from_numpy(data.valid.tokens[: 32 * N_CTX + 1].astype(np.int64))
    return flat[:-1].view(32, N_CTX), flat[1:].view(32, N_CTX)


def loss(logits: Tensor, targets: Tensor) -> float:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


@torch.no_grad()
def test_it_starts_with_the_logits_of_transformers(gpt2: tuple[Path, Any], tuned: Any) -> None:
    _, config, data, _, _ = tuned
    model = build_model(config)
    pretrained.initialize(model, config, data.tokenizer)
    x, _ = windows(data)
    wanted = gpt2[1](x).logits
    torch.testing.assert_close(model.eval()(x), wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


@torch.no_grad()
def test_every_recipe_reaches_its_end_and_goes_on_learning(gpt2: tuple[Path, Any], tuned: Any) -> None:
    experiment, _, data, directory, summary = tuned
    assert summary["steps"] == STEPS and math.isfinite(summary["val_loss"])
    gates = {row["step"]: row["gate/g"] for row in read_metrics(directory) if "gate/g" in row}
    assert gates[STEPS] == summary["gate"] == (1.0 if experiment == "vanilla" else 0.0)
    x, y = windows(data)
    before = loss(gpt2[1](x).logits, y)
    assert summary["val_loss"] < before + 0.1, "removing the norms cost more than fine-tuning brought"
    assert bool(summary["c"]) is (experiment != "vanilla")


@torch.no_grad()
def test_exported_it_is_the_same_model_in_transformers(tuned: Any, tmp_path: Path) -> None:
    experiment, _, data, directory, _ = tuned
    ours, _, tokenizer = checkpoints.load_model(checkpoints.find(directory))
    x, y = windows(data)
    reference = loss(ours.eval()(x), y)
    norms = {"vanilla": 5, "taper_internal": 1, "taper_all": 0, "fake_ln": 0}[experiment]
    kinds = ["tapernorm"] if experiment == "taper_internal" else ["tapernorm", "gpt2"]
    for kind in kinds:
        out = tmp_path / kind
        exporting = ExportConfig(checkpoint=str(directory), out=str(out), format=kind)
        export(exporting)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=kind == "tapernorm").eval()
        assert loss(theirs(x).logits, y) == pytest.approx(reference, abs=1e-4)
        prompt = [tokenizer.eot, *tokenizer.encode("One day, a little girl")]
        ids = theirs.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)[0, len(prompt) :].tolist()
        text = generate(ours, [prompt], 30, temperature=0, eot=tokenizer.eot)[0]
        assert ids[: len(text)] == text and len(text) > 5
        if kind == "tapernorm":
            assert sum(isinstance(module, nn.LayerNorm) for module in theirs.modules()) == norms
