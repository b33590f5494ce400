"""Compare the sites that sinkscope serves of a model with what its layers really add, read without sinkscope."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import sinkscope as ss
from sinkscope.errors import SinkscopeError
from sinkscope.hooks.trace.sites import resolve
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
    for part in RESIDUAL:
        site = f"blocks.{layer}.{part}"
        if site not in right:
            continue
        try:
            edit = ss.Add(vector, site)
            with edit.on(model):
                additions, entered, left = followed(model, layers, ids, Additions)[layer]
        except SinkscopeError as error:
            wrong.append(f"{site}: Add raises {error}")
            continue
        before, entered_before, left_before = truth[layer]
        changes = {"hook_resid_pre": entered - entered_before, "hook_resid_post": left - left_before}
        if part in changes:
            change = changes[part]
        else:  # the first sum in which it shows
            pairs = zip(additions.points, before.points, strict=True)
            changes_of_sums = [new.value - old.value for new, old in pairs]
            moved = [one for one in changes_of_sums if bool(one.abs().max() > 1e-3 * vector.abs().max())]
            change = moved[0] if moved else left - left_before
        if not bool((change - vector).abs().max() <= 1e-4 * vector.abs().max() + 1e-5 * left.abs().max()):
            wrong.append(f"{site}: Add changes the residual stream by something else")
    return wrong


def _verdicts(given: dict[str, Tensor | None], additions: Additions, entered: Tensor, left: Tensor) -> dict[str, str]:
    """Of each site of a layer that is offered, what is wrong, or "" if nothing is."""
    verdicts: dict[str, str] = {}
    pre, attn, mid, mlp, post = [given.get(part) for part in RESIDUAL]
    if pre is not None:
        verdicts["hook_resid_pre"] = "" if is_close(pre, entered) else "not what enters the layer"
    if post is not None:
        verdicts["hook_resid_post"] = "" if is_close(post, left) else "not what leaves the layer"
    start = entered
    if mid is not None:
        point = additions.at(mid)
        verdicts["hook_resid_mid"] = ""
        if point is None:
            verdicts["hook_resid_mid"] = "never the residual stream in this layer"
        elif is_close(mid, left):
            verdicts["hook_resid_mid"] = "what leaves the layer"
        if attn is not None:
            verdicts["hook_attn_out"] = _sum(entered, [attn], mid)
        start = mid
    rest = [part for part in ([attn] if mid is None else []) + [mlp] if part is not None]
    if rest:
        verdict = _sum(start, rest, left)
        # Where a layer does more than add two parts, each part that is offered has to be one of what is added.
        added = additions.at(left)
        if verdict and added is not None:
            verdict = ""
            for part in rest:
                if not any(is_close(part, summand) for summand in added.added):
                    verdict = "not what is added"
        for part in ("hook_attn_out",) * (mid is None and attn is not None) + ("hook_mlp_out",) * (mlp is not None):
            verdicts[part] = verdict
    return verdicts


def _sum(start: Tensor, added: list[Tensor], end: Tensor) -> str:
    """ "" if what is added leads from start to end, relative to what is added."""
    total = torch.zeros_like(start)
    for part in added:
        if part.shape != start.shape:
            return f"of shape {tuple(part.shape)}"
        total = total + part
    change = end - start
    size = max(float(change.abs().max()), float(total.abs().max()))
    error = float((change - total).abs().max())
    rounding = 4 * torch.finfo(torch.float32).eps * float(torch.maximum(start.abs().max(), end.abs().max()))
    if error <= 1e-4 * size + rounding:
        return ""
    return f"the sum is off by {error / max(size, 1e-30):.2g}"
