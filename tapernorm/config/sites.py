"""Names of the norms of a model, which of them a pattern selects, and the order of their removal."""

from __future__ import annotations

import re

from tapernorm.config.schema import ConfigError

SITE_PATTERN = re.compile(r"(?:(\d+)(-\d*)?\.)?(attn|mlp)|final")


def select_sites(patterns: tuple[str, ...], n_layer: int) -> list[str]:
    """The site names ('0.attn', '0.mlp', ..., 'final') that `patterns` select, in the order of the forward pass.

    Raises ConfigError for a pattern that is malformed or names a block that the model lacks.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        match = SITE_PATTERN.fullmatch(pattern)
        if match is None:
            forms = "attn, mlp, final, 0.attn, 2-5.mlp or 1-.attn"
            raise ConfigError(f"norm.sites: '{pattern}' is not a site; write {forms}")
        first, last, site = match.groups()
        if site is None:
            chosen.add("final")
            continue
        end = n_layer if first is None or last == "-" else int((last or first).strip("-")) + 1
        blocks = range(int(first or 0), end)
        if not blocks or blocks[-1] >= n_layer:
            raise ConfigError(f"norm.sites: '{pattern}' is outside the model's blocks 0 to {n_layer - 1}")
        chosen.update(f"{block}.{site}" for block in blocks)
    return [name for name in all_sites(n_layer) if name in chosen]


def all_sites(n_layer: int) -> list[str]:
    """Names of every norm of a model: '<block>.attn', '<block>.mlp' per block, then 'final'."""
    return [f"{block}.{site}" for block in range(n_layer) for site in ("attn", "mlp")] + ["final"]


STAGES = ("mlp", "qk", "v", "final")  # in the order of their removal


def removal_order(sites: tuple[str, ...], n_layer: int) -> list[tuple[str, str]]:
    """(stage, site) of every removal of a sequence, in its order, block after block within a stage.

    All MLP norms, then the attention norms for what Q and K read, then these for what V reads, then the final norm.
    """
    chosen = select_sites(sites, n_layer)
    kinds = {"mlp": "mlp", "qk": "attn", "v": "attn", "final": "final"}
    return [(stage, site) for stage in STAGES for site in chosen if site.rpartition(".")[2] == kinds[stage]]


def removal_turns(sites: tuple[str, ...], n_layer: int) -> dict[str, tuple[float, ...]]:
    """By site the gate values at which its removals come: the i-th of all n, i = 1..n, at g = 1 - i/n."""
    order = removal_order(sites, n_layer)
    turns: dict[str, tuple[float, ...]] = {}
    for number, (_, site) in enumerate(order, 1):
        turns[site] = (*turns.get(site, ()), 1.0 - number / len(order))
    return turns
