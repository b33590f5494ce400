"""Measurements around a known sink layer: repetitions, sink rate, attention to the first token, spike dimensions."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.models.target import Target, first_tensor
from sinkscope.sinks.first_token.layer import LayerView, Watch
from sinkscope.sinks.first_token.walk import Progress
from sinkscope.trace.attention import attention_rows


@torch.no_grad()
def view_layer(target: Target, layer: int, ids: Int[Tensor, "row pos"], where: Tensor) -> LayerView:
    """The layer at the positions marked in `where` (`[row pos]`, bool), from a pass that ends there."""
    watch = Watch(target, layer, where)
    with target.hooks(*watch.hooks(), (target.layers[layer], "post", lambda *_: target.stop())):
        target.forward(ids)
    return watch.view()


@dataclass(frozen=True)
class Repetition:
    """Repeated tokens at the sink layer.

    Attributes:
        repeats: per token the first n whose norm reaches half of the first token's; None: never.
        view: the layer at the last repetition of each token that got there, else at the last one tried.
    """

    repeats: list[int | None]
    view: LayerView
    reached: list[bool]


@torch.no_grad()
def repeat_until_half(
    target: Target,
    layer: int,
    tokens: list[int],
    prefixes: list[int],
    max_repeats: int,
    progress: Progress | None = None,
) -> Repetition:
    """A prefix and then n repetitions of each token in one causal pass; n doubles until all got there.

    Args:
        target: the model.
        layer: the sink layer, whose residual stream is read.
        tokens: the ids to repeat, one row each.
        prefixes: the first token of each row (BOS, or another token that stands in for it).
        max_repeats: largest n.
        progress: told of each doubling.
    """
    length = min(128, max_repeats)
    found: dict[int, int | None] = dict.fromkeys(range(len(tokens)))
    views: dict[int, LayerView] = {}
    while True:
        left = [i for i, n in found.items() if n is None]
        for i in left:  # a row at a time: long rows side by side would only multiply the memory
            ids = torch.full((1, length + 1), tokens[i])
            ids[0, 0] = prefixes[i]
            where = torch.zeros_like(ids, dtype=torch.bool)
            where[0, -1] = True
            norms: list[Tensor] = []

            def keep(_m: object, _a: object, _k: object, out: Any, norms: list[Tensor] = norms) -> None:
                norms.append(torch.linalg.vector_norm(first_tensor(out)[0], dim=-1, dtype=torch.float32).cpu())

            with target.hooks((target.layers[layer], "post", keep)):
                views[i] = view_layer(target, layer, ids, where)
            above = (norms[0][1:] >= norms[0][0] / 2).nonzero().flatten()
            found[i] = int(above[0]) + 1 if len(above) else None
        if progress is not None:
            progress("repetitions", length, max_repeats)
        if length >= max_repeats or all(n is not None for n in found.values()):
            break
        length = min(2 * length, max_repeats)
    rows = [views[i] for i in range(len(tokens))]
    joined = LayerView(layer, *(torch.cat([getattr(v, f) for v in rows]) for f in ("resid", "mlp", "post")))
    return Repetition(list(found.values()), joined, [n is not None for n in found.values()])


@torch.no_grad()
def sink_rate(
    target: Target, ids: Int[Tensor, "row pos"], eps: float, progress: Progress | None = None, batch: int = 8
) -> float:
    """Share of (layer, head) whose mean attention to position 0 exceeds `eps`, averaged over texts.

    Gu et al. 2024 (arXiv 2410.10781): alpha = mean over all queries i >= 0 of A[i, 0].
    """
    above = 0.0
    for start in range(0, len(ids), batch):
        rows = ids[start : start + batch]
        alpha = torch.zeros(target.n_layers, len(rows), target.n_heads)

        def add(layer: int, _first: int, probs: Tensor, alpha: Tensor = alpha) -> None:
            alpha[layer] += probs[..., 0].sum(-1).cpu()

        with attention_rows(target, add):
            target.forward(rows)
        above += ((alpha / rows.shape[1]) > eps).float().mean((0, 2)).sum().item()
        if progress is not None:
            progress("sink rate", min(start + batch, len(ids)), len(ids))
    return above / len(ids)


@torch.no_grad()
def first_token_attention(
    target: Target, ids: Int[Tensor, "row pos"], layers: list[int], intervention: Any = None
) -> float:
    """Mean attention of all later positions to the first token, over heads of `layers`."""
    total: list[Tensor] = []
    with (
        intervention.on(target) if intervention is not None else nullcontext(),
        attention_rows(
            target,
            lambda _l, first, probs: total.append(probs[:, :, int(first == 0) :, 0].mean()),
            layers=layers,
            rows_per_chunk=ids.shape[1],
        ),
        target.hooks((target.layers[max(layers)], "post", lambda *_: target.stop())),
    ):
        target.forward(ids)
    return float(torch.stack(total).mean())


def spike_dims(first: Tensor, typical: Tensor) -> list[int]:
    """Massive activations of the first token: |a| > 100 and > 1000 x the median |hidden state| (Sun et al. 2024).

    Args:
        first: residual stream of the first token, `[d_model]`.
        typical: residual stream of all positions of the layer, `[n d_model]`.
    """
    size = first.abs()
    hit = (size > 100) & (size > 1000 * typical.abs().median())
    return sorted(hit.nonzero().flatten().tolist(), key=lambda d: -size[d].item())
