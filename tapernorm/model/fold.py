"""Exact folding: a model whose norms have become fixed linear maps -> an equal model without these layers.

A norm's linear part h -> (h M) * s + beta goes into the projection that reads it, so the layer itself disappears.
`certificate` measures what that changed, in three precisions, and counts the norm operations that are left.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from tapernorm.config.options import FoldedNormConfig
from tapernorm.config.schema import ConfigError
from tapernorm.method.gate import Phase
from tapernorm.method.norms import GatedNorm, LayerForm, is_folded, is_table
from tapernorm.model.decoder import Decoder
from tapernorm.runtime.device import autocast


@torch.no_grad()
def fold(model: Decoder, *, gains: bool = True, table: bool = False) -> Decoder:
    """W' = W diag(s) M,  b' = b + W beta,  for every projection W (out, D) that reads a norm with a linear part.

    s (D,) is c * gamma_t for a TaperNorm, c * gamma for a FakeNorm, and both disappear; M = I - 11^T/D centres and is
    there for TaperLN and FakeLN alone.
    A standard norm keeps its statistic and loses its gain, s = gamma, unless `gains` is False. A tied head that the
    final norm goes into is untied first: the embedding keeps its values. DyT, Derf and absent norms stay as they are.

    With `table`, a standard norm of 0.attn disappears too: without learned positions it reads E[token] alone (where no
    dropout acts), so that W N[token] is what W norm(E[token]) was,

        N_i = norm(E_i), gain and bias included, for every token id i: N (V, D).

    Returns a new model, float64 inside and cast back; the given one is not touched. Raises ConfigError, one line, while
    a gate is open, for a model that is folded already, and for a `table` where 0.attn has no such norm.
    """
    if isinstance(model.norm_config, FoldedNormConfig):
        raise ConfigError(f"norm {model.norm_config.name}: this model is folded already")
    refuse_open_gates(model)
    rows = norm_table(model) if table else None
    source = model.norm_config
    norm = FoldedNormConfig(name=f"{source.name}_folded", source=source, gains=gains, table=table)
    tied = model.config.tied and not is_folded(norm, model.config, "final")
    with torch.random.fork_rng(devices=[]):  # layers draw weights when they are made, and all of these are replaced
        folded = Decoder(replace(model.config, tied=tied), norm)
    folded.to(model.embed.weight).train(model.training)
    wanted, given = folded.state_dict(), model.state_dict()
    folded.load_state_dict({name: given[name] for name in wanted.keys() & given.keys()}, strict=False)
    for (site, layer, reader), (_, _, target) in zip(readers(model), readers(folded), strict=True):
        if is_folded(norm, model.config, site):
            weight, bias = absorb(layer, reader.weight, getattr(reader, "bias", None))
            target.weight.copy_(weight)
            if target.bias is not None:
                target.bias.copy_(bias)
    if folded.table is not None and rows is not None:
        folded.table.weight.copy_(rows)
    return folded


def norm_table(model: Decoder) -> Tensor:
    """N (V, D), N_i = norm(E_i): what 0.attn reads of token i, in float64 on the CPU.

    Raises ConfigError, one line, where it reads more than the token, or through no standard norm.
    """
    _, norm = next(model.norms())
    if model.position_embed is not None:
        raise ConfigError("fold_table: with model.positions=learned 0.attn reads more than the token; leave it out")
    if not isinstance(norm, nn.RMSNorm | nn.LayerNorm):
        raise ConfigError(
            f"fold_table: norm {model.norm_config.name} has no standard norm at 0.attn to make a table of; "
            "norm.sites=[1-.attn,mlp] keeps it"
        )
    return copy.deepcopy(norm).to("cpu", torch.float64)(model.embed.weight.to("cpu", torch.float64))


def what_is_left(model: Decoder) -> dict[str, list[str]]:
    """The sites of a folded model by what is there now: no layer, a table, a statistic alone, or a layer as it was.

    The last are DyT and Derf, and standard norms that kept their gain.
    """
    found: dict[str, list[str]] = {"removed": [], "table": [], "weightless": [], "not_folded": []}
    for site, layer in model.norms():
        folded = "weightless" if is_folded(model.norm_config, model.config, site) else "not_folded"
        gone = "removed" if isinstance(layer, nn.Identity) else folded
        found["table" if is_table(model.norm_config, site) else gone].append(site)
    return found


def refuse_open_gates(model: Decoder) -> None:
    """Raise ConfigError, one line with gates and sites, for a model that is not tapered to the end."""
    sites: dict[float, list[str]] = {}
    for site, norm in model.gated_norms().items():
        if norm.phase is not Phase.TAPERED or norm.gate > 0:
            sites.setdefault(norm.gate.item(), []).append(site)
    if sites:
        found = "; ".join(f"{gate:.4g} at {', '.join(names)}" for gate, names in sites.items())
        raise ConfigError(f"a model with an open gate cannot be folded (gate {found}); taper it to gate 0 first")


def readers(model: Decoder) -> Iterator[tuple[str, nn.Module, Any]]:
    """(site, norm, the projection that reads it) in the order of the forward pass."""
    blocks: list[Any] = list(model.blocks)
    parts = [part for block in blocks for part in (block.attn, block.mlp)]
    projections = [next(part.children()) for part in parts]  # the first layer of either
    projections.append(model.embed if model.head is None else model.head)
    for (site, norm), projection in zip(model.norms(), projections, strict=True):
        yield site, norm, projection


def absorb(norm: Any, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """W diag(s) M (out, D) and b + W beta (out,), in float64 on the CPU (which every device's numbers fit into)."""
    exact: dict[str, Any] = {"device": "cpu", "dtype": torch.float64}
    matrix, shift = weight.to(**exact), torch.zeros(weight.shape[0], **exact)
    if bias is not None:
        shift = shift + bias.to(**exact)
    if getattr(norm, "bias", None) is not None:
        shift = shift + matrix @ norm.bias.to(**exact)
    matrix = matrix * (norm.end_gain() if isinstance(norm, GatedNorm) else norm.weight).to(**exact)
    if isinstance(norm, LayerForm):
        matrix = matrix - matrix.mean(1, keepdim=True)  # W M: every row loses its mean
    return matrix, shift


# --------------------------------------------------------------------------------------------------------- certificate


def certificate(unfolded: Decoder, folded: Decoder, tokens: Tensor) -> dict[str, Any]:
    """max |z' - z| and max |softmax z' - softmax z| over the logits z (B, T, V) of token ids (B, T); plain JSON.

    In float64, which folds anew without rounding W' and so shows the algebra; in float32 with the weights given; and
    with these in bfloat16 as training and evaluation use it (autocast). Beside each stands that precision's own
    rounding error, max |z - z in float64| of the unfolded model, to compare with: folding moves roundings about.
    """
    assert isinstance(folded.norm_config, FoldedNormConfig)
    device = unfolded.embed.weight.device
    device = torch.device("cpu") if device.type == "mps" else device  # it has no float64
    pair = [copy.deepcopy(model).to(device, torch.float32).eval() for model in (unfolded, folded)]
    tokens = tokens.to(device)
    before, after = (count_norm_operations(model, tokens[:1]) for model in pair)
    double = copy.deepcopy(pair[0]).double()
    doubles = [double, fold(double, gains=folded.norm_config.gains, table=folded.norm_config.table)]
    reference: list[Tensor] = []
    errors: dict[str, dict[str, float]] = {}
    for name, models in {"float64": doubles, "float32": pair, "bfloat16": pair}.items():
        worst = torch.zeros(3, dtype=torch.float64, device=device)
        for index, row in enumerate(tokens.split(1)):  # one window at a time: logits in float64 are large
            with torch.no_grad(), autocast(device, torch.bfloat16) if name == "bfloat16" else nullcontext():
                a, b = (model(row).double() for model in models)
            if name == "float64":
                reference.append(a.cpu())
            parts = (b - a, torch.softmax(b, -1) - torch.softmax(a, -1), a - reference[index].to(device))
            worst = torch.maximum(worst, torch.stack([part.abs().max() for part in parts]))
        measures = ("max_logit_error", "max_probability_error", "rounding_error")
        errors[name] = dict(zip(measures, worst.tolist(), strict=True))
    return {
        "norm": unfolded.norm_config.name,
        "tokens": tokens.numel(),
        "errors": errors,
        "max_logit": max(z.abs().max().item() for z in reference),
        "head": "tied" if folded.config.tied else "untied by folding" if unfolded.config.tied else "untied",
        "norm_operations": {"unfolded": before, "folded": after},
        "sites": what_is_left(folded),
    }


def describe(report: dict[str, Any]) -> list[str]:
    """A certificate for people to read."""
    before, after = report["norm_operations"].values()
    sites = report["sites"]
    lines = [
        f"folded {report['norm']}: {len(sites['removed'])} of {sum(map(len, sites.values()))} norms removed, head "
        f"{report['head']}, norm operations left in the graph: {after} (unfolded: {before})"
    ]
    if sites.get("table"):  # older certificates do not know it
        lines.append("  0.attn reads a table by token id, in which its norm is done")
    if sites["not_folded"]:
        lines.append(f"  not folded, left as they are: {', '.join(sites['not_folded'])}")
    lines += [
        f"  {name:<8}  largest error of a logit {error['max_logit_error']:.2g}, of a probability "
        f"{error['max_probability_error']:.2g} (rounding alone, logit: {error['rounding_error']:.2g})"
        for name, error in report["errors"].items()
    ]
    return [*lines, f"  over {report['tokens']:,} tokens, logits up to {report['max_logit']:.3g}"]


OPERATOR = type(torch.ops.aten.sqrt.default)  # a graph also calls Python functions, such as getitem
# Any fused norm and vector norm, whoever's operator; the root or deviation that a hand-written one cannot do without.
NORM_OPERATION = re.compile(r"norm(?!al)|^r?sqrt_?$|^std")


def count_norm_operations(model: nn.Module, example: Tensor) -> int:
    """Number of per-token norms in the graph that torch.export makes of model(example).

    Counts fused norms (rms_norm, layer_norm, ...), vector norms, square roots and powers of +-1/2 of anything computed
    from the input, so a hand-written RMSNorm counts once. The graph is not decomposed, so that attention stays one
    operator: its constant scale is no norm.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own
        program = torch.export.export(model, (example,))
    inputs = set(program.graph_signature.user_inputs)
    parts = [part for part in program.graph_module.modules() if isinstance(part, GraphModule)]
    # Inside a nested graph (autocast, cond) every argument may come from the input.
    return sum(_count(part.graph, inputs if part is program.graph_module else None) for part in parts)


def _count(graph: Graph, inputs: set[Any] | None) -> int:
    from_input = {n for n in graph.nodes if n.op == "placeholder" and (inputs is None or n.name in inputs)}
    found = 0
    for node in graph.nodes:
        if from_input.isdisjoint(node.all_input_nodes):
            continue
        from_input.add(node)
        if node.op == "call_function":
            name = str(node.target).split(".")[1] if isinstance(node.target, OPERATOR) else ""
            root = name in ("pow", "pow_", "float_power") and node.args[1] in (0.5, -0.5)
            found += bool(NORM_OPERATION.search(name)) or root
    return found
