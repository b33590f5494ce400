"""Compare the sites that sinkscope serves of a model with what its layers really add, read without sinkscope."""

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
from .products import head_verdicts, products_of

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
    """The decoder layers: the longest list of modules in which all run in a pass over text."""
    ran: set[torch.nn.Module] = set()
    handles = [m.register_forward_hook(lambda module, *_: ran.add(module)) for m in model.modules()]
    ids = torch.arange(20, 20 + LENGTH)[None]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m)]
    depth = model.config.get_text_config().num_hidden_layers
    whole = [m for m in lists if len(m) == depth and all(layer in ran for layer in m)]
    return list(max(whole, key=lambda m: sum(p.numel() for p in m.parameters())))


def check_sites(model: Any, *, edits: bool = True) -> SiteReport:
    """Compare every site of every layer that holds a part of the residual stream, or queries, keys, values or heads.

    Args:
        model: The model.
        edits: Whether vectors are added at the sites of the last layer as well.
    """
    report = SiteReport()
    target_of(model)  # what is refused as a whole has no sites
    layers = decoder_layers(model)
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(20, min(vocabulary, 300), (1, LENGTH), generator=generator)
    truth = followed(model, layers, ids, Additions)
    products = products_of(model, layers, ids)
    assert len(truth) == len(layers)
    parts = (*RESIDUAL, *HEADS)
    offered: list[str] = []
    for layer in range(len(layers)):
        for part in parts:
            site = f"blocks.{layer}.{part}"
            try:
                resolve(target_of(model), site)
                offered.append(site)
            except SinkscopeError as error:
                report.refused[site] = str(error)
    given = ss.trace(model, ids, offered)
    for layer, (additions, entered, left) in enumerate(truth):
        of_layer = {part: given.get(f"blocks.{layer}.{part}") for part in parts}
        verdicts = _verdicts(of_layer, additions, entered, left)
        verdicts |= head_verdicts(of_layer, products[layer], layers[layer], _summands(additions))
        for part, verdict in verdicts.items():
            site = f"blocks.{layer}.{part}"
            if verdict:
                report.wrong.append(f"{site}: {verdict}")
            else:
                report.right.append(site)
    if edits:
        report.wrong += _wrong_additions(model, layers, ids, set(report.right), truth)
    return report


def _summands(additions: Additions) -> list[Tensor]:
    """All that is added in a layer."""
    return [part for point in additions.points for part in point.added]


def _wrong_additions(model: Any, layers: list[Any], ids: Tensor, right: set[str], truth: list[Any]) -> list[str]:
    """Sites at which `Add` does something else than adding the vector to the residual stream of the last layer."""
    wrong: list[str] = []
    layer = len(layers) - 1
    vector = torch.randn(truth[layer][1].shape[-1], generator=torch.Generator().manual_seed(2)) * truth[layer][1].std()
    intact = _stream(*truth[layer])
    for part in RESIDUAL:
        site = f"blocks.{layer}.{part}"
        if site not in right or part == "hook_resid_mid":  # what is added there would not stay in the stream
            continue
        try:
            with ss.Add(vector, site).on(model):
                edited = _stream(*followed(model, layers, ids, Additions)[layer])
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
    total = torch.zeros_like(parts[0])
    for part in parts:
        if part.shape != total.shape:
            return False
        total = total + part
    if summands and is_close(total, torch.stack(summands).sum(0)):
        return True
    return all(any(is_close(part, summand) for summand in summands) for part in parts)
