"""Room for tokens to come, so that a long cache is not copied whole for every one of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FROM = 512
"""Slots from which a copy per token costs more than the room."""
SPARE = 64


@dataclass(eq=False)
class Room:
    """Keys and values `[batch kv_head slot d]` of one layer, with empty slots at the end.

    What is held are views of the first slots. No slot is written twice: copies of a layer may hold the same room, or a
    shorter part of it after a crop, and what one of them appends the others never see.
    """

    keys: Tensor
    values: Tensor
    filled: int

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> Room:
        """A copy with room behind it."""
        slots = keys.shape[-2]
        made: list[Tensor] = []
        for held in (keys, values):
            room = held.new_empty(*held.shape[:-2], slots + SPARE, held.shape[-1])
            room[..., :slots, :] = held
            made.append(room)
        return cls(made[0], made[1], slots)

    @property
    def slots(self) -> int:
        """All there are, empty ones too."""
        return int(self.keys.shape[-2])

    def fits(self, keys: Tensor, values: Tensor, new: int) -> bool:
        """These are all that is in it, and there are slots left for so many more."""
        return (
            self.filled == keys.shape[-2] == values.shape[-2]
            and self.keys.is_inference() == torch.is_inference_mode_enabled()
            and self.filled + new <= self.slots
            and keys.data_ptr() == self.keys.data_ptr()
            and values.data_ptr() == self.values.data_ptr()
        )

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Views of everything, with these at the end."""
        start, self.filled = self.filled, self.filled + int(keys.shape[-2])
        for room, new in ((self.keys, keys), (self.values, values)):
            room[..., start : self.filled, :] = new
        return self.keys[..., : self.filled, :], self.values[..., : self.filled, :]
