"""Keys and values that grow by a token at a time, with spare slots, so that long ones are not copied for each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

COPY_LIMIT = 512
"""Length from which a copy per token costs more than spare slots."""
SPARE = 64
KeyTensor = Float[Tensor, "batch kv_head _ d_head"]
ValueTensor = Float[Tensor, "batch kv_head _ d_value"]


@dataclass(eq=False)
class SpareRoom:
    """Keys and values with empty slots at the end.

    Holders have views of the first slots. No slot is written twice, so several holders may share them or a shorter part
    of them, and none sees what another appends.

    Attributes:
        keys: Keys, with the empty slots.
        values: Values, with the empty slots.
        filled: Number of slots that are not empty.
    """

    keys: KeyTensor
    values: ValueTensor
    filled: int

    @property
    def allocated(self) -> int:
        """Number of slots."""
        return self.keys.shape[-2]

    def fits(self, keys: KeyTensor, more: int) -> bool:
        """Return whether `more` slots can be written after its keys, which nothing follows yet.

        They cannot under autograd, which needs the old values.
        """
        if torch.is_grad_enabled() or self.keys.is_inference() != torch.is_inference_mode_enabled():
            return False
        is_same = self.filled == keys.shape[-2] and keys.data_ptr() == self.keys.data_ptr()
        return is_same and self.filled + more <= self.allocated

    def append(self, keys: KeyTensor, values: ValueTensor) -> tuple[KeyTensor, ValueTensor]:
        """Return everything in it, with new keys and values at the end."""
        end = self.filled + keys.shape[-2]
        self.keys[..., self.filled : end, :] = keys
        self.values[..., self.filled : end, :] = values
        self.filled = end
        return self.keys[..., :end, :], self.values[..., :end, :]


@dataclass(eq=False)
class Growth:
    """How the keys and values of a layer grow; a new one for other keys and values.

    Attributes:
        room: Where they are, if there are spare slots after them.
        grew: Whether they are what was appended to last, so that nothing was taken out since.
    """

    room: SpareRoom | None = None
    grew: bool = False

    def appended(
        self, keys: KeyTensor, values: ValueTensor, new_keys: KeyTensor, new_values: ValueTensor, spare: int = 0
    ) -> tuple[KeyTensor, ValueTensor]:
        """Return keys and values with new ones at their ends: in place if they are long and only grow, else copied.

        Args:
            keys: Keys, which are not changed.
            values: Values, which are not changed.
            new_keys: Keys to append.
            new_values: Values to append.
            spare: Number of further slots, if more tokens are certain to follow. With 0, room is made only when single
                tokens arrive.
        """
        is_long, more = keys.shape[-2] >= COPY_LIMIT, new_keys.shape[-2]
        if self.room is not None and self.room.fits(keys, more):
            return self.room.append(new_keys, new_values)
        grows = spare > 0 or (more == 1 and self.grew)
        if is_long and grows and not torch.is_grad_enabled():
            further = (0, 0, 0, max(spare, SPARE))
            self.room = SpareRoom(pad(keys, further), pad(values, further), keys.shape[-2])
            self.grew = True
            return self.room.append(new_keys, new_values)
        self.room, self.grew = None, is_long
        return torch.cat([keys, new_keys], -2), torch.cat([values, new_values], -2)
