"""Tensors that grow by one token at a time, with spare places, so that a long one is not copied for every token."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor

LONG = 512
"""Length from which a copy per token costs more than spare places."""
SPARE = 64


@dataclass(eq=False)
class _Buffer:
    """A tensor with empty places at the end of one dimension.

    Holders have views of its first places. No place is written twice, so several holders may share the buffer or a
    shorter part of it, and none sees what another appends.
    """

    places: Tensor
    filled: int


class GrowingTensor:
    """How one holder appends to a tensor: in a buffer if it is long and only grows, and by copying otherwise.

    Args:
        dim: The dimension that grows.
        latest: The tensor as it was when it was last appended to, if a buffer may be made for it at once.
    """

    def __init__(self, dim: int, latest: Tensor | None = None) -> None:
        self.dim = dim
        self._latest = latest
        self._buffer: _Buffer | None = None

    def copy(self) -> GrowingTensor:
        """For another holder of the same tensor."""
        return copy(self)

    @property
    def allocated(self) -> int | None:
        """Places in memory; None if there are only those of the tensor."""
        if self._buffer is None:
            return None
        return int(self._buffer.places.shape[self.dim])

    def append(self, tensor: Shaped[Tensor, ...], new: Shaped[Tensor, ...], spare: int = 0) -> Shaped[Tensor, ...]:
        """`tensor` with `new` at its end.

        Args:
            tensor: A tensor, which is not changed.
            new: Tensor to append.
            spare: Number of further places, if more tokens are certain to follow. With 0, a buffer is made only when
                single tokens arrive.
        """
        length = tensor.shape[self.dim]
        more = new.shape[self.dim]
        if not self._fits(tensor, more):
            # The same object as the last time: nothing was taken out since.
            grows = spare > 0 or (more == 1 and tensor is self._latest)
            self._buffer = None
            if grows and not torch.is_grad_enabled():
                shape = list(tensor.shape)
                shape[self.dim] += max(spare, SPARE)
                self._buffer = _Buffer(tensor.new_empty(shape), length)
                self._buffer.places.narrow(self.dim, 0, length).copy_(tensor)
        if self._buffer is None:
            self._latest = torch.cat([tensor, new], self.dim)
        else:
            self._buffer.places.narrow(self.dim, length, more).copy_(new)
            self._buffer.filled = length + more
            self._latest = self._buffer.places.narrow(self.dim, 0, length + more)
        return self._latest

    def _fits(self, tensor: Tensor, more: int) -> bool:
        """Whether `tensor` is everything in the buffer, and there are places left for `more`."""
        buffer = self._buffer
        if buffer is None or torch.is_grad_enabled():  # a gradient needs what it was computed with as it was
            return False
        return (
            buffer.filled == tensor.shape[self.dim]
            and buffer.places.is_inference() == torch.is_inference_mode_enabled()
            and buffer.filled + more <= buffer.places.shape[self.dim]
            and tensor.data_ptr() == buffer.places.data_ptr()
        )


def appended(
    rooms: dict[str, GrowingTensor],
    name: str,
    tensor: Shaped[Tensor, ...],
    new: Shaped[Tensor, ...],
    dim: int,
    spare: int = 0,
) -> Shaped[Tensor, ...]:
    """`tensor` with `new` at its end: a short one is copied, a long one goes on in the room of this name."""
    if tensor.shape[dim] < LONG:
        return torch.cat([tensor, new], dim)
    if name not in rooms:
        rooms[name] = GrowingTensor(dim)
    return rooms[name].append(tensor, new, spare)
