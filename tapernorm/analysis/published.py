"""Losses that others published for GPT-2, to be read beside ours.

Baroni et al. (2025) removed GPT-2's LayerNorms one by one while fine-tuning on OpenWebText (FakeLN), and report means
in nats per token on three data sets. Theirs are other samples of the same sources, prepared by other code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from tapernorm.config.options import ModelConfig

SOURCE = "Baroni et al. (2025), on other samples of these data sets"
ROWS = ("original", "vanilla fine-tuning", "LayerNorm-free")
DATASETS = ("openwebtext", "pile", "pile_filtered")
LOSSES = {  # by size and row, in the order of DATASETS
    "gpt2": ((3.1006, 2.8450, 2.7899), (3.0126, 2.8511, 2.8112), (3.0797, 2.8852, 2.8757)),
    "gpt2_medium": ((2.8145, 2.5163, 2.5390), (2.7390, 2.5752, 2.5724), (2.7642, 2.6579, 2.6352)),
    "gpt2_large": ((2.6623, 2.5320, 2.4347), (2.6240, 2.6233, 2.5074), (2.6384, 2.7504, 2.5159)),
    "gpt2_xl": ((2.5567, 2.4436, 2.3739), (2.4799, 2.4673, 2.3821), (2.5052, 130.2, 2.3992)),
}
# Given for the one mean that a few sequences carry.
MEDIANS = {("gpt2_xl", "LayerNorm-free", "pile"): 1.09}
SHAPES = {"gpt2": (12, 768), "gpt2_medium": (24, 1024), "gpt2_large": (36, 1280), "gpt2_xl": (48, 1600)}
VOCAB_SIZE = 50257


def size_of(model: ModelConfig) -> str | None:
    """The published size that a model has, by blocks, width and vocabulary, whatever its name; None for any other."""
    shape = (model.n_layer, model.d_model)
    own = model.positions == "learned" and model.vocab_size == VOCAB_SIZE
    return next((name for name, known in SHAPES.items() if own and known == shape), None)


def rows(models: Iterable[str], datasets: Collection[str]) -> list[dict[str, Any]]:
    """What was published of these sizes, in order: {model, name, datasets: {name: numbers}}."""
    found = []
    for model in dict.fromkeys(models):
        if model not in LOSSES:
            continue
        for name, losses in zip(ROWS, LOSSES[model], strict=True):
            known = dict(zip(DATASETS, losses, strict=True))
            numbers = {
                dataset: {"loss": known[dataset], "median": MEDIANS.get((model, name, dataset))}
                for dataset in datasets
                if dataset in known
            }
            found.append({"model": model, "name": name, "datasets": numbers})
    return found
