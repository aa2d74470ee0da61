"""`tapernorm.convert`: which norms of a model are tapered."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from tapernorm.conversion.handle import Tapering
from tapernorm.conversion.recognise import NormSpec, recognise

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
    heads = {name for name in specs if _norms_heads(module, name, specs[name].dim)}
    last = _last_norm(specs, heads) if final_norm is None else final_norm
    if last not in specs:
        raise ValueError(f"final_norm {last!r} is no norm of the model{_nearest(last, specs)}")
    chosen = _select(module, specs, norms, heads) - {last} | ({last} if final else set())
    if not chosen:
        raise ValueError(f"no norm to taper in {type(module).__name__}: {last} is the final one; pass final=True")
    of_a_head = "it norms single heads; name it in norms"
    for name in specs.keys() - chosen:
        left_alone[name] = of_a_head if norms == "all" and name in heads else "norms does not select it"
    if not final:
        left_alone[last] = "it is the final norm, kept as the anchor (final=False)"
    return Tapering(module, {name: specs[name] for name in specs if name in chosen}, left_alone, last, specs[last])


def _norms_heads(module: nn.Module, name: str, dim: int) -> bool:
    """Whether a norm is one of single heads: its width divides an output of what is beside it, and nothing reads it."""
    siblings = (getattr(child, "weight", None) for child in module.get_submodule(name.rpartition(".")[0]).children())
    sizes = [set(weight.shape) for weight in siblings if isinstance(weight, nn.Parameter) and weight.dim() == 2]
    return any(size % dim == 0 for pair in sizes for size in pair) and not any(dim in pair for pair in sizes)


def _last_norm(specs: Mapping[str, NormSpec], heads: set[str]) -> str:
    candidates = [name for name in specs if name not in heads] or list(specs)
    # Blocks are numbered, and what follows them is not: 'model.norm' after 'model.layers.3.input_layernorm'.
    return min(reversed(candidates), key=lambda name: sum(part.isdigit() for part in name.split(".")))


def _select(module: nn.Module, specs: Mapping[str, NormSpec], norms: Norms, heads: set[str]) -> set[str]:
    if norms == "all":
        return specs.keys() - heads
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
