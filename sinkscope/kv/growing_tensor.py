"""Keys and values that grow by a token at a time, with spare slots, so that long ones are not copied for each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

LONG = 512
"""Length from which a copy per token costs more than spare slots."""
SPARE = 64


@dataclass(eq=False)
class Buffer:
    """Keys or values with empty slots at the end.

    Holders have views of its first slots. No slot is written twice, so several holders may share the buffer or a
    shorter part of it, and none sees what another appends.

    Attributes:
        slots: The tensor.
        filled: Number of slots that are not empty.
    """

    slots: Float[Tensor, "batch kv_head slot d"]
    filled: int

    @property
    def allocated(self) -> int:
        """Number of slots."""
        return self.slots.shape[-2]

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is everything in it."""
        return self.filled == tensor.shape[-2] and tensor.data_ptr() == self.slots.data_ptr()

    def takes(self, more: int) -> bool:
        """Return whether `more` slots can be written in place; not under autograd, which needs the old values."""
        if torch.is_grad_enabled() or self.slots.is_inference() != torch.is_inference_mode_enabled():
            return False
        return self.filled + more <= self.allocated

    def append(self, new: Tensor) -> Tensor:
        """Return everything in it, with `new` at the end."""
        more = new.shape[-2]
        self.slots.narrow(-2, self.filled, more).copy_(new)
        self.filled += more
        return self.slots.narrow(-2, 0, self.filled)


Grown = dict[str, Buffer | Tensor]
"""Of the keys and values of a layer, by name: their buffer, or the tensor as it was when it was last appended to."""


def appended(
    grown: Grown,
    keys: Float[Tensor, "batch kv_head slot d_head"],
    values: Float[Tensor, "batch kv_head slot d_value"],
    new_keys: Float[Tensor, "batch kv_head new d_head"],
    new_values: Float[Tensor, "batch kv_head new d_value"],
    spare: int = 0,
) -> tuple[Tensor, Tensor]:
    """Keys and values with new ones at their ends: in buffers if they are long and only grow, and else by copying.

    Args:
        grown: What is known of those of the layer.
        keys: Keys, which are not changed.
        values: Values, which are not changed.
        new_keys: Keys to append.
        new_values: Values to append.
        spare: Number of further slots, if more tokens are certain to follow. With 0, a buffer is made only when
            single tokens arrive.
    """
    if keys.shape[-2] < LONG:
        grown.clear()
        return torch.cat([keys, new_keys], -2), torch.cat([values, new_values], -2)
    return _appended(grown, "keys", keys, new_keys, spare), _appended(grown, "values", values, new_values, spare)


def _appended(grown: Grown, name: str, tensor: Tensor, new: Tensor, spare: int) -> Tensor:
    length, more = tensor.shape[-2], new.shape[-2]
    last = grown.get(name)
    in_buffer = isinstance(last, Buffer) and last.holds(tensor)
    if isinstance(last, Buffer) and in_buffer and last.takes(more):
        return last.append(new)
    # The same as the last time: nothing was taken out since.
    grows = spare > 0 or (more == 1 and (in_buffer or last is tensor))
    if not grows or torch.is_grad_enabled():
        longer = torch.cat([tensor, new], -2)
        grown[name] = longer
        return longer
    shape = list(tensor.shape)
    shape[-2] += max(spare, SPARE)
    grown[name] = buffer = Buffer(tensor.new_empty(shape), length)
    buffer.slots.narrow(-2, 0, length).copy_(tensor)
    return buffer.append(new)
