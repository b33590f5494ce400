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
        """Whether a tensor is everything in it."""
        return self.filled == tensor.shape[-2] and tensor.data_ptr() == self.slots.data_ptr()

    def takes(self, more: int) -> bool:
        """Whether so many more may be written: a gradient needs what it was computed with as it was."""
        if torch.is_grad_enabled() or self.slots.is_inference() != torch.is_inference_mode_enabled():
            return False
        return self.filled + more <= self.allocated

    def append(self, new: Tensor) -> Tensor:
        """Everything in it, with `new` at the end."""
        more = new.shape[-2]
        self.slots.narrow(-2, self.filled, more).copy_(new)
        self.filled += more
        return self.slots.narrow(-2, 0, self.filled)


Grown = dict[str, Buffer | Tensor]
"""Of each tensor of a holder, by name: its buffer, or the tensor as it was when it was last appended to."""


def appended(
    grown: Grown,
    name: str,
    tensor: Float[Tensor, "batch kv_head slot d"],
    new: Float[Tensor, "batch kv_head new d"],
    spare: int = 0,
) -> Float[Tensor, "batch kv_head later d"]:
    """`tensor` with `new` at its end: in a buffer if it is long and only grows, and by copying otherwise.

    Args:
        grown: What is known of the tensors of the holder.
        name: Name of the tensor.
        tensor: Keys or values, which are not changed.
        new: Those to append.
        spare: Number of further slots, if more tokens are certain to follow. With 0, a buffer is made only when
            single tokens arrive.
    """
    length, more = tensor.shape[-2], new.shape[-2]
    if length < LONG:
        grown.pop(name, None)
        return torch.cat([tensor, new], -2)
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
