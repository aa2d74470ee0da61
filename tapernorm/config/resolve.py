"""resolve"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tapernorm.config.options import GATED, CalibrationConfig, Config
from tapernorm.config.schema import (
    ConfigError,
    validate,
)
from tapernorm.config.sites import STAGES, removal_order, select_sites


def build(tree: Mapping[str, Any]) -> Config:
    """Check a plain nested mapping against the training schema and return the frozen configuration.

    Raises ConfigError, one line, as `validate` does, and for values that contradict each other.
    """
    config = validate(tree, Config)
    _check_relations(config)
    return config


def _check_relations(config: Config) -> None:
    """Ranges that involve more than one key."""
    model, trainer, gate = config.model, config.trainer, config.gate
    norm = config.norm.source if config.norm.kind == "folded" else config.norm
    if model.d_model % model.head_dim:
        raise ConfigError(f"model.d_model={model.d_model} is not a multiple of model.head_dim={model.head_dim}")
    if model.positions == "rotary" and model.head_dim % 2:
        raise ConfigError(f"model.head_dim={model.head_dim}: rotary embeddings need an even width")
    if trainer.batch_size % trainer.accumulation:
        raise ConfigError(
            f"trainer.batch_size={trainer.batch_size} is not a multiple of trainer.accumulation={trainer.accumulation}"
        )
    select_sites(norm.sites, model.n_layer)
    if norm.kind != "standard" and not norm.sites:
        raise ConfigError("norm.sites=[] selects no norm; use norm=baseline for a model without tapered norms")
    if trainer.val_tokens < model.n_ctx:
        raise ConfigError(
            f"trainer.val_tokens={trainer.val_tokens} is less than one context, model.n_ctx={model.n_ctx}"
        )
    horizons = resolve_horizons(config)
    k_warmup, k_taper = horizons["k_warmup"], horizons["k_taper"]
    tapers = norm.kind in GATED and gate.shape != "constant"
    if gate.shape == "step":
        k_taper = k_warmup + 1
    if tapers and not k_warmup < k_taper <= trainer.max_steps:
        how = "; gate.first_removal is k_warmup" if gate.k_warmup is None and gate.shape == "sequential" else ""
        if gate.k_taper is None and removal_waits(config):
            how += f"; gate.gaps={list(gate.gaps or ())} put the last removal at step {k_taper}"
        raise ConfigError(
            f"gate.k_warmup={k_warmup} < gate.k_taper={k_taper} <= trainer.max_steps={trainer.max_steps} must hold{how}"
        )
    if tapers and (waits := removal_waits(config)) and k_taper != k_warmup + 1 + sum(waits):
        raise ConfigError(
            f"gate.k_taper={k_taper}: gate.gaps={list(gate.gaps or ())} reaches the last removal at step "
            f"{k_warmup + 1 + sum(waits)}; leave one of the two out"
        )
    if k_warmup > trainer.max_steps:
        raise ConfigError(f"gate.k_warmup={k_warmup} lies beyond trainer.max_steps={trainer.max_steps}")
    needs_target = config.anchor.kind not in ("none", "batch_mean")
    if k_warmup == 0 and ((tapers and config.calibration.kind != "none") or needs_target):
        raise ConfigError(
            "gate.k_warmup=0 leaves no step to calibrate on; use at least 1, or calibration=none anchor=none"
        )
    if config.anchor.absolute_weight is not None and config.anchor.kind != "fixed_target":
        own = "spread_weight" if config.anchor.kind == "batch_mean" else "weight"
        raise ConfigError(
            f"anchor.absolute_weight is for anchor=fixed_target; anchor={config.anchor.kind} has anchor.{own}"
        )


def removal_waits(config: Config) -> list[int]:
    """Steps from each removal to the next one where `gate.gaps` decides them, else nothing."""
    gaps = config.gate.gaps
    if config.gate.shape != "sequential" or gaps is None or config.norm.kind not in GATED:
        return []
    stages = [stage for stage, _ in removal_order(config.norm.sites, config.model.n_layer)]
    return [gaps[STAGES.index(stage)] for stage in stages[:-1]]


def resolve_horizons(config: Config) -> dict[str, int]:
    """Steps that derive from the length of the run (method: gate schedule, statistics window)."""
    steps = config.trainer.max_steps
    optim, gate, calibration = config.optim, config.gate, config.calibration
    lr_warmup = min(200, math.ceil(0.1 * steps)) if optim.warmup_steps is None else optim.warmup_steps
    k_warmup = gate.k_warmup
    if k_warmup is None and gate.shape == "sequential":
        k_warmup = gate.first_removal
    if k_warmup is None:
        k_warmup = max(math.ceil(0.05 * steps), lr_warmup, min(100, math.floor(0.15 * steps)), 1)
        k_warmup = min(k_warmup, max(1, steps - 1))  # a trial of two steps has a taper, too
    k_taper = gate.k_taper
    if k_taper is None and (waits := removal_waits(config)):
        k_taper = k_warmup + 1 + sum(waits)
    if k_taper is None:
        k_taper = max(round(gate.k_taper_share * steps), k_warmup + 1)
    window = calibration.window
    if window is None:
        memory = math.ceil(1 / (1 - _decay(calibration)) - 1e-9)
        window = min(max(30, math.ceil(k_warmup / 2)), max(memory, 30))
    return {
        "warmup_steps": lr_warmup,
        "decay_steps": optim.decay_steps or steps,
        "k_warmup": k_warmup,
        "k_taper": k_taper,
        "window": min(window, max(k_warmup, 1)),
    }


def _decay(calibration: CalibrationConfig) -> float:
    return {"tracked": 0.5}.get(calibration.kind, 0.99) if calibration.decay is None else calibration.decay


def resolve(config: Config, vocab_size: int | None = None) -> Config:
    """Fill in every value that derives from others. Pure, idempotent; resuming uses the saved, resolved values.

    `vocab_size` is the tokenizer's, known once the data is prepared. Raises ConfigError if model.vocab_size differs.
    """
    model, trainer, multipliers = config.model, config.trainer, config.optim.multipliers
    horizons = resolve_horizons(config)
    # In a short run the gate closes while a step is a large part of a matrix: see docs/log.md.
    share = 1.0 if config.optim.lr else min(1.0, trainer.max_steps / 300)
    if vocab_size is not None and model.vocab_size not in (None, vocab_size):
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} differs from the tokenizer's {vocab_size}; use null, or its tokenizer"
        )
    sixth = max(1, math.ceil(trainer.max_steps / 6))
    replace = dataclasses.replace
    return replace(
        config,
        model=replace(
            model,
            d_ff=model.d_ff or (4 * model.d_model if model.mlp == "gelu" else 8 * math.ceil(model.d_model * 8 / 3 / 8)),
            norm_eps=model.norm_eps or {"rms": 1e-6, "layer": 1e-5}[model.norm_family],
            vocab_size=model.vocab_size or vocab_size,
        ),
        gate=replace(config.gate, k_warmup=horizons["k_warmup"], k_taper=horizons["k_taper"]),
        calibration=replace(
            config.calibration,
            window=horizons["window"],
            decay=_decay(config.calibration),
            fit=config.calibration.fit or ("log" if config.calibration.kind == "tracked" else "least_squares"),
        ),
        tokenizer=replace(
            config.tokenizer,
            vocab_size=(config.tokenizer.vocab_size or max(257, config.dataset.vocab_size))
            if config.tokenizer.kind == "bpe"
            else config.tokenizer.vocab_size,
        ),
        optim=replace(
            config.optim,
            lr=config.optim.lr or math.sqrt(share) * 0.04 / math.sqrt(model.d_model),
            multipliers=replace(
                multipliers,
                embed=multipliers.embed or share**-0.75,
                writers=multipliers.writers or share,
                readers=multipliers.readers or share,
            ),
            warmup_steps=horizons["warmup_steps"],
            decay_steps=horizons["decay_steps"],
        ),
        trainer=replace(
            trainer,
            val_interval=trainer.val_interval or sixth,
            save_interval=trainer.save_interval or sixth,
        ),
    )
