"""Deterministic losses over a fixed set of tokens, in training and from a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tapernorm.analysis import published
from tapernorm.analysis.comparison import Measured, compare, compare_on, labels, plus_minus
from tapernorm.analysis.losses import Losses, document_of, perplexity
from tapernorm.config.options import Config
from tapernorm.config.programs import EvaluateConfig
from tapernorm.config.schema import ConfigError, to_dict
from tapernorm.data.batches import TokenFile, n_windows, validation_windows
from tapernorm.data.prepare import prepare, prepare_valid, reuse
from tapernorm.data.tokenizer import Tokenizer
from tapernorm.model.decoder import Decoder
from tapernorm.model.fold import certificate, describe, fold
from tapernorm.model.generate import NotFinite, generate
from tapernorm.model.hf import is_hub_form
from tapernorm.runtime import dist
from tapernorm.runtime.device import autocast as autocast_on
from tapernorm.runtime.device import keep_freed_memory, pick_device, pick_dtype
from tapernorm.runtime.progress import Progress
from tapernorm.runtime.record import finite
from tapernorm.training import checkpoint as checkpoints
from tapernorm.training import pretrained

CERTIFICATE_TOKENS = 2048  # enough to meet large logits; three precisions, two models, logits in float64
USUAL_SAMPLES = 3
LONG = 5.0  # seconds after which an evaluation shows its progress
CACHED, HELD = 2**18, 2**26  # logits that scaled_losses takes at a time: 1 MB stays in a CPU's cache, 2.5 times as fast
SEARCHED, EVERY = 4096, 16  # the search for T* starts on every 16th window, on so many tokens at least
PASSES = 12
REST = 1e-6  # nats that the loss at T* may lack
TAILS = {"median": "median", "99 %": "p99", "99.9 %": "p99_9", "max": "max"}


@dataclass(frozen=True)
class Evaluation:
    """Mean cross-entropy in nats per token over `tokens` predicted tokens, and at T* (see `at_best_temperature`)."""

    loss: float
    tokens: int
    best_temperature: float | None = None
    loss_best_temperature: float | None = None

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)


def scaled_losses(logits: Tensor, targets: Tensor, b: float) -> Tensor:
    """(3, n): l(b) = ln sum_i exp(b z_i) - b z_y, l'(b) = E_p[z] - z_y and l''(b) = Var_p(z), p = softmax(b z).

    logits z (n, V), targets y (n,). l is convex in b.
    """
    rows = max(1, (CACHED if logits.device.type == "cpu" else HELD) // logits.shape[1])
    parts = []
    for part, y in zip(logits.split(rows), targets.split(rows), strict=True):
        z = part - part.amax(-1, keepdim=True)
        own = z.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        weights = (b * z).exp_()
        total = weights.sum(-1)
        mean = weights.mul_(z).sum(-1) / total
        variance = weights.mul_(z).sum(-1) / total - mean.square()
        parts.append(torch.stack([total.log() - b * own, mean - own, variance]))
    return torch.cat(parts, 1)


@torch.no_grad()
def token_losses(
    model: Decoder,
    inputs: Tensor,
    targets: Tensor,
    batch_size: int = 8,
    autocast: AbstractContextManager | None = None,
    on_batch: Callable[[Tensor], None] | None = None,
    b: float | None = None,
) -> Tensor:
    """Cross-entropy (1, N, T) of every token of windows (N, T), in nats: float32 on the CPU, finite or not.

    With `b` (4, N, T): after it the three `scaled_losses`. Runs the uncompiled model; the model's mode is restored.
    `on_batch` sees each batch's losses.
    """
    device = model.embed.weight.device
    was_training = model.training
    model.eval()
    parts = []
    with autocast or nullcontext():
        for x, y in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
            logits, own = model(x.to(device)).flatten(0, 1).float(), y.flatten().to(device)
            found = F.cross_entropy(logits, own, reduction="none").unsqueeze(0)
            if b is not None:
                found = torch.cat([found, scaled_losses(logits, own, b)])
            parts.append(found.cpu().view(-1, *y.shape))
            if on_batch:
                on_batch(parts[-1][0])
    model.train(was_training)
    return torch.cat(parts, 1)


Measure = Callable[[int, float | None], Tensor]


def newton(measure: Measure, every: int, b: float) -> tuple[Tensor, float, float]:
    """Newton's method for argmin_b L(b), mean over every so many-th window: what was last measured, b, the next step.

    A step changes b by a factor e at most and stays between the b known to be too small and too large. The last one,
    d = -L'/L'', is left to be read off the parabola: what that lacks, of order d^3, is estimated as L'' |d|^3 / 2b.
    Not found (b NaN): a loss is not finite, or smaller the smaller b is.
    """
    low, high = 0.0, math.inf
    for _ in range(PASSES):
        values = measure(every, b)
        slope, curvature = values[2:].double().flatten(1).mean(1).tolist()
        step = -slope / max(curvature, 1e-30)
        if not math.isfinite(slope + curvature):
            break
        if abs(step) < b and abs(slope * step * step) / (2 * b) < REST:
            return values, b, step
        low, high = (b, high) if step > 0 else (low, b)
        b = min(max(b + step, b / math.e), b * math.e)
        if not low < b < high:
            b = (low + high) / 2
    return values, math.nan, 0.0


def at_best_temperature(measure: Measure, n_tokens: int) -> tuple[Tensor, float | None, Tensor | None]:
    """The losses, T* = argmin_T mean CE(z / T), and the losses at T*; None where there is no such T.

    measure(every, b): `token_losses` of every so many-th window, or their mean over N and T with the dimensions kept.
    A search on a sixteenth of the windows leaves one whole pass, at times two, for what all of them say.
    """
    _, b, step = newton(measure, min(EVERY, max(1, n_tokens // SEARCHED)), 1.0)
    if math.isnan(b):
        return measure(1, None)[0], None, None
    (losses, scaled, first, second), b, step = newton(measure, 1, b + step)
    if math.isnan(b):
        return losses, None, None
    return losses, 1 / (b + step), scaled + step * first + step**2 / 2 * second


def evaluate(
    model: Decoder,
    inputs: Tensor,
    targets: Tensor,
    batch_size: int = 8,
    autocast: AbstractContextManager | None = None,
    best_temperature: bool = False,
) -> Evaluation:
    """Mean loss over windows (N, T) and, if wanted, T* and the loss there (see `at_best_temperature`).

    Every token counts once, so the batch size does not matter (beyond rounding). The sums run in float64 on the CPU.
    Several processes share the batches; the sums are the same, and the same in each.
    """

    def means(every: int, b: float | None) -> Tensor:
        def sums(batch: tuple[Tensor, Tensor]) -> list[float]:
            return [part.sum().item() for part in token_losses(model, *batch, batch_size, autocast, b=b).double()]

        x, y = inputs[::every], targets[::every]
        batches = list(zip(x.split(batch_size), y.split(batch_size), strict=True))
        totals = zip(*dist.divided(sums, batches), strict=True)
        return torch.tensor([[[sum(total) / y.numel()]] for total in totals], dtype=torch.float64)

    n_tokens = targets.numel()
    if not best_temperature:
        return Evaluation(means(1, None).item(), n_tokens)
    loss, temperature, best = at_best_temperature(means, n_tokens)
    return Evaluation(loss.item(), n_tokens, temperature, None if best is None else best.item())


# ---------------------------------------------------------------------------------------------------------- evaluate.py


def evaluate_checkpoint(config: EvaluateConfig, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Losses of a checkpoint on validation text, worst documents and samples; or of several, with their differences.

    A checkpoint may also be a model in Hugging Face form, directory or hub id, which has no text of its own. With
    `suite` all are evaluated on several data sets, in one table with the losses that others published.

    On the checkpoint's own text the loss is the one that training reported for that step. With `fold` the folded model
    is evaluated beside it and certified, with `save_folded` also saved. Writes one JSON and returns it; docs/metrics.md
    defines its fields. Raises ConfigError, one line, for a path without a valid checkpoint, for text that cannot be
    read or is not that of training, and for a model that cannot be folded; losses that are not finite never raise.
    """
    device = pick_device(config.device, "device")
    keep_freed_memory()
    if config.out and (Path(config.out).is_dir() or not Path(config.out).parent.is_dir()):
        raise ConfigError(f"out={config.out}: name a file in a directory that is there")
    given = [config.checkpoint] if isinstance(config.checkpoint, str) else [*config.checkpoint]
    if not all(given) or not given:
        raise ConfigError(
            f"checkpoint={config.checkpoint} names none; give the directory of a run, as in checkpoint=runs/RUN"
        )
    if config.baseline is not None:
        try:
            foreign = is_hub_form(config.baseline)
            given.insert(0, config.baseline if foreign else str(checkpoints.find(Path(config.baseline), say)))
        except ConfigError as error:
            raise ConfigError(f"baseline={config.baseline}: {error}") from None
    found = ([Path(item)] if is_hub_form(item) else checkpoints.find_all([item], say) for item in given)
    paths = list(dict.fromkeys(itertools.chain.from_iterable(found)))
    for path in paths:
        if is_hub_form(str(path)) and config.dataset is None and config.suite is None:
            raise ConfigError(f"checkpoint={path} has no text of its own; name one with dataset=... or suite=gpt2")
        if is_hub_form(str(path)) and config.save_folded:
            raise ConfigError(f"save_folded={config.save_folded} is for a checkpoint of ours, not for {path}")
        if Path(path).exists() and is_hub_form(str(path)):  # before the others are evaluated
            pretrained.check_foreign(str(path))
    if config.save_folded and Path(config.save_folded).exists():
        raise ConfigError(f"save_folded={config.save_folded} exists already; name a new directory")
    if config.suite is not None:
        return _evaluate_suite(config, paths, device, say)
    if len(paths) > 1:
        return _evaluate_several(config, paths, device, say)
    (path,) = paths
    subject = Subject.load(config, path, labels(paths)[0], device, say)
    report = measure(subject, Text.open(subject, config, say), config, say)[0].report
    for line in _details(report):
        say(line)
    return _write(config, _directory(paths) / "evaluation.json", report, say)


def _evaluate_several(
    config: EvaluateConfig, paths: Sequence[Path], device: torch.device, say: Callable[[str], None]
) -> dict[str, Any]:
    _check_several(config, paths)
    config = dataclasses.replace(config, samples=config.samples or 0)
    say_once = _once(say)
    models: list[Measured] = []
    for label, path in zip(labels(paths), paths, strict=True):
        subject = Subject.load(config, path, label, device, say)
        models += measure(subject, Text.open(subject, config, say_once), config, say)
    compare(models, say)
    return _write(config, _directory(paths) / "comparison.json", _comparison(models), say)


def _evaluate_suite(
    config: EvaluateConfig, paths: Sequence[Path], device: torch.device, say: Callable[[str], None]
) -> dict[str, Any]:
    """Every checkpoint on every data set of config.suite, in one table."""
    assert config.suite is not None
    if config.dataset is not None:
        raise ConfigError(f"dataset={config.dataset.name} and a suite are given; leave one of them out")
    if not config.suite:
        raise ConfigError("suite={} names no data set; choose a suite group, as in suite=gpt2")
    if config.save_folded:
        raise ConfigError(f"save_folded={config.save_folded} is for one text; leave the suite out")
    _check_several(config, paths)
    say_once = _once(say)
    texts: dict[str, list[Measured]] = {name: [] for name in config.suite}
    sizes = []
    for label, path in zip(labels(paths), paths, strict=True):
        subject = Subject.load(config, path, label, device, say)
        sizes.append(published.size_of(subject.trained.model))
        samples = config.samples or 0
        for name, dataset in config.suite.items():
            on = dataclasses.replace(config, dataset=dataset, samples=samples)
            text = Text.open(subject, on, say_once, f"suite.{name}")
            texts[name] += measure(subject, text, on, functools.partial(_say_on, say, f"{label} on {name}: "))
            samples = 0  # they have nothing to do with the text
    rows = published.rows(filter(None, sizes), texts)
    compare_on(texts, rows, say)
    if rows:
        say(f"published rows: {published.SOURCE}; compare differences between rows rather than losses")
    report = {
        "baseline": next(iter(texts.values()))[0].report["label"],
        "datasets": {name: _comparison(models)["checkpoints"] for name, models in texts.items()},
        "published": {"source": published.SOURCE, "rows": rows} if rows else None,
    }
    stem = "evaluation" if len(paths) == 1 else "comparison"
    return _write(config, _directory(paths) / f"{stem}.json", report, say)


def _say_on(say: Callable[[str], None], where: str, line: str) -> None:
    say(where + line)


def _check_several(config: EvaluateConfig, paths: Sequence[Path]) -> None:
    """Refuse what would only be found after a first checkpoint has been evaluated."""
    if config.save_folded and len(paths) > 1:
        raise ConfigError(f"save_folded={config.save_folded} is for one checkpoint, and {len(paths)} are given")
    if config.fold or config.fold_table:
        for path in paths:
            _fold(config, path, _load(path)[0])


def _comparison(models: Sequence[Measured]) -> dict[str, Any]:
    return {
        "baseline": models[0].report["label"],
        "checkpoints": [model.report for model in models if "checkpoint" in model.report],  # the folded lie in these
    }


def _directory(paths: Sequence[Path]) -> Path:
    """The run's directory, or the one above several; a model of the hub has none, then it is the current one."""
    local = [str(checkpoints.run_directory(path).absolute()) for path in paths if path.exists()]
    return Path(os.path.commonpath(local)) if local else Path.cwd()


def _once(say: Callable[[str], None]) -> Callable[[str], None]:
    """`say` that says no line twice."""
    said: set[str] = set()

    def say_once(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    return say_once


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
    def load(
        cls, config: EvaluateConfig, path: Path, label: str, device: torch.device, say: Callable[[str], None]
    ) -> Subject:
        model, trained, tokenizer, meta = _load(path, device)
        folded = _fold(config, path, model)  # refused before anything slow happens
        trained = dataclasses.replace(trained, cache_dir=config.cache_dir or trained.cache_dir)
        step = "not ours" if meta["step"] is None else f"step {meta['step']}"
        say(f"checkpoint {path}: {step}, gate {meta['gate']:.4g}, norm {trained.norm.name}, device {device}")
        return cls(label, path, meta, model, trained, tokenizer, folded)

    @property
    def device(self) -> torch.device:
        return self.model.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return pick_dtype(self.trained.trainer.dtype, self.device)


@dataclass(frozen=True)
class Text:
    """What a model is evaluated on: windows (N, T) of a validation split, and the document of each target (N * T,).

    n_windows: how many the split has; left_out: how many of these a filter keeps out.
    """

    file: TokenFile
    inputs: Tensor
    targets: Tensor
    document: np.ndarray
    tokenizer: Tokenizer
    n_windows: int
    left_out: int

    @classmethod
    def open(cls, subject: Subject, config: EvaluateConfig, say: Callable[[str], None], key: str = "dataset") -> Text:
        """config.dataset, which stands at `key`, or the text of training; `say` gets what there is to say about it."""
        file, n_ctx = _text(config, subject, say, key), subject.trained.model.n_ctx
        if config.tokens is not None and config.tokens < n_ctx:
            raise ConfigError(f"tokens={config.tokens} is less than one context, model.n_ctx={n_ctx}")
        usual = subject.trained.trainer.val_tokens if config.dataset is None else max(file.n_tokens, n_ctx)
        windows, total = file.windows(n_ctx), n_windows(file.n_tokens, n_ctx)
        inputs, targets = validation_windows(file.tokens, n_ctx, config.tokens or usual, windows)
        left_out = 0 if windows is None else total - len(windows)
        if windows is not None:
            windows = windows[: len(inputs)]
            name = (config.dataset or subject.trained.dataset).name
            say(f"dataset {name}: {left_out:,} of {total:,} windows of {n_ctx:,} tokens left out by the filter")
        eot = subject.tokenizer.eot
        end = inputs.numel() if windows is None else (int(windows[-1]) + 1) * n_ctx
        document = document_of(file.tokens[:end], eot, n_ctx, windows)
        return cls(file, inputs, targets, document, subject.tokenizer, total, left_out)

    def losses(self, subject: Subject, model: Decoder, config: EvaluateConfig) -> Losses:
        """Losses by token of the subject's or its folded model; a pass that takes long shows its progress."""

        def one_pass(every: int, b: float | None) -> Tensor:
            inputs, targets = self.inputs[::every], self.targets[::every]
            progress = Progress(len(inputs), mode=config.progress, unit="window", delay=LONG)
            start, total, windows = time.monotonic(), 0.0, 0

            def show(losses: Tensor) -> None:
                nonlocal total, windows
                total += losses.double().sum().item()
                windows += len(losses)
                tokens = windows * losses.shape[1]
                progress.update(windows, loss=total / tokens, tokens_per_s=tokens / (time.monotonic() - start))

            try:
                autocast = autocast_on(subject.device, subject.dtype)
                return token_losses(model, inputs, targets, config.batch_size, autocast, show, b)
            finally:
                progress.close()

        nats, temperature, best = at_best_temperature(one_pass, self.targets.numel())
        return Losses(
            _flat(nats),
            self.targets.flatten().numpy(),
            self.document,
            self.tokenizer,
            temperature,
            None if best is None else _flat(best),
        )


def _flat(losses: Tensor) -> np.ndarray:
    return losses.flatten().double().numpy()


def measure(subject: Subject, text: Text, config: EvaluateConfig, say: Callable[[str], None] = print) -> list[Measured]:
    """The checkpoint's model and, if wanted, the folded one, whose report is also the first's `folded`."""
    meta = subject.meta
    losses = text.losses(subject, subject.model, config)
    report: dict[str, Any] = {
        "label": subject.label,
        "checkpoint": str(subject.path),
        "step": meta["step"],
        "gate": meta["gate"],
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
        "samples": _samples(config, subject.model, subject.tokenizer, say),
        "folded": None,
    }
    say(f"validation loss {_headline(report)}, over {report['tokens']:,} tokens of {report['documents']:,} documents")
    models = [Measured(losses, report)]
    if subject.folded is not None:
        models.append(_measure_folded(subject, subject.folded, text, config, report["loss"], say))
        report["folded"] = models[1].report
    return models


def _measure_folded(
    subject: Subject,
    folded: Decoder,
    text: Text,
    config: EvaluateConfig,
    unfolded_loss: float,
    say: Callable[[str], None],
) -> Measured:
    losses = text.losses(subject, folded, config)
    statistics = losses.statistics()
    difference = statistics["loss"] - unfolded_loss
    windows = max(1, CERTIFICATE_TOKENS // folded.config.n_ctx)
    proof = certificate(subject.model, folded, text.inputs[:windows])
    say(f"folded: validation loss {_headline(statistics)} (difference {difference:+.2g})")
    if config.save_folded:
        save_folded(Path(config.save_folded), folded, subject.trained, subject.tokenizer, subject.meta, proof)
        say(f"folded checkpoint written to {config.save_folded}")
    report = {
        "label": subject.label,
        "step": subject.meta["step"],
        "norm": folded.norm_config.name,
        "gains": config.fold_gains,
        "table": config.fold_table,
        **statistics,
        "difference": difference,
        "worst": losses.worst(config.worst),
        "certificate": proof,
    }
    return Measured(losses, report)


def _fold(config: EvaluateConfig, path: Path, model: Decoder) -> Decoder | None:
    if not (config.fold or config.fold_table or config.save_folded):
        return None
    try:
        return fold(model, gains=config.fold_gains, table=config.fold_table)
    except ConfigError as error:
        raise ConfigError(f"checkpoint {path}: {error}") from None


def _text(config: EvaluateConfig, subject: Subject, say: Callable[[str], None], key: str) -> TokenFile:
    """The validation tokens: of the text that was trained on, which must be the same still, or of config.dataset."""
    trained, made_from = subject.trained, subject.meta["data"]
    if config.dataset is not None:
        trained = dataclasses.replace(trained, dataset=config.dataset)
        text = prepare_valid(trained, subject.tokenizer, say, key=key)
        say(f"evaluating on dataset {config.dataset.name} as given, not on the validation text of training")
        return text
    data = reuse(trained, made_from, say) or prepare(trained, say)
    if data.key != made_from:
        raise ConfigError(
            f"checkpoint {subject.path}: the data set has changed since training ({made_from} -> {data.key}); name "
            "another one with dataset=... to evaluate on that"
        )
    return data.valid


def _load(path: Path, device: torch.device | str = "cpu") -> tuple[Decoder, Config, Tokenizer, dict[str, Any]]:
    """Model, configuration, tokenizer and meta data of a checkpoint, or of a model in Hugging Face form."""
    if is_hub_form(str(path)):
        return *pretrained.load_foreign(str(path), device), {"step": None, "gate": 1.0, "data": None}
    return *checkpoints.load_model(path, device), checkpoints.read_meta(path)


def _samples(config: EvaluateConfig, model: Decoder, tokenizer: Tokenizer, say: Callable[[str], None]) -> list[str]:
    count = USUAL_SAMPLES if config.samples is None else config.samples
    if not count:
        return []
    prompt = [tokenizer.eot, *tokenizer.encode(config.prompt)]
    length = min(config.sample_tokens, max(1, model.config.n_ctx - len(prompt)))
    try:
        rows = generate(
            model,
            [prompt] * count,
            length,
            eot=tokenizer.eot,
            temperature=config.temperature,
            seed=config.seed,
        )
    except NotFinite as error:  # the losses are still worth reporting
        say(f"warning: no samples: {error}")
        return []
    return [config.prompt + tokenizer.decode(row) for row in rows]


# -------------------------------------------------------------------------------------------------------------- reports


def _headline(statistics: Mapping[str, Any]) -> str:
    return (
        f"{plus_minus(statistics['loss'], statistics['loss_se'])} nats/token "
        f"(perplexity {statistics['perplexity']:.2f}, {statistics['bits_per_byte']:.4f} bits/byte)"
    )


def _details(report: Mapping[str, Any]) -> Iterator[str]:
    """Everything about one checkpoint that `measure` has not said, for people to read."""
    yield "  of a token: " + ", ".join(f"{name} {report[key]:.4g}" for name, key in TAILS.items())
    if report["best_temperature"] is not None:
        gain = report["loss_best_temperature"] - report["loss"]
        yield (
            f"  at the best temperature, T* = {report['best_temperature']:.4f}: loss "
            f"{report['loss_best_temperature']:.4f} ({gain:+.4f})"
        )
    if report["nonfinite"]:
        yield f"  {report['nonfinite']:,} of {report['tokens']:,} losses are not finite, so the mean is not either"
    for order, documents in report["worst"].items():
        for found in documents:
            yield (
                f"  worst by {order}: document {found['document']}, {found['tokens']} tokens, "
                f"mean {found['loss']:.4g}, total {found['total']:.4g}, max {found['max']:.4g}: {found['excerpt']}"
            )
    if report["folded"]:
        yield from describe(report["folded"]["certificate"])
    for number, text in enumerate(report["samples"], 1):
        yield f"sample {number}: {' '.join(text.split())}"


def _write(
    config: EvaluateConfig, usual: Path, report: Mapping[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """Write the report as JSON, which has null for what is not finite, and return it so.

    Under its usual name, to which config.dataset's or 'suite' is added, nothing is overwritten: an earlier result may
    be of another step, text or choice of checkpoints. It stays under a number.
    """
    plain = finite(dict(report))
    text = json.dumps(plain, indent=1, ensure_ascii=False) + "\n"
    what = "suite" if config.suite is not None else None if config.dataset is None else config.dataset.name
    own = usual if what is None else usual.with_stem(f"{usual.stem}-{what}")
    path = Path(config.out) if config.out else own
    try:
        if not config.out and path.exists() and path.read_text(encoding="utf-8") != text:
            names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
            say(f"the earlier {path.name} is now {path.rename(next(n for n in names if not n.exists())).name}")
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out={path} cannot be written: {error.strerror}") from None
    say(f"written to {path}")
    return plain


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
