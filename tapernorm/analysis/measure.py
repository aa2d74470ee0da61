"""A checkpoint's model measured on one text: losses by token, samples, and the same of the folded model."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tapernorm.analysis.losses import Losses, document_of
from tapernorm.analysis.results import Measured, plus_minus
from tapernorm.config.options import Config
from tapernorm.config.programs import EvaluateConfig
from tapernorm.config.schema import ConfigError, to_dict
from tapernorm.data.batches import TokenFile, n_windows, validation_windows
from tapernorm.data.prepare import prepare, prepare_valid, reuse
from tapernorm.data.tokenizer import Tokenizer
from tapernorm.model.decoder import Decoder
from tapernorm.model.evaluate import at_best_temperature, token_losses
from tapernorm.model.fold import certificate, fold
from tapernorm.model.generate import NotFinite, generate
from tapernorm.model.hf import is_hub_form
from tapernorm.runtime.device import autocast, pick_dtype
from tapernorm.runtime.progress import Progress
from tapernorm.runtime.record import finite
from tapernorm.training import checkpoint as checkpoints
from tapernorm.training import pretrained

log = logging.getLogger(__name__)

CERTIFICATE_TOKENS = 2048  # enough to meet large logits; three precisions, two models, logits in float64
USUAL_SAMPLES = 3
LONG = 5.0  # seconds after which an evaluation shows its progress


@dataclass(frozen=True)
class Subject:
    """A checkpoint's model, as it is and, if wanted, folded."""

    label: str
    path: Path
    meta: dict[str, Any]
    model: Decoder
    trained: Config
    tokenizer: Tokenizer
    folded: Decoder | None

    @classmethod
    def load(cls, config: EvaluateConfig, path: Path, label: str, device: torch.device) -> Subject:
        model, trained, tokenizer, meta = load(path, device)
        folded = fold_as_asked(config, path, model)  # refused before anything slow happens
        trained = dataclasses.replace(trained, cache_dir=config.cache_dir or trained.cache_dir)
        step = "not ours" if meta["step"] is None else f"step {meta['step']}"
        log.info(f"checkpoint {path}: {step}, gate {meta['gate']:.4g}, norm {trained.norm.name}, device {device}")
        return cls(label, path, meta, model, trained, tokenizer, folded)

    @property
    def device(self) -> torch.device:
        return self.model.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return pick_dtype(self.trained.trainer.dtype, self.device)


def load(path: Path, device: torch.device | str = "cpu") -> tuple[Decoder, Config, Tokenizer, dict[str, Any]]:
    """Model, configuration, tokenizer and meta data of a checkpoint, or of a model in Hugging Face form."""
    if is_hub_form(str(path)):
        return *pretrained.load_foreign(str(path), device), {"step": None, "gate": 1.0, "data": None}
    return *checkpoints.load_model(path, device), checkpoints.read_meta(path)


def fold_as_asked(config: EvaluateConfig, path: Path, model: Decoder) -> Decoder | None:
    if not (config.fold or config.fold_table or config.save_folded):
        return None
    try:
        return fold(model, gains=config.fold_gains, table=config.fold_table)
    except ConfigError as error:
        raise ConfigError(f"checkpoint {path}: {error}") from None


@dataclass(frozen=True)
class Text:
    """What a model is evaluated on: windows (N, T) of a validation split, and the document of each target (N * T,).

    n_windows: how many the split has; left_out: how many of these a filter keeps out.
    """

    file: TokenFile
    inputs: Tensor
    targets: Tensor
    document: np.ndarray
    n_windows: int
    left_out: int

    @classmethod
    def open(cls, subject: Subject, config: EvaluateConfig, key: str = "dataset") -> Text:
        """config.dataset, which stands at `key`, or the text of training."""
        file, n_ctx = _tokens(config, subject, key), subject.trained.model.n_ctx
        if config.tokens is not None and config.tokens < n_ctx:
            raise ConfigError(f"tokens={config.tokens} is less than one context, model.n_ctx={n_ctx}")
        usual = subject.trained.trainer.val_tokens if config.dataset is None else max(file.n_tokens, n_ctx)
        windows, total = file.windows(n_ctx), n_windows(file.n_tokens, n_ctx)
        inputs, targets = validation_windows(file.tokens, n_ctx, config.tokens or usual, windows)
        left_out, end = 0, inputs.numel()
        if windows is not None:
            left_out, windows = total - len(windows), windows[: len(inputs)]
            end = (int(windows[-1]) + 1) * n_ctx
            name = (config.dataset or subject.trained.dataset).name
            log.info(f"dataset {name}: {left_out:,} of {total:,} windows of {n_ctx:,} tokens left out by the filter")
        document = document_of(file.tokens[:end], subject.tokenizer.eot, n_ctx, windows)
        return cls(file, inputs, targets, document, total, left_out)


def _tokens(config: EvaluateConfig, subject: Subject, key: str) -> TokenFile:
    """The validation tokens: of the text that was trained on, which must be the same still, or of config.dataset."""
    trained, made_from = subject.trained, subject.meta["data"]
    if config.dataset is not None:
        trained = dataclasses.replace(trained, dataset=config.dataset)
        text = prepare_valid(trained, subject.tokenizer, key=key)
        log.info(f"evaluating on dataset {config.dataset.name} as given, not on the validation text of training")
        return text
    data = reuse(trained, made_from) or prepare(trained)
    if data.key != made_from:
        raise ConfigError(
            f"checkpoint {subject.path}: the data set has changed since training ({made_from} -> {data.key}); name "
            "another one with dataset=... to evaluate on that"
        )
    return data.valid


def losses_of(model: Decoder, subject: Subject, text: Text, config: EvaluateConfig) -> Losses:
    """Losses by token of the subject's or its folded model; a pass that takes long shows its progress."""

    def one_pass(every: int, b: float | None) -> Tensor:
        inputs, targets = text.inputs[::every], text.targets[::every]
        progress = Progress(len(inputs), mode=config.progress, unit="window", delay=LONG)
        start, total, windows = time.monotonic(), 0.0, 0

        def show(losses: Tensor) -> None:
            nonlocal total, windows
            total += losses.double().sum().item()
            windows += len(losses)
            tokens = windows * losses.shape[1]
            progress.update(windows, loss=total / tokens, tokens_per_s=tokens / (time.monotonic() - start))

        try:
            precision = autocast(subject.device, subject.dtype)
            return token_losses(model, inputs, targets, config.batch_size, precision, show, b)
        finally:
            progress.close()

    nats, temperature, best = at_best_temperature(one_pass, text.targets.numel())
    targets, at_best = text.targets.flatten().numpy(), None if best is None else _flat(best)
    return Losses(_flat(nats), targets, text.document, subject.tokenizer, temperature, at_best)


def _flat(losses: Tensor) -> np.ndarray:
    return losses.flatten().double().numpy()


def measure(subject: Subject, text: Text, config: EvaluateConfig, start: str = "") -> list[Measured]:
    """The checkpoint's model and, if wanted, the folded one, whose report is also the first's `folded`."""
    losses = losses_of(subject.model, subject, text, config)
    report: dict[str, Any] = {
        "label": subject.label,
        "checkpoint": str(subject.path),
        "step": subject.meta["step"],
        "gate": subject.meta["gate"],
        "norm": subject.trained.norm.name,
        "anchor": subject.trained.anchor.kind,
        "device": str(subject.device),
        "dtype": str(subject.dtype).removeprefix("torch."),
        "data": {
            "name": text.file.path.parent.name,
            "own": config.dataset is None,
            "dataset": None if config.dataset is None else to_dict(config.dataset),
            "documents": text.file.n_documents,
            "tokens": text.file.n_tokens,
            "windows": text.n_windows,
            "left_out": text.left_out,
        },
        **losses.statistics(),
        "worst": losses.worst(config.worst),
        "samples": _samples(config, subject, start),
        "folded": None,
    }
    over = f"over {report['tokens']:,} tokens of {report['documents']:,} documents"
    log.info(f"{start}validation loss {_headline(report)}, {over}")
    if subject.folded is None:
        return [Measured(losses, report)]
    folded = subject.folded
    windows = max(1, CERTIFICATE_TOKENS // folded.config.n_ctx)
    losses_folded = losses_of(folded, subject, text, config)
    statistics, proof = losses_folded.statistics(), certificate(subject.model, folded, text.inputs[:windows])
    difference = statistics["loss"] - report["loss"]
    log.info(f"{start}folded: validation loss {_headline(statistics)} (difference {difference:+.2g})")
    if config.save_folded:
        save_folded(Path(config.save_folded), folded, subject.trained, subject.tokenizer, subject.meta, proof)
        log.info(f"{start}folded checkpoint written to {config.save_folded}")
    report["folded"] = {
        "label": subject.label,
        "step": subject.meta["step"],
        "norm": folded.norm_config.name,
        "gains": config.fold_gains,
        "table": config.fold_table,
        **statistics,
        "difference": difference,
        "worst": losses_folded.worst(config.worst),
        "certificate": proof,
    }
    return [Measured(losses, report), Measured(losses_folded, report["folded"])]


def _headline(statistics: Mapping[str, Any]) -> str:
    return (
        f"{plus_minus(statistics['loss'], statistics['loss_se'])} nats/token "
        f"(perplexity {statistics['perplexity']:.2f}, {statistics['bits_per_byte']:.4f} bits/byte)"
    )


def _samples(config: EvaluateConfig, subject: Subject, start: str) -> list[str]:
    count = USUAL_SAMPLES if config.samples is None else config.samples
    if not count:
        return []
    model, tokenizer = subject.model, subject.tokenizer
    prompt = [tokenizer.eot, *tokenizer.encode(config.prompt)]
    length = min(config.sample_tokens, max(1, model.config.n_ctx - len(prompt)))
    try:
        rows = generate(
            model, [prompt] * count, length, eot=tokenizer.eot, temperature=config.temperature, seed=config.seed
        )
    except NotFinite as error:  # the losses are still worth reporting
        log.warning(f"{start}no samples: {error}")
        return []
    return [config.prompt + tokenizer.decode(row) for row in rows]


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
