"""Compare the sites that sinkscope serves of a model with what its layers really add and multiply."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import sinkscope as ss
from sinkscope.errors import SinkscopeError
from sinkscope.hooks.trace import resolve
from sinkscope.opening.live import target_of

from .additions import Additions, followed, is_close
from .products import eager, is_of_heads

LENGTH = 12
RESIDUAL = ("hook_resid_pre", "hook_attn_out", "hook_resid_mid", "hook_mlp_out", "hook_resid_post")
HEADS = ("attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_z")


@dataclass
class SiteReport:
    """Of one model: sites that are right, wrong, and not offered, with the reason."""

    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The decoder layers: the list of modules of the configured depth, with most parameters, that runs over text."""
    ran: set[torch.nn.Module] = set()
    handles = [m.register_forward_hook(lambda module, *_: ran.add(module)) for m in model.modules()]
    with torch.no_grad():
        model(input_ids=torch.arange(20, 20 + LENGTH)[None], use_cache=False)
    for handle in handles:
        handle.remove()
    depth = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == depth and m[0] in ran]
    return list(max(lists, key=lambda m: sum(p.numel() for p in m.parameters())))


def check_sites(model: Any, *, edits: bool = True) -> SiteReport:
    """Compare every site of every layer that holds a part of the residual stream, or queries, keys, values or heads.

    Args:
        model: The model.
        edits: Whether vectors are added at the sites of the last layer as well.
    """
    report, target = SiteReport(), target_of(model)  # what is refused as a whole has no sites
    layers = decoder_layers(model)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(20, min(vocabulary, 300), (1, LENGTH), generator=torch.Generator().manual_seed(1))
    truth = followed(model, layers, ids, Additions)
    for number, layer in enumerate(layers):
        sites = {}
        for part in (*RESIDUAL, *HEADS):
            try:
                (sites[part],) = resolve(target, f"blocks.{number}.{part}")
            except SinkscopeError as error:
                report.refused[f"blocks.{number}.{part}"] = str(error)
        given = ss.trace(model, ids, [site.name for site in sites.values()])
        verdicts = _verdicts({part: given.get(f"blocks.{number}.{part}") for part in RESIDUAL}, *truth[number])
        with eager(model):
            for part in HEADS:
                if part in sites and not is_of_heads(model, layer, ids, part[-1], sites[part]):
                    verdicts[part] = "not the heads of the softmax attention"
                elif part in sites:
                    verdicts[part] = ""
        for part, verdict in verdicts.items():
            if verdict:
                report.wrong.append(f"blocks.{number}.{part}: {verdict}")
            else:
                report.right.append(f"blocks.{number}.{part}")
    if edits:
        report.wrong += _wrong_additions(model, layers, ids, set(report.right), truth)
    return report


def _wrong_additions(model: Any, layers: list[Any], ids: Tensor, right: set[str], truth: list[Any]) -> list[str]:
    """Sites at which `Add` does something else than adding the vector to the residual stream of the last layer."""
    wrong: list[str] = []
    intact = _stream(*truth[-1])
    vector = torch.randn(intact[0].shape[-1], generator=torch.Generator().manual_seed(2)) * intact[0].std()
    for part in RESIDUAL:
        site = f"blocks.{len(layers) - 1}.{part}"
        if site not in right or part == "hook_resid_mid":  # what is added there would not stay in the stream
            continue
        try:
            with ss.Add(vector, site).on(model):
                edited = _stream(*followed(model, layers, ids, Additions)[-1])
        except SinkscopeError as error:
            wrong.append(f"{site}: Add raises {error}")
            continue
        changes = [new - old for new, old in zip(edited, intact, strict=True)]
        moved = [one for one in changes if bool(one.abs().max() > 1e-3 * vector.abs().max())]  # where it shows first
        most = 1e-4 * vector.abs().max() + 1e-5 * edited[-1].abs().max()
        if not moved or bool((moved[0] - vector).abs().max() > most):
            wrong.append(f"{site}: Add changes the residual stream by something else")
    return wrong


def _stream(additions: Additions, entered: Tensor, left: Tensor) -> list[Tensor]:
    """The residual stream in the order of a layer: what enters, each sum, and what leaves."""
    return [entered, *(point.value for point in additions.points), left]


def _verdicts(given: dict[str, Tensor | None], additions: Additions, entered: Tensor, left: Tensor) -> dict[str, str]:
    """Of each site of a layer that is offered, what is wrong, or "" if nothing is."""
    verdicts: dict[str, str] = {}
    pre, attn, mid, mlp, post = [given.get(part) for part in RESIDUAL]
    if pre is not None and not is_close(pre, entered):
        verdicts["hook_resid_pre"] = "not what enters the layer"
    if post is not None and not is_close(post, left):
        verdicts["hook_resid_post"] = "not what leaves the layer"
    summands, rest = _added(additions, entered, left), {"hook_attn_out": attn, "hook_mlp_out": mlp}
    if mid is not None:
        if additions.at(mid) is None or is_close(mid, left):
            verdicts["hook_resid_mid"] = "never the residual stream between the parts of the layer"
        before = _added(additions, entered, mid)
        if attn is not None and not _are(before, [attn]):
            verdicts["hook_attn_out"] = "not what is added"
        summands, rest = summands[len(before) :], {"hook_mlp_out": mlp}
    offered = {name: part for name, part in rest.items() if part is not None}
    if not _are(summands, list(offered.values())):
        verdicts |= dict.fromkeys(offered, "not what is added")
    return {part: verdicts.get(part, "") for part in RESIDUAL if given.get(part) is not None}


def _added(additions: Additions, entered: Tensor, value: Tensor) -> list[Tensor]:
    """What was added from what enters a layer up to a value of the residual stream."""
    point = additions.at(value)
    return [value - entered] if point is None else point.added


def _are(summands: list[Tensor], parts: list[Tensor]) -> bool:
    """Whether parts are together what is added, or each is one of the summands, where a layer adds more."""
    if not parts:
        return True
    if any(part.shape != parts[0].shape for part in parts):
        return False
    if summands and is_close(torch.stack(parts).sum(0), torch.stack(summands).sum(0)):
        return True
    return all(any(is_close(part, summand) for summand in summands) for part in parts)
