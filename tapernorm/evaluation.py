"""Deterministic losses over a fixed set of tokens, in training and from a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tapernorm import checkpoint as checkpoints
from tapernorm.config import Config, ConfigError, EvaluateConfig
from tapernorm.data import prepare, reuse, validation_windows
from tapernorm.device import autocast as autocast_on
from tapernorm.device import keep_freed_memory, pick_device, pick_dtype
from tapernorm.fold import certificate, describe, fold
from tapernorm.generate import generate
from tapernorm.model import Decoder
from tapernorm.tokenizer import Tokenizer
from tapernorm.tracking import finite

CERTIFICATE_TOKENS = 2048  # enough to meet large logits; three precisions, two models, logits in float64


@dataclass(frozen=True)
class Evaluation:
    """Mean cross-entropy in nats per token over `tokens` predicted tokens."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def evaluate(
    model: Decoder,
    inputs: Tensor,
    targets: Tensor,
    batch_size: int = 8,
    autocast: AbstractContextManager | None = None,
) -> Evaluation:
    """Mean loss over windows (N, T). Every token counts once, so the batch size does not matter (beyond rounding).

    The sum runs in float64 on the CPU. Runs the uncompiled model; the model's mode is restored.
    """
    device = model.embed.weight.device
    was_training = model.training
    model.eval()
    total = 0.0
    with autocast or nullcontext():
        for start in range(0, inputs.shape[0], batch_size):
            logits = model(inputs[start : start + batch_size].to(device))
            wanted = targets[start : start + batch_size].to(device)
            losses = F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="none")
            total += losses.cpu().double().sum().item()
    model.train(was_training)
    return Evaluation(loss=total / targets.numel(), tokens=targets.numel())


def evaluate_checkpoint(config: EvaluateConfig, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Validation loss and samples of a run's or checkpoint's directory; nothing else needs to be known.

    The loss is the one that training reported for that step. With `fold` the folded model is evaluated beside it and
    certified, with `save_folded` also saved. Writes one JSON. Raises ConfigError, one line, for a path without a valid
    checkpoint, for data whose tokenizer is not the checkpoint's and for a model that cannot be folded.
    """
    device = pick_device(config.device, "device")
    keep_freed_memory()
    given = Path(config.checkpoint)
    path = checkpoints.find(given, say)
    model, trained, tokenizer = checkpoints.load_model(path, device)
    meta = checkpoints.read_meta(path)
    if config.save_folded and Path(config.save_folded).exists():
        raise ConfigError(f"save_folded={config.save_folded} exists already; name a new directory")
    folded = fold(model) if config.fold or config.save_folded else None  # refused before anything slow happens
    trained = dataclasses.replace(trained, cache_dir=config.cache_dir or trained.cache_dir)
    data = reuse(trained, meta["data"], say) or prepare(trained, say)
    if data.key != meta["data"]:
        raise ConfigError(f"checkpoint {path}: the data set has changed since training ({meta['data']} -> {data.key})")
    dtype = pick_dtype(trained.trainer.dtype, device)
    inputs, targets = validation_windows(
        data.valid.tokens, trained.model.n_ctx, config.tokens or trained.trainer.val_tokens
    )
    say(f"checkpoint {path}: step {meta['step']}, gate {meta['gate']:.4g}, norm {trained.norm.name}, device {device}")
    result = evaluate(model, inputs, targets, config.batch_size, autocast_on(device, dtype))
    say(
        f"validation loss {result.loss:.4f} nats/token (perplexity {result.perplexity:.2f}) "
        f"over {result.tokens:,} tokens"
    )
    folding: dict[str, Any] = {}
    if folded is not None:
        after = evaluate(folded, inputs, targets, config.batch_size, autocast_on(device, dtype))
        proof = certificate(model, folded, inputs[: max(1, CERTIFICATE_TOKENS // trained.model.n_ctx)])
        folding = {"loss": after.loss, "difference": after.loss - result.loss, "certificate": proof}
        say(f"folded: validation loss {after.loss:.4f} nats/token (difference {after.loss - result.loss:+.2g})")
        for line in describe(proof):
            say(line)
        if config.save_folded:
            save_folded(Path(config.save_folded), folded, trained, tokenizer, meta, proof)
            say(f"folded checkpoint written to {config.save_folded}")
    prompt = [tokenizer.eot, *tokenizer.encode(config.prompt)]
    texts = []
    if config.samples:
        length = min(config.sample_tokens, max(1, trained.model.n_ctx - len(prompt)))
        rows = generate(
            model,
            [prompt] * config.samples,
            length,
            eot=tokenizer.eot,
            temperature=config.temperature,
            seed=config.seed,
        )
        texts = [config.prompt + tokenizer.decode(row) for row in rows]
    for number, text in enumerate(texts, 1):
        say(f"sample {number}: {' '.join(text.split())}")
    report = {
        "checkpoint": str(path),
        "step": meta["step"],
        "gate": meta["gate"],
        "norm": trained.norm.name,
        "anchor": trained.anchor.kind,
        "loss": result.loss,
        "perplexity": result.perplexity,
        "tokens": result.tokens,
        "samples": texts,
        "folded": folding or None,
    }
    run_dir = path.parent.parent if path.parent.name == "checkpoints" else path
    out = Path(config.out) if config.out else run_dir / "evaluation.json"
    out.write_text(json.dumps(finite(report), indent=1) + "\n")
    say(f"written to {out}")
    return report


def save_folded(
    directory: Path,
    folded: Decoder,
    trained: Config,
    tokenizer: Tokenizer,
    meta: Mapping[str, Any],
    report: Mapping[str, Any],
) -> Path:
    """Write a folded model as an ordinary checkpoint with certificate.json in it, without training state.

    Its configuration is the run's with the norm and head that are left; `meta` is the source checkpoint's.
    """
    own = {"format", "step", "git_revision", "versions", "files"}  # checkpoint.write's
    return checkpoints.write(
        directory,
        meta["step"],
        model=folded.state_dict(),
        training=None,
        config=dataclasses.replace(trained, model=folded.config, norm=folded.norm_config),
        tokenizer=tokenizer,
        meta={key: value for key, value in meta.items() if key not in own},
        reports={"certificate.json": finite(dict(report))},
    )
