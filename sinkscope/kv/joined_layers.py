"""Layers whose slots are scored and chosen at once, as the rows of one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkscope.kv.slots import Slots, flat_slots


class JoinedLayers(Slots):
    """Layers of one shape and without holes, as the rows of one, whose keys and values stay with them.

    Args:
        layers: The layers (`alike`).
    """

    def __init__(self, layers: Sequence[Slots]) -> None:
        super().__init__(layers[0].number)
        self.layers = layers
        self.keys = layers[0].keys
        self.values = layers[0].values
        self.gapless = True
        self.columns = layers[0].columns
        for name in layers[0].numbers:
            self.numbers[name] = torch.cat([kv.numbers[name] for kv in layers])

    @cached_property
    def pos(self) -> Int[Tensor, "row kv_head slot"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """True position of each slot."""
        if self.layers[0].known is None:
            return torch.cat([kv.pos for kv in self.layers])
        known = torch.cat([kv.known for kv in self.layers if kv.known is not None])
        new = self.slots - known.shape[-1]
        latest = self.new_pos(new).expand(len(self.layers), -1, -1, -1)  # the same in every layer
        return torch.cat([known, latest.reshape(*known.shape[:2], new)], -1)

    def evict(self, keep: Bool[Tensor, "row kv_head slot"], exact: int | None = None) -> None:
        """Free every slot that is not kept in all layers; each head keeps `exact`."""
        assert exact is not None
        index = flat_slots(keep, exact, ragged=False)
        self.numbers = self.moved_numbers(lambda numbers: numbers.take(index))
        for name, of_all in self.numbers.items():
            for kv, numbers in zip(self.layers, of_all.chunk(len(self.layers)), strict=True):
                kv.numbers[name] = numbers
        pos = self.pos.take(index).chunk(len(self.layers))
        of_layer = (index % self.keys.shape[:3].numel()).chunk(len(self.layers))
        for kv, its_index, its_pos in zip(self.layers, of_layer, pos, strict=True):  # what goes is freed at once
            keys = torch.embedding(kv.keys.flatten(0, 2), its_index)
            values = torch.embedding(kv.values.flatten(0, 2), its_index)
            kv.hold(keys, values, its_pos)


def alike(layers: Sequence[Slots]) -> bool:
    """Return whether layers may be joined: they have one shape, device and dtype, no holes, and the same slots."""
    forms: list[Any] = []
    for kv in layers:
        shapes = {name: numbers.shape for name, numbers in kv.numbers.items()}
        if kv.known is not None:
            shapes["known"] = kv.known.shape
        forms.append((kv.gapless, kv.keys.shape, kv.values.shape, kv.keys.device, kv.keys.dtype, shapes))
    return len(layers) > 1 and layers[0].gapless and forms.count(forms[0]) == len(layers)
