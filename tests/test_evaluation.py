"""Losses and samples: independent of the batch size, equal to training's, decodable from step 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tapernorm import checkpoint as checkpoints
from tapernorm.config import Config, ConfigError, EvaluateConfig, resolve, validate
from tapernorm.evaluation import evaluate, evaluate_checkpoint
from tapernorm.generate import generate
from tapernorm.model import build_model
from tapernorm.tracking import read_metrics
from tests.test_training import run


def test_P29_the_loss_is_trainings_at_every_batch_size(tiny: Callable[..., Config], tmp_path: Path) -> None:
    summary = run(tiny(norm="all_taper"), tmp_path)
    said: list[str] = []
    for batch_size in (1, 3, 8):
        config = EvaluateConfig(
            checkpoint=str(tmp_path), batch_size=batch_size, samples=1, sample_tokens=20, device="cpu"
        )
        report = evaluate_checkpoint(config, said.append)
        assert report["loss"] == pytest.approx(summary["val_loss"], abs=1e-5)
        assert report["tokens"] == 256
    assert (tmp_path / "evaluation.json").is_file()
    assert any("256 tokens" in line for line in said)
    # A checkpoint of the middle of the taper is evaluated with that step's gate.
    middle = tmp_path / "checkpoints" / "step-00000016"
    logged = next(row for row in read_metrics(tmp_path) if row["step"] == 16)
    report = evaluate_checkpoint(EvaluateConfig(checkpoint=str(middle), samples=0, device="cpu"), said.append)
    assert 0 < report["gate"] < 1
    assert report["loss"] == pytest.approx(logged["val/loss"], abs=1e-5)


def test_the_text_files_are_not_needed_again(tiny: Callable[..., Config], tmp_path: Path) -> None:
    files = {"train": tmp_path / "train.txt", "valid": tmp_path / "valid.txt"}
    for split, file in files.items():
        file.write_text(
            "\n".join(f"The {split} cat sat on mat number {i} and looked at the moon. " * 9 for i in range(40))
        )
    dataset = {"kind": "text", **{split: str(file) for split, file in files.items()}}
    config = tiny(dataset=dataset, tokenizer={"kind": "bytes"}, optim={"lr": 1e-3})
    summary = run(config, tmp_path / "run")
    for file in files.values():
        file.unlink()
    report = evaluate_checkpoint(EvaluateConfig(checkpoint=str(tmp_path / "run"), samples=0, device="cpu"))
    assert report["loss"] == pytest.approx(summary["val_loss"], abs=1e-5)


def test_evaluation_leaves_the_models_mode(tiny: Callable[..., Config]) -> None:
    model = build_model(resolve(tiny(), 60)).train()
    x = torch.randint(0, 60, (5, 32))
    first = evaluate(model, x, x, batch_size=2)
    assert model.training and first.tokens == 160
    assert first.loss == pytest.approx(evaluate(model, x, x, batch_size=5).loss, abs=1e-6)


def test_P22_an_untrained_model_emits_only_decodable_ids(tiny: Callable[..., Config], tmp_path: Path) -> None:
    run(tiny(trainer={"max_steps": 4}, gate={"k_warmup": 1, "k_taper": 3}, calibration={"window": 1}), tmp_path)
    model, _, tokenizer = checkpoints.load_model(checkpoints.find(tmp_path))
    rows = generate(model, torch.full((2, 1), tokenizer.eot), 250, temperature=5.0, seed=1)
    assert sum(map(len, rows)) == 500
    assert all(isinstance(tokenizer.decode(row), str) for row in rows)


def test_generation_is_greedy_seeded_and_stops(tiny: Callable[..., Config]) -> None:
    model = build_model(resolve(tiny(), 60))
    prompt = torch.randint(0, 60, (2, 5))
    greedy = generate(model, prompt, 6, temperature=0)
    assert greedy[0][0] == model(prompt)[0, -1].argmax().item()
    assert generate(model, prompt, 6, seed=3) == generate(model, prompt, 6, seed=3)
    stopped = generate(model, prompt, 6, temperature=0, eot=greedy[0][2])
    assert stopped[0] == greedy[0][: greedy[0].index(greedy[0][2])]
    assert len(generate(model, prompt, 40)[0]) == 40  # past the context: the oldest tokens leave the window


def test_faults_of_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoint is missing"):
        validate({}, EvaluateConfig)
    with pytest.raises(ConfigError, match="did you mean 'batch_size'"):
        validate({"checkpoint": "x", "batchsize": 3}, EvaluateConfig)
    with pytest.raises(ConfigError, match="no such directory"):
        evaluate_checkpoint(EvaluateConfig(checkpoint=str(tmp_path / "x"), device="cpu"))
