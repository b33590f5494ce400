"""`trace`: run a model once and stream what is requested; raw tensors are kept only if requested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from inspect import signature
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.records import Natural
from sinkscope.hooks.trace.sites import Pattern, Site, resolve
from sinkscope.models.hooks import Hook, on_input, on_output
from sinkscope.models.inputs import read_inputs
from sinkscope.models.norms import norms_of
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.results.options import checks_arguments
from sinkscope.tap.observers import attention_rows

Reducer = Callable[[Tensor], Tensor]
"""Takes a site's tensor `[batch pos ...]` (rows of attention: `[batch head query key]`), keeps the batch dimension."""
RealTokens = Bool[Tensor, "batch pos"]


def _mean(tensor: Tensor, real: RealTokens) -> Tensor:
    weights = real.view(*real.shape, *[1] * (tensor.ndim - 2))
    return torch.where(weights, tensor.float(), 0).sum(1) / weights.sum(1)


def _first(tensor: Tensor, real: RealTokens) -> Tensor:
    return tensor[torch.arange(len(tensor)), real.int().argmax(1)]


def _last(tensor: Tensor, real: RealTokens) -> Tensor:
    return tensor[torch.arange(len(tensor)), real.shape[1] - 1 - real.int().flip(1).argmax(1)]


REDUCERS: dict[str, Callable[[Tensor, RealTokens], Tensor]] = {
    "raw": lambda tensor, _real: tensor,
    "norm": lambda tensor, _real: norms_of(tensor),
    "mean": _mean,
    "last": _last,
    "first": _first,
}
"""By name: called with the tensor, and with which of its positions hold tokens."""


@checks_arguments
def trace(
    model: object,
    tokens: Any,
    sites: Pattern | Sequence[Pattern] = (),
    reduce: str | Reducer = "raw",
    *,
    attention_mask: Any = None,
    batch_size: Natural | None = None,
    tokenizer: Any = None,
    bos: bool | None = None,
) -> dict[str, Tensor]:
    """Run the model once and return each site's reduced tensor, on the CPU.

    Args:
        model: Plain Hugging Face, TransformerBridge, nnsight, or a Target.
        tokens: Ids `[batch pos]`, also as a list or lists; one or several texts; or a tokenizer's output. Rows of
            different lengths are padded on the right.
        sites: TransformerLens names, patterns such as `"blocks.*.hook_resid_post"`, or a function of a name,
            `lambda name: name.endswith("hook_z")`. `site_names(n_layers)` lists all: `hook_embed`; in each layer
            `blocks.L.` with `hook_resid_pre`, `hook_attn_out`, `hook_resid_mid`, `hook_mlp_out`, `hook_resid_post`,
            `mlp.hook_pre`, `mlp.hook_pre_linear`, `mlp.hook_post`, `attn.hook_q`, `attn.hook_k`, `attn.hook_v`,
            `attn.hook_z` and `attn.hook_pattern`; `ln_final`, the input of the unembedding, and `logits`, its output.
            `attn.hook_pattern` is recomputed in query chunks while fast attention runs.
        reduce: "raw", "norm" (L2 over the last dimension), "mean" over positions, "first" or "last" position, or a
            function of one tensor. It runs inside the hook, so only its result is kept. Chunks of attention rows are
            reduced one by one and joined along the query dimension. At other sites "mean", "first" and "last"
            ignore padding; a function receives it with the rest.
        attention_mask: 1 for real tokens, 0 for padding, `[batch pos]`.
        batch_size: Rows per forward pass. None runs all at once.
        tokenizer: Tokenizer for texts, if the model carries none.
        bos: Whether texts begin with BOS. By default the tokenizer decides.

    Returns:
        The tensor of each site by its name, in the order of the forward pass; the first dimension is the batch.

    The pass ends after the deepest site. The model is left unchanged.

    Raises:
        SinkscopeError: Tokens are invalid for this model, or a site or reduction is unknown.
        UnsupportedError: This architecture has no such site.
    """
    target = target_of(model, tokenizer)
    if not sites:
        raise SinkscopeError('no site is given: expected names such as sites=["blocks.*.hook_resid_post"]')
    if isinstance(reduce, str) and reduce not in REDUCERS:
        raise SinkscopeError(f"reduce {reduce!r} is unknown; expected a function or one of {', '.join(REDUCERS)}")
    rows = read_inputs(target, tokens, attention_mask, bos=bos)
    wanted = resolve(target, sites)
    batches: dict[str, list[Tensor]] = {site.name: [] for site in wanted}
    step = batch_size or len(rows.ids)
    for start in range(0, len(rows.ids), step):
        ids = rows.ids[start : start + step]
        mask = None
        real = torch.ones(ids.shape, dtype=torch.bool)
        if rows.mask is not None:
            mask = rows.mask[start : start + step].to(target.device)
            real = mask.bool()
        chunks: dict[str, list[Tensor]] = {}
        _run(target, ids, mask, wanted, partial(_keep, chunks, reduce, real))
        for site in wanted:
            if site.name not in chunks:
                raise UnsupportedError(
                    f"site {site.name!r} was never reached on this {target.kind} model, because its module did not run "
                    "(a bridge replaces those that fuse several projections); leave it out of sites"
                )
            own, axis = chunks[site.name], 0
            if len(own) > 1:  # rows of attention come in chunks of queries; every other site has one chunk
                axis = _query_axis(reduce, site.name, target.n_heads)
            batches[site.name].append(torch.cat(own, axis))
    return {name: torch.cat(tensors) for name, tensors in batches.items()}


def _keep(chunks: dict[str, list[Tensor]], reduce: str | Reducer, real: RealTokens, name: str, tensor: Tensor) -> None:
    """Reduce and keep what passes a site."""
    if name.endswith("hook_pattern"):  # no dimension of it is that of the positions in `real`
        real = torch.ones(tensor.shape[:2], dtype=torch.bool)
    # A copy: Falcon adds into its MLP's output in place after the hook has seen it.
    chunks.setdefault(name, []).append(_reduced(reduce, tensor, real).detach().to("cpu", copy=True))


def _reduced(reduce: str | Reducer, tensor: Tensor, real: RealTokens) -> Tensor:
    if isinstance(reduce, str):
        return REDUCERS[reduce](tensor, real.to(tensor.device))
    return reduce(tensor)


def _query_axis(reduce: str | Reducer, name: str, heads: int) -> int:
    """The dimension of reduced rows of attention along which queries stand: it is tried with two numbers of them.

    Raises:
        SinkscopeError: They stand along none, so that chunks cannot be joined.
    """
    shapes = list[tuple[int, ...]]()
    for queries in (2, 3):
        rows = torch.full((1, heads, queries, 5), 0.2)
        shapes.append(tuple(_reduced(reduce, rows, torch.ones(rows.shape[:2], dtype=torch.bool)).shape))
    for axis, (two, three) in enumerate(zip(*shapes, strict=False)):
        if (two, three) == (2, 3):
            return axis
    raise SinkscopeError(
        f"reduce gives {name} of 2 and of 3 queries the shapes {shapes[0]} and {shapes[1]}, and rows come in chunks of "
        "queries: reduce over heads or keys, and over queries what is returned"
    )


def _run(
    target: Target,
    ids: Int[Tensor, "batch pos"],
    mask: Tensor | None,
    sites: list[Site],
    keep: Callable[[str, Tensor], None],
) -> None:
    """Run the model to the deepest site; what passes each is kept by its name."""
    hooks: list[Hook] = []
    of_rows: dict[int, str] = {}
    deepest = -1
    for site in sites:
        if site.layer is not None:
            deepest = site.layer
        if site.module is None:
            of_rows[deepest] = site.name
            continue

        def read(value: Any, site: Site = site) -> None:
            keep(site.name, site.shown(value, ids.shape))

        hooks.append((site.module, site.when, on_input(read) if site.when == "pre" else on_output(read)))

    def show(layer: int, _first: int, rows: Tensor) -> None:
        keep(of_rows[layer], rows)

    last_layer = deepest if 0 <= deepest < target.n_layers else None
    unembed = any(module is target.hf for module, _, _ in hooks)
    with attention_rows(target, show, layers=list(of_rows)) if of_rows else nullcontext(), target.hooks(*hooks):
        positions: dict[str, Any] = {}
        if mask is not None and "position_ids" in signature(target.base.forward).parameters:
            positions["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)  # else padding on the left is counted
        target.forward(ids, mask, unembed=unembed, last_layer=last_layer, **positions)
