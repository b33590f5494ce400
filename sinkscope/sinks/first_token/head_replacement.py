"""Heads at the first token: replaced by what they give later on, and what that leaves of the sink neurons.

The first token sees nothing but itself, so every pass is one of single tokens, and every row of it has heads of its
own replaced: all heads of all layers for many first tokens are a few batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.console import Progress, silent
from sinkscope.errors import UnsupportedError
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.ablation import Neuron, columns, flat_number, view_layer
from sinkscope.trace.attention import attention_rows, queries_and_keys
from sinkscope.trace.run import trace

_HELD = 1 << 26  # numbers of one activation of the sink layer in memory at a time


@dataclass(frozen=True)
class Replacement:
    """A model whose heads' outputs can be replaced by their means over later positions of typical text.

    Attributes:
        target: the model.
        sink_layer: where the sink neurons are; heads up to there can be replaced.
        means: of `hook_z` of every head of layers 0 to the sink layer.
        flat: the sink neurons (numbered as in a `LayerView`); none: the whole MLP stands for them.
        cols: what each of them writes when its `hook_post` is 1.
        batch_size: rows of a pass; None: as many as a bounded memory allows.
        progress: told of the rows done.
    """

    target: Target
    sink_layer: int
    means: Float[Tensor, "layer head d_head"]
    flat: Int[Tensor, " neuron"]
    cols: Float[Tensor, "neuron d_model"]
    batch_size: int | None = None
    progress: Progress = silent

    @classmethod
    def of(
        cls,
        target: Target,
        sink_layer: int,
        neurons: Sequence[Neuron],
        ids: Int[Tensor, "row pos"],
        batch_size: int | None = None,
        progress: Progress = silent,
    ) -> Replacement:
        """With means over later positions of `ids`, position 0 the first token."""
        sites = [f"blocks.{i}.attn.hook_z" for i in range(sink_layer + 1)]
        got = trace(target, ids, sites, lambda z: z[:, 1:].float().mean(1))
        here = [n for n in neurons if n.layer == sink_layer]
        flat = torch.tensor([flat_number(target, n.layer, n.expert, n.neuron) for n in here], dtype=torch.long)
        with target.loaded(sink_layer):
            cols = columns(target, sink_layer, flat).cpu() if here else torch.zeros(0, target.d_model)
        means = torch.stack([got[site].mean(0) for site in sites])
        return cls(target, sink_layer, means, flat, cols, batch_size, progress)

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and heads that can be replaced."""
        return self.means.shape[0], self.means.shape[1]

    def at(self, layer: int, chosen: Bool[Tensor, "*n head"]) -> Bool[Tensor, "*n layer head"]:
        """Edits of one layer."""
        out = torch.zeros(*chosen.shape[:-1], *self.shape, dtype=torch.bool)
        out[..., layer, :] = chosen
        return out

    def written(
        self,
        ids: Int[Tensor, "row pos"],
        replaced: Bool[Tensor, "row layer head"],
        later: bool = False,
    ) -> Float[Tensor, "row seen d_model"]:
        """What the sink neurons write together, with heads replaced.

        Args:
            ids: sequences.
            replaced: the heads that give their mean instead of their output, per row.
            later: replace and look at all positions but the first; else at the first only.
        """
        target, found = self.target, []
        experts = max(1, target.n_experts(self.sink_layer))
        fitting = _HELD // (target.d_mlp * experts) if self.batch_size is None else self.batch_size
        step = max(1, fitting // ids.shape[1])
        where = torch.zeros(ids.shape[1], dtype=torch.bool)
        where[1:] = later
        where[:1] = not later
        for start in range(0, len(ids), step):
            rows, edits = ids[start : start + step], replaced[start : start + step]
            with target.hooks(*self.hooks(edits, where)):
                view = view_layer(target, self.sink_layer, rows, where.expand(len(rows), -1))
            flat = self.flat.to(view.post.device)
            out = view.post[:, flat].cpu() @ self.cols if len(flat) else view.mlp.cpu()
            found.append(out.unflatten(0, (len(rows), -1)))
            self.progress("heads", min(start + step, len(ids)), len(ids))
        return torch.cat(found)

    def hooks(self, edits: Bool[Tensor, "row layer head"], where: Bool[Tensor, " pos"]) -> list[tuple[Any, str, Any]]:
        """Hooks that replace the heads of `edits` at the positions of `where`, in a pass of as many rows."""

        def hook(layer: int) -> Any:
            def replace(_module: object, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[object, object]:
                z = args[0]
                heads = z.reshape(len(edits), len(where), self.shape[1], -1)
                chosen = edits[:, layer, None, :, None] & where[None, :, None, None]
                mean = self.means[layer].to(z.device, z.dtype)
                return (torch.where(chosen.to(z.device), mean, heads).reshape(z.shape), *args[1:]), kwargs

            return replace

        used = edits.any(2).any(0).nonzero().flatten().tolist()
        return [(self.target.sub(i, self.target.adapter.o), "pre", hook(i)) for i in used]


@dataclass(frozen=True)
class Geometry:
    """Queries and keys of the heads of a layer on typical text, later positions; NaN where there is no such pair.

    Attributes:
        own: cosine of query and key of one position; rotary does not change it.
        same: of a query and an earlier key of the same token, before and after rotary.
        other: of a query and an earlier key of another token, before and after rotary.
        attention: attention of a position to itself, over what uniform attention would give it; 1 is indifferent.
    """

    own: Float[Tensor, "head token"]
    same: tuple[Float[Tensor, " head"], Float[Tensor, " head"]]
    other: tuple[Float[Tensor, " head"], Float[Tensor, " head"]]
    attention: Float[Tensor, "head token"]


@torch.no_grad()
def geometry(
    target: Target, ids: Int[Tensor, "row pos"], layers: list[int]
) -> tuple[dict[int, Geometry], Int[Tensor, " token"]]:
    """Per layer, and the tokens (later positions of `ids`, row by row) that `own` and `attention` speak of.

    Cosines are NaN where queries and keys cannot be had (see `queries_and_keys`).
    """
    later = ids[:, 1:]
    below = torch.ones(later.shape[1], later.shape[1], dtype=torch.bool).tril(-1)
    equal = (later[:, :, None] == later[:, None, :]) & below
    unequal = (later[:, :, None] != later[:, None, :]) & below
    cosines: dict[tuple[int, bool], tuple[Tensor, Tensor, Tensor]] = {}

    def see(layer: int, rotated: bool, query: Tensor, key: Tensor) -> None:
        unit_q = torch.nn.functional.normalize(query[:, :, 1:].float(), dim=-1)
        unit_k = torch.nn.functional.normalize(key[:, :, 1:].float(), dim=-1)
        unit_k = unit_k.repeat_interleave(query.shape[1] // key.shape[1], 1)
        cos = (unit_q @ unit_k.transpose(-1, -2)).transpose(0, 1).cpu()  # head row query key
        own = cos.diagonal(dim1=-2, dim2=-1).flatten(1)
        cosines[layer, rotated] = (own, cos[:, equal].mean(1), cos[:, unequal].mean(1))

    selfs: dict[int, list[Tensor]] = {i: [] for i in layers}

    def look(layer: int, first: int, probs: Tensor) -> None:
        places = torch.arange(probs.shape[2], device=probs.device)
        own = probs[:, :, places, first + places] * (first + 1 + places)
        selfs[layer].append(own.cpu())

    stop = (target.layers[max(layers)], "post", lambda *_: target.stop())
    try:
        with queries_and_keys(target, see, layers), target.hooks(stop):
            target.forward(ids)
    except UnsupportedError:
        nothing = torch.full((target.n_heads,), torch.nan)
        missing = (nothing[:, None].expand(-1, later.numel()), nothing, nothing)
        cosines = {(i, rotated): missing for i in layers for rotated in (False, True)}
    with attention_rows(target, look, layers=layers), target.hooks(stop):
        target.forward(ids)
    found = {}
    for i in layers:
        (own, same, other), (_, same_after, other_after) = cosines[i, False], cosines[i, True]
        ratio = torch.cat(selfs[i], 2)[:, :, 1:].transpose(0, 1).flatten(1)
        found[i] = Geometry(own, (same, same_after), (other, other_after), ratio)
    return found, later.flatten()
