"""The anatomy of a norm spike (Sun, Canziani, LeCun, Zhu 2026): its maker, its trigger, and what norms make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.models.target import Target, plain_weight
from sinkscope.sinks.first_token.effects import Edit, effects, writers
from sinkscope.sinks.first_token.sets import CausalSet

_HELD = 0.9  # share of the squared norm that counts as all of it
_TOKENS = 32  # typical tokens that the first one is held against


@dataclass(frozen=True)
class Trigger:
    """A neuron's gate times up as a quadratic form of the input, and how well tokens fit its best direction.

    Where the activation is close to linear, a neuron computes about `(g x)(u x)` for an input x. Over inputs of one
    length its largest value is `(|g| |u| + g u) / 2` times the squared length. `first` and `typical` are the share of
    it that the first token and the median typical token reach.
    """

    layer: int
    neuron: int
    first: float
    typical: float


@dataclass(frozen=True)
class Normalised:
    """A token's residual stream behind the norm in front of the attention, means over the layers of the plateau.

    Attributes:
        dims: residual dimensions that hold 90 % of the squared norm at the first token.
        typical_dims: the same at typical tokens.
        cosine: between neighbouring layers, at the first token; near 1 it is constant.
        typical_cosine: the same at typical tokens.
    """

    dims: float
    typical_dims: float
    cosine: float
    typical_cosine: float


def maker(target: Target, ids: Int[Tensor, "text pos"], layer: int, without: Sequence[int]) -> str | None:
    """The component without which the first token's spike after `layer` is gone; None: no single one."""
    candidates = writers(target, layer + 1)
    edits = [Edit(swap=(c,)) for c in candidates]
    seen = effects(target, ids, edits, source=ids.shape[1] // 2, upto=layer, without=without)
    drops = (1 - seen.norms[..., layer] / seen.intact_norms[:, layer]).median(1).values
    best = int(drops.argmax())
    return str(candidates[best]) if float(drops[best]) >= 0.5 else None


@torch.no_grad()
def triggers(target: Target, ids: Int[Tensor, "row pos"], found: CausalSet | None) -> tuple[Trigger, ...]:
    """How well the first token's input fits each neuron of a set; empty for MLPs without a gate and for mixtures."""
    rows: list[Trigger] = []
    gate, up = target.adapter.gate, target.adapter.up
    if found is None or gate is None or up is None:
        return ()
    for member in found.sites:
        if target.is_mixture(member.layer):
            continue
        inputs = _input_of(target, ids, member.layer, up)
        with target.loaded(member.layer):
            weights = [plain_weight(target.sub(member.layer, path)) for path in (gate, up)]
            if inputs is None or weights[0] is None or weights[1] is None:
                continue
            g, u = (w[member.neuron].float() for w in weights if w is not None)
        best = (g.norm() * u.norm() + g @ u) / 2
        reached = (inputs @ g) * (inputs @ u) / (best * inputs.square().sum(-1))
        typical = float(reached[:, 1:].median())
        rows.append(Trigger(member.layer, member.neuron, float(reached[:, 0].median()), typical))
    return tuple(rows)


@torch.no_grad()
def normalised(target: Target, ids: Int[Tensor, "row pos"], standing: Sequence[int], depth: int) -> Normalised | None:
    """What the norms of the layers behind a plateau make of the first token; None where no layer shows it.

    `depth` is the number of layers that may be run.
    """
    path = target.adapter.k or target.adapter.fused_qkv
    layers = [i + 1 for i in standing if i + 1 < depth]
    seen: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            held = args[0] if args else next(iter(kwargs.values()))
            seen[layer] = held.detach().reshape(*some.shape, -1).float()

        return hook

    some = ids[:1, : _TOKENS + 1]
    if not layers or path is None:
        return None
    end = (target.layers[layers[-1]], "post", lambda *_: target.stop())
    with target.hooks(*((target.sub(i, path), "pre", keep(i)) for i in layers), end):
        target.forward(some)
    if not seen:
        return None
    stacked = torch.stack([seen[i][0] for i in sorted(seen)])  # layer pos d_model
    dims = _holding(stacked).float().mean(0)
    cosine = (
        torch.cosine_similarity(stacked[1:], stacked[:-1], dim=-1).mean(0)
        if len(stacked) > 1
        else torch.ones(stacked.shape[1])
    )
    return Normalised(float(dims[0]), float(dims[1:].median()), float(cosine[0]), float(cosine[1:].median()))


def _holding(vectors: Float[Tensor, "... d_model"]) -> Int[Tensor, ...]:
    """How many of the largest dimensions hold 90 % of the squared norm."""
    squares = vectors.square().sort(-1, descending=True).values
    return (squares.cumsum(-1) < _HELD * squares.sum(-1, keepdim=True)).sum(-1) + 1


def _input_of(target: Target, ids: Tensor, layer: int, path: str) -> Tensor | None:
    held: list[Tensor] = []

    def keep(_module: object, args: tuple[Any, ...], _kwargs: object) -> None:
        held.append(args[0].detach().reshape(*ids.shape, -1).float())
        target.stop()

    with target.hooks((target.sub(layer, path), "pre", keep)):
        target.forward(ids)
    return held[0] if held else None
