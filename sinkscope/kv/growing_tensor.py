"""Tensors that grow by one token at a time, with spare places, so that a long one is not copied for every token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor

LONG = 512
"""Length from which a copy per token costs more than spare places."""
SPARE = 64


@dataclass(eq=False)
class Buffer:
    """A tensor with empty places at the end of one dimension.

    Holders have views of its first places. No place is written twice, so several holders may share the buffer or a
    shorter part of it, and none sees what another appends.

    Attributes:
        places: The tensor.
        dim: The dimension.
        filled: Number of places that are not empty.
    """

    places: Tensor
    dim: int
    filled: int

    @property
    def allocated(self) -> int:
        """Number of places."""
        return self.places.shape[self.dim]

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is everything in it."""
        return self.filled == tensor.shape[self.dim] and tensor.data_ptr() == self.places.data_ptr()

    def takes(self, more: int) -> bool:
        """Whether so many more may be written: a gradient needs what it was computed with as it was."""
        if torch.is_grad_enabled() or self.places.is_inference() != torch.is_inference_mode_enabled():
            return False
        return self.filled + more <= self.allocated

    def append(self, new: Tensor) -> Tensor:
        """Everything in it, with `new` at the end."""
        more = new.shape[self.dim]
        self.places.narrow(self.dim, self.filled, more).copy_(new)
        self.filled += more
        return self.places.narrow(self.dim, 0, self.filled)


Grown = dict[str, Buffer | Tensor]
"""Of each tensor of a holder, by name: its buffer, or the tensor as it was when it was last appended to."""


def appended(
    grown: Grown, name: str, tensor: Shaped[Tensor, ...], new: Shaped[Tensor, ...], dim: int, spare: int = 0
) -> Shaped[Tensor, ...]:
    """`tensor` with `new` at its end: in a buffer if it is long and only grows, and by copying otherwise.

    Args:
        grown: What is known of the tensors of the holder.
        name: Name of the tensor.
        tensor: A tensor, which is not changed.
        new: Tensor to append.
        dim: The dimension that grows.
        spare: Number of further places, if more tokens are certain to follow. With 0, a buffer is made only when
            single tokens arrive.
    """
    length, more = tensor.shape[dim], new.shape[dim]
    if length < LONG:
        grown.pop(name, None)
        return torch.cat([tensor, new], dim)
    last = grown.get(name)
    in_buffer = isinstance(last, Buffer) and last.holds(tensor)
    if isinstance(last, Buffer) and in_buffer and last.takes(more):
        return last.append(new)
    # The same as the last time: nothing was taken out since.
    grows = spare > 0 or (more == 1 and (in_buffer or last is tensor))
    if not grows or torch.is_grad_enabled():
        longer = torch.cat([tensor, new], dim)
        grown[name] = longer
        return longer
    shape = list(tensor.shape)
    shape[dim] += max(spare, SPARE)
    grown[name] = buffer = Buffer(tensor.new_empty(shape), dim, length)
    buffer.places.narrow(dim, 0, length).copy_(tensor)
    return buffer.append(new)
