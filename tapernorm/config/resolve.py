"""From a composed tree to a run's configuration: `build` checks it, `resolve` computes what derives from other keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tapernorm.config.options import GATED, CalibrationConfig, Config
from tapernorm.config.schema import ConfigError, leaves, to_dict, validate
from tapernorm.config.sites import STAGES, removal_order, select_sites


def build(tree: Mapping[str, Any]) -> Config:
    """Check a plain nested mapping against the training schema and return the frozen configuration.

    Raises ConfigError, one line, as `validate` does, and for values that contradict each other.
    """
    config = validate(tree, Config)
    _check_relations(config)
    return config


def _check_relations(config: Config) -> None:
    """Ranges that involve more than one key, and names that become files."""
    for key, value in leaves(to_dict(config.dataset), "dataset."):
        if key.endswith(".name") and (value != Path(value).name or value.startswith(".")):
            raise ConfigError(f"{key}={value} is to be a plain name, as it begins that of a directory of the cache")
    model, trainer, anchor = config.model, config.trainer, config.anchor
    norm = config.norm.source if config.norm.kind == "folded" else config.norm
    if model.d_model % model.head_dim:
        raise ConfigError(f"model.d_model={model.d_model} is not a multiple of model.head_dim={model.head_dim}")
    if model.positions == "rotary" and model.head_dim % 2:
        raise ConfigError(f"model.head_dim={model.head_dim}: rotary embeddings need an even width")
    batch, parts = trainer.batch_size, trainer.accumulation
    if batch % parts:
        raise ConfigError(f"trainer.batch_size={batch} is not a multiple of trainer.accumulation={parts}")
    if norm.kind != "standard" and not select_sites(norm.sites, model.n_layer):
        raise ConfigError("norm.sites=[] selects no norm; use norm=baseline for a model without tapered norms")
    if (tokens := trainer.val_tokens) < model.n_ctx:
        raise ConfigError(f"trainer.val_tokens={tokens} is less than one context, model.n_ctx={model.n_ctx}")
    _check_gate(config, tapers=norm.kind in GATED and config.gate.shape != "constant")
    if anchor.absolute_weight is not None and anchor.kind != "fixed_target":
        own = f"anchor={anchor.kind} has anchor.{'spread_weight' if anchor.kind == 'batch_mean' else 'weight'}"
        raise ConfigError(f"anchor.absolute_weight is for anchor=fixed_target; {own}")


def _check_gate(config: Config, tapers: bool) -> None:
    gate, end, waits = config.gate, config.trainer.max_steps, removal_waits(config)
    k_warmup, k_taper = _gate_horizons(config)
    if gate.shape == "step":
        k_taper = k_warmup + 1
    if tapers and not k_warmup < k_taper <= end:
        how = "; gate.first_removal is k_warmup" if gate.k_warmup is None and gate.shape == "sequential" else ""
        if gate.k_taper is None and waits:
            how += f"; gate.gaps={list(gate.gaps or ())} put the last removal at step {k_taper}"
        raise ConfigError(
            f"gate.k_warmup={k_warmup} < gate.k_taper={k_taper} <= trainer.max_steps={end} must hold{how}"
        )
    if tapers and waits and k_taper != (last := k_warmup + 1 + sum(waits)):
        reached = f"gate.gaps={list(gate.gaps or ())} reaches the last removal at step {last}"
        raise ConfigError(f"gate.k_taper={k_taper}: {reached}; leave one of the two out")
    if k_warmup > end:
        raise ConfigError(f"gate.k_warmup={k_warmup} lies beyond trainer.max_steps={end}")
    needs_target = config.anchor.kind not in ("none", "batch_mean")
    if k_warmup == 0 and (needs_target or (tapers and config.calibration.kind != "none")):
        remedy = "use at least 1, or calibration=none anchor=none"
        raise ConfigError(f"gate.k_warmup=0 leaves no step to calibrate on; {remedy}")


def removal_waits(config: Config) -> list[int]:
    """Steps from each removal to the next one where `gate.gaps` decides them, else nothing."""
    gaps = config.gate.gaps
    if config.gate.shape != "sequential" or gaps is None or config.norm.kind not in GATED:
        return []
    stages = [stage for stage, _ in removal_order(config.norm.sites, config.model.n_layer)]
    return [gaps[STAGES.index(stage)] for stage in stages[:-1]]


def _lr_warmup(config: Config) -> int:
    given = config.optim.warmup_steps
    return min(200, math.ceil(0.1 * config.trainer.max_steps)) if given is None else given


def _gate_horizons(config: Config) -> tuple[int, int]:
    """k_warmup and k_taper."""
    steps, gate = config.trainer.max_steps, config.gate
    k_warmup, k_taper = gate.k_warmup, gate.k_taper
    if k_warmup is None and gate.shape == "sequential":
        k_warmup = gate.first_removal
    if k_warmup is None:
        k_warmup = max(math.ceil(0.05 * steps), _lr_warmup(config), min(100, math.floor(0.15 * steps)), 1)
        k_warmup = min(k_warmup, max(1, steps - 1))  # a trial of two steps has a taper, too
    if k_taper is None and (waits := removal_waits(config)):
        k_taper = k_warmup + 1 + sum(waits)
    if k_taper is None:
        k_taper = max(round(gate.k_taper_share * steps), k_warmup + 1)
    return k_warmup, k_taper


def _calibration(given: CalibrationConfig, k_warmup: int) -> CalibrationConfig:
    tracked, decay, window = given.kind == "tracked", given.decay, given.window
    if decay is None:
        decay = 0.5 if tracked else 0.99
    if window is None:
        memory = math.ceil(1 / (1 - decay) - 1e-9)
        window = min(max(30, math.ceil(k_warmup / 2)), max(memory, 30))
    fit = given.fit or ("log" if tracked else "least_squares")
    return replace(given, window=min(window, max(k_warmup, 1)), decay=decay, fit=fit)


def resolve(config: Config, vocab_size: int | None = None) -> Config:
    """Fill in every value that derives from others. Pure, idempotent; resuming uses the saved, resolved values.

    `vocab_size` is the tokenizer's, known once the data is prepared. Raises ConfigError if model.vocab_size differs.
    """
    model, optim, tokenizer, multipliers = config.model, config.optim, config.tokenizer, config.optim.multipliers
    steps = config.trainer.max_steps
    if vocab_size is not None and model.vocab_size not in (None, vocab_size):
        differs = f"model.vocab_size={model.vocab_size} differs from the tokenizer's {vocab_size}"
        raise ConfigError(f"{differs}; use null, or its tokenizer")
    if tokenizer.kind == "bpe" and tokenizer.vocab_size is None:
        tokenizer = replace(tokenizer, vocab_size=max(257, config.dataset.vocab_size))
    k_warmup, k_taper = _gate_horizons(config)
    d_ff = 4 * model.d_model if model.mlp == "gelu" else 8 * math.ceil(model.d_model * 8 / 3 / 8)
    # In a short run the gate closes while a step is a large part of a matrix: see docs/log.md.
    share = 1.0 if optim.lr else min(1.0, steps / 300)
    sixth = max(1, math.ceil(steps / 6))
    return replace(
        config,
        model=replace(
            model,
            d_ff=model.d_ff or d_ff,
            norm_eps=model.norm_eps or {"rms": 1e-6, "layer": 1e-5}[model.norm_family],
            vocab_size=model.vocab_size or vocab_size,
        ),
        gate=replace(config.gate, k_warmup=k_warmup, k_taper=k_taper),
        calibration=_calibration(config.calibration, k_warmup),
        tokenizer=tokenizer,
        optim=replace(
            optim,
            lr=optim.lr or optim.lr_scale * math.sqrt(share) * 0.04 / math.sqrt(model.d_model),
            multipliers=replace(
                multipliers,
                embed=multipliers.embed or share**-0.75,
                writers=multipliers.writers or share,
                readers=multipliers.readers or share,
            ),
            warmup_steps=_lr_warmup(config),
            decay_steps=optim.decay_steps or steps,
        ),
        trainer=replace(
            config.trainer,
            val_interval=config.trainer.val_interval or sixth,
            save_interval=config.trainer.save_interval or sixth,
        ),
    )
