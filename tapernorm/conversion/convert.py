"""`tapernorm.convert`: which norms of a model are tapered."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from tapernorm.conversion.handle import Tapering
from tapernorm.conversion.recognise import NormSpec, recognise

# The norms of single heads' queries and keys, by the last part of their name: q_norm, k_layernorm, norm_q, query_norm.
PER_HEAD = re.compile(r"(^|[._])(q|k|query|key)(_[^.]*)?$")
Norms = str | Sequence[str] | Callable[[str, nn.Module], bool]


def convert(module: nn.Module, norms: Norms = "all", *, final: bool = False, final_norm: str | None = None) -> Tapering:
    """Put a tapered layer in the place of a model's norms and return the handle on them; at gate 1 nothing changes.

    norms       "all" (but the per-head norms of queries and keys), one fnmatch pattern over the full names or a list of
                them ("*" also matches dots: "model.layers.[0-3].*", "*.q_norm"), or a predicate (name, module) -> bool.
    final       whether the norm in front of the head is tapered too. Kept, it is the implicit anchor.
    final_norm  its name; default: of the norms that lie in the fewest numbered blocks (per-head norms apart), the last
                one in the module tree. `calibrate` checks it: it must be the last one that runs.

    nn.LayerNorm, nn.RMSNorm and every module that computes one of them are norms, see `recognise`. The parameters
    stay the same objects under the same names; convert before torch.compile, DDP and FSDP, and after `.to(dtype)`.

    Raises ValueError, one line: no norm to taper, a pattern, a predicate or a final_norm that none answers to.
    """
    found = {name: recognise(part) for name, part in module.named_modules() if name}
    specs = {name: spec for name, spec in found.items() if isinstance(spec, NormSpec)}
    left_alone = {name: reason for name, reason in found.items() if isinstance(reason, str)}
    if not specs:
        example = "".join(f"; {name}: {reason}" for name, reason in list(left_alone.items())[:1])
        raise ValueError(f"no norm to taper in {type(module).__name__}{example}")
    last = _last_norm(specs) if final_norm is None else final_norm
    if last not in specs:
        raise ValueError(f"final_norm {last!r} is no norm of the model{_nearest(last, specs)}")
    chosen = _select(module, specs, norms) - {last} | ({last} if final else set())
    if not chosen:
        raise ValueError(f"no norm to taper in {type(module).__name__}: {last} is the final one; pass final=True")
    not_chosen = "it norms single heads; name it in norms" if norms == "all" else "norms does not select it"
    left_alone |= {name: not_chosen for name in specs if name not in chosen}
    if not final:
        left_alone[last] = "it is the final norm, kept as the anchor (final=False)"
    return Tapering(module, {name: specs[name] for name in specs if name in chosen}, left_alone, last, specs[last])


def _last_norm(specs: Mapping[str, NormSpec]) -> str:
    candidates = [name for name in specs if not PER_HEAD.search(name)] or list(specs)
    # Blocks are numbered, and what follows them is not: 'model.norm' after 'model.layers.3.input_layernorm'.
    return min(reversed(candidates), key=lambda name: sum(part.isdigit() for part in name.split(".")))


def _select(module: nn.Module, specs: Mapping[str, NormSpec], norms: Norms) -> set[str]:
    if norms == "all":
        return {name for name in specs if not PER_HEAD.search(name)}
    if callable(norms):
        chosen = {name for name in specs if norms(name, module.get_submodule(name))}
        if not chosen:
            example = next(iter(specs))
            raise ValueError(f"norms: the predicate selects none of the {len(specs)} norms, such as {example}")
        return chosen
    chosen = set()
    for pattern in [norms] if isinstance(norms, str) else norms:
        matches = {name for name in specs if fnmatchcase(name, pattern)}
        if not matches:
            raise ValueError(f"norms: {pattern!r} matches no norm{_nearest(pattern, specs)}")
        chosen |= matches
    return chosen


def _nearest(name: str, names: Iterable[str]) -> str:
    return "; nearest: " + ", ".join(difflib.get_close_matches(name, list(names), n=3, cutoff=0.0))
