"""evaluate.py: checkpoints on validation text, alone or side by side, on one text or several."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tapernorm.analysis import published
from tapernorm.analysis.measure import Subject, Text, fold_as_asked, load, measure
from tapernorm.analysis.results import Measured, compare, labels
from tapernorm.config.programs import EvaluateConfig
from tapernorm.config.schema import ConfigError, write_text
from tapernorm.model.fold import describe
from tapernorm.model.hf import is_hub_form
from tapernorm.runtime.device import keep_freed_memory, pick_device
from tapernorm.runtime.log import LOGGER
from tapernorm.runtime.record import finite
from tapernorm.training import checkpoint as checkpoints
from tapernorm.training import pretrained

log = logging.getLogger(__name__)

TAILS = {"median": "median", "99 %": "p99", "99.9 %": "p99_9", "max": "max"}


def evaluate_checkpoint(config: EvaluateConfig) -> dict[str, Any]:
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
    paths = _checkpoints(config)
    alone = len(paths) == 1 and config.suite is None
    said: set[str] = set()
    texts = {"": config.dataset} if config.suite is None else dict(config.suite)
    measured: dict[str, list[Measured]] = {name: [] for name in texts}
    sizes = []
    for label, path in zip(labels(paths), paths, strict=True):
        subject = Subject.load(config, path, label, device)
        sizes.append(published.size_of(subject.trained.model))
        samples = config.samples if alone else config.samples or 0
        for name, dataset in texts.items():
            on = dataclasses.replace(config, dataset=dataset, samples=samples)
            with _only_new(said):
                text = Text.open(subject, on, f"suite.{name}" if name else "dataset")
            measured[name] += measure(subject, text, on, f"{label} on {name}: " if name else "")
            samples = 0  # they have nothing to do with the text
    if alone:
        report = measured[""][0].report
        for line in _details(report):
            log.info(line)
        return _write(config, paths, report)
    rows = [] if config.suite is None else published.rows(filter(None, sizes), texts)
    compare(measured, rows)
    if rows:
        log.info(f"published rows: {published.SOURCE}; compare differences between rows rather than losses")
    reports = {
        name: [model.report for model in models if "checkpoint" in model.report]  # the folded lie in these
        for name, models in measured.items()
    }
    report = {"baseline": next(iter(reports.values()))[0]["label"]}
    if config.suite is None:
        return _write(config, paths, report | {"checkpoints": reports[""]})
    others = {"source": published.SOURCE, "rows": rows} if rows else None
    return _write(config, paths, report | {"datasets": reports, "published": others})


@contextmanager
def _only_new(said: set[str]) -> Iterator[None]:
    """Say each line once, over all calls with the same `said`."""

    def is_new(record: logging.LogRecord) -> bool:
        if "is_new" not in record.__dict__:  # several handlers ask
            record.is_new = record.getMessage() not in said
            said.add(record.getMessage())
        return bool(record.__dict__["is_new"])

    handlers = list(LOGGER.handlers)
    for handler in handlers:
        handler.addFilter(is_new)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_new)


def _checkpoints(config: EvaluateConfig) -> list[Path]:
    """The baseline's and the others. Refuses what would only be found after a first one has been evaluated."""
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
            given.insert(0, config.baseline if foreign else str(checkpoints.find(Path(config.baseline))))
        except ConfigError as error:
            raise ConfigError(f"baseline={config.baseline}: {error}") from None
    found = ([Path(item)] if is_hub_form(item) else checkpoints.find_all(Path(item)) for item in given)
    paths = list(dict.fromkeys(itertools.chain.from_iterable(found)))
    for path in filter(lambda path: is_hub_form(str(path)), paths):
        if config.dataset is None and config.suite is None:
            raise ConfigError(f"checkpoint={path} has no text of its own; name one with dataset=... or suite=gpt2")
        if config.save_folded:
            raise ConfigError(f"save_folded={config.save_folded} is for a checkpoint of ours, not for {path}")
        if path.exists():
            pretrained.check_foreign(str(path))
    if config.save_folded and Path(config.save_folded).exists():
        raise ConfigError(f"save_folded={config.save_folded} exists already; name a new directory")
    if config.suite is not None and config.dataset is not None:
        raise ConfigError(f"dataset={config.dataset.name} and a suite are given; leave one of them out")
    if config.suite is not None and not config.suite:
        raise ConfigError("suite={} names no data set; choose a suite group, as in suite=gpt2")
    if config.save_folded and config.suite is not None:
        raise ConfigError(f"save_folded={config.save_folded} is for one text; leave the suite out")
    if config.save_folded and len(paths) > 1:
        raise ConfigError(f"save_folded={config.save_folded} is for one checkpoint, and {len(paths)} are given")
    if (config.fold or config.fold_table) and len(paths) > 1:
        for path in paths:
            fold_as_asked(config, path, load(path)[0])
    return paths


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


def _write(config: EvaluateConfig, paths: Sequence[Path], report: Mapping[str, Any]) -> dict[str, Any]:
    """Write the report as JSON, which has null for what is not finite, and return it so.

    It goes to the run's directory, or the one above several; a model of the hub has none, then to the current one.
    Under its usual name, to which config.dataset's or 'suite' is added, nothing is overwritten: an earlier result may
    be of another step, text or choice of checkpoints. It stays under a number.
    """
    plain = finite(dict(report))
    text = json.dumps(plain, indent=1, ensure_ascii=False) + "\n"
    local = [str(checkpoints.run_directory(path).absolute()) for path in paths if path.exists()]
    directory = Path(os.path.commonpath(local)) if local else Path.cwd()
    stem = "evaluation" if len(paths) == 1 else "comparison"
    what = "suite" if config.suite is not None else None if config.dataset is None else config.dataset.name
    own = directory / f"{stem if what is None else f'{stem}-{what}'}.json"
    path = Path(config.out) if config.out else own
    try:
        fresh = path.with_name(f"{path.name}.new")
        write_text(fresh, text)  # before the earlier one moves: a full disk takes nothing away
        if not config.out and path.exists() and path.read_text(encoding="utf-8") != text:
            names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
            log.info(f"the earlier {path.name} is now {path.rename(next(n for n in names if not n.exists())).name}")
        fresh.replace(path)
    except OSError as error:
        raise ConfigError(f"out={path} cannot be written: {error.strerror}") from None
    log.info(f"written to {path}")
    return plain
