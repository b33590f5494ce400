"""Layers whose slots are scored and chosen at once, as the rows of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from sinkscope.kv.cache import CacheLayer, flat_slots, moved_numbers


def joined_layer(layers: Sequence[CacheLayer]) -> CacheLayer:
    """The positions and numbers of layers without holes, as those of the rows of one; its keys are the first's."""
    first = layers[0]
    joined = CacheLayer()
    joined.keys = first.keys
    known = [kv.known_pos() for kv in layers]
    if any(pos.shape != known[0].shape for pos in known):
        known = [kv.pos for kv in layers]
    new = first.keys.shape[-2] - known[0].shape[-1]
    tail = first.new_pos(new).repeat(len(layers), 1, 1)  # the same tokens in every layer
    joined.keep_slots(None, torch.cat([torch.cat(known), tail], -1), ragged=False)
    for name in first.numbers:
        joined.numbers[name] = torch.cat([kv.extra(name) for kv in layers])
    return joined


def evict_joined(
    joined: CacheLayer, layers: Sequence[CacheLayer], keep: Bool[Tensor, "row kv_head slot"], count: int
) -> None:
    """Free every slot that is not kept in some layers; each head keeps `count`.

    Args:
        joined: The layers as one.
        layers: The layers.
        keep: The slots that stay.
        count: Number of slots that every row and head keeps.
    """
    index = flat_slots(keep, count, ragged=False)
    pos = joined.pos.take(index).chunk(len(layers))
    numbers = moved_numbers(joined, lambda numbers: numbers.take(index))
    slots = (index % (keep.numel() // len(layers))).chunk(len(layers))
    for number, kv in enumerate(layers):
        kv.numbers = {}
        kv.keep_slots(slots[number], pos[number], ragged=False)
        for name, of_all in numbers.items():
            kv.numbers[name] = of_all.chunk(len(layers))[number]


def alike(layers: Sequence[CacheLayer]) -> bool:
    """Whether layers have the same shape, no holes and one device."""
    for kv in layers:
        if not kv.gapless or kv.keys.shape != layers[0].keys.shape or kv.keys.device != layers[0].keys.device:
            return False
    return len(layers) > 1
