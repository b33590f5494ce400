"""Join several conversations as the rows of one cache and split them again; only left padding is added or removed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import StoppingCriteria

from sinkscope.interventions import positions
from sinkscope.interventions.positions import Memory
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.loopserve.saved import Held

State = tuple[dict[str, int], dict[str, Tensor]]
"""What `CacheLayer.state` gives."""


def joined(held: Sequence[Held], windowed: bool, spare: int = 0) -> Held:
    """Join the caches of several single-row conversations into one, padded on the left to the longest.

    Args:
        held: What each conversation holds; some may be empty.
        windowed: Whether layers have a sliding window, which stock masks measure in columns, including padding.
        spare: Number of padding columns in front of all rows.
    """
    known = [each for each in held if each.sequence is not None]
    if len(held) == 1 or not known:
        return held[0]
    # What is forgotten to the first token is an empty cache of the right shape.
    blank = tuple(layer.copy() for layer in known[0].layers)
    for layer in blank:
        layer.crop(-layer.seen)
    rows = [each.layers or blank for each in held]
    sequences = [each.sequence or _none(known[0].sequence) for each in held]
    width = max(each.columns.shape[1] for each in sequences) + spare
    whole = positions.Sequence(
        columns=torch.cat([_left(each.columns, width, -1) for each in sequences]),
        length=torch.cat([each.length for each in sequences]),
        bos=torch.cat([each.bos for each in sequences]),
        partial=any(each.partial for each in sequences),
        settled=all(each.settled for each in sequences),
        memory=_memory(sequences),
    )
    return Held(tuple(_layer(layers, windowed, spare) for layers in zip(*rows, strict=True)), whole)


def _memory(sequences: Sequence[positions.Sequence]) -> dict[Any, Memory]:
    """What edits remember of each row, by the edit's key."""
    keys = dict.fromkeys(key for each in sequences for key in each.memory)
    return {key: Memory(_stacked([each.memory.get(key, {}) for each in sequences])) for key in keys}


def _none(like: positions.Sequence | None) -> positions.Sequence:
    assert like is not None
    return positions.Sequence.of(like.real[:, :0], torch.ones_like(like.bos))


def _left(held: Tensor, width: int, fill: int = 0, dim: int = -1) -> Tensor:
    return pad(held, (*(0, 0) * (-1 - dim), width - held.shape[dim], 0), value=fill)


def _stacked(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Values of all rows, by name; NaN or False if a row has none yet."""
    like = {name: tensor for row in rows for name, tensor in row.items()}
    blank = {name: torch.full_like(t, math.nan if t.is_floating_point() else 0) for name, t in like.items()}
    return {name: torch.cat([row.get(name, blank[name]) for row in rows]) for name in like}


def _layer(rows: Sequence[CacheLayer], windowed: bool, spare: int) -> CacheLayer:
    states = [layer.state() for layer in rows]
    seen, slots = (max(lengths) + spare for lengths in zip(*((layer.seen, layer.slots) for layer in rows), strict=True))
    flags = {name: max(int(known[name]) for known, _ in states) for name in states[0][0]} | {"seen": seen}
    if windowed or flags["edited"]:  # masks are then made from positions
        flags |= {"edited": 1, "ragged": 1}
    side = {name: t for _, held in states for name, t in held.items() if name not in ("keys", "values", "columns")}
    tensors = {"columns": torch.cat([_left(held["columns"], seen, -1) for _, held in states])}
    for name in ("keys", "values"):
        tensors[name] = torch.cat([_left(held[name], slots, dim=-2) for _, held in states])
    for name in side:
        none = side[name][..., :0]
        tensors[name] = torch.cat([_left(held.get(name, none), slots) for _, held in states])
    if flags["edited"]:
        tensors["pos"] = torch.cat([_left(layer.pos, slots, -1) for layer in rows])
    made = CacheLayer()
    made.load_state(flags, tensors)
    return made


def row_of(layers: Sequence[CacheLayer], sequence: positions.Sequence, row: int) -> tuple[list[State], Held]:
    """A copy of one row of a cache, without padding: the states of its layers, and the rest of what is held."""
    states: list[State] = []
    for whole in layers:
        layer = whole.copy()
        layer.settle()
        flags, tensors = layer.state()
        pos, columns = layer.pos[row : row + 1], tensors["columns"][row : row + 1]
        there, real = (pos[0] >= 0).any(0), columns[0] >= 0
        mine = {name: tensor[row : row + 1] for name, tensor in tensors.items()} | {"pos": pos}
        mine = {name: tensor[:, :, there] for name, tensor in mine.items() if name != "columns"}
        states.append(({**flags, "seen": int(real.sum())}, {**mine, "columns": columns[:, real]}))
    keep = slice(row, row + 1)
    memory = {key: Memory({n: t[keep] for n, t in kept.items()}) for key, kept in sequence.memory.items()}
    real = sequence.real[keep]
    known = positions.Sequence.of(real[real][None], sequence.bos[keep], sequence.partial, sequence.settled)
    return states, Held((), replace(known, memory=memory))


def alone(states: Sequence[State], hidden: bool) -> tuple[CacheLayer, ...]:
    """Layers of one row; without `hidden`, everything in them is readable."""
    layers: list[CacheLayer] = []
    for flags, tensors in states:
        tensors = {name: tensor for name, tensor in tensors.items() if hidden or name != "hidden"}
        pos, columns = tensors["pos"], tensors["columns"]
        whole = pos.shape[-1] == columns.shape[-1] and bool((pos == columns[:, None].to(pos.device)).all())
        if whole:
            del tensors["pos"]
        edited = not whole or "hidden" in tensors
        layer = CacheLayer()
        own = {"edited": edited, "ragged": bool((pos < 0).any()), "rebased": flags["rebased"] and not whole}
        layer.load_state({**flags, **own}, tensors)
        layers.append(layer)
    return tuple(layers)


class Ends(StoppingCriteria):
    """Takes each row out of the cache when its answer ends, before it continues as padding; never stops generation.

    Args:
        ends: Token ids that end an answer.
        take: Called with the indices of rows whose answers end at this token.
    """

    def __init__(self, ends: Sequence[int], take: Any) -> None:
        self._ends, self._take = ends, take
        self._over: set[int] = set()

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """False for each row."""
        over = {row for row, token in enumerate(input_ids[:, -1].tolist()) if token in self._ends} - self._over
        self._over |= over
        for row in sorted(over):
            self._take(row)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
