"""Tensors that grow by one token at a time, with spare places, so that a long one is not copied for every token."""

from __future__ import annotations

import torch
from jaxtyping import Shaped
from torch import Tensor

LONG = 512
"""Length from which a copy per token costs more than spare places."""
SPARE = 64


class SpareBuffer:
    """A tensor with empty places at the end of one dimension.

    Holders have views of its first places. No place is written twice, so several holders may share the buffer or a
    shorter part of it, and none sees what another appends.
    """

    def __init__(self, tensor: Tensor, dim: int, spare: int = SPARE) -> None:
        shape = list(tensor.shape)
        self.filled, self._dim = shape[dim], dim
        shape[dim] += spare
        self.places = tensor.new_empty(shape)
        self.places.narrow(dim, 0, self.filled).copy_(tensor)

    def fits(self, tensor: Tensor, more: int) -> bool:
        """Whether `tensor` is everything in the buffer, and there are places left for `more`."""
        return (
            self.filled == tensor.shape[self._dim]
            and self.places.is_inference() == torch.is_inference_mode_enabled()
            and self.filled + more <= self.places.shape[self._dim]
            and tensor.data_ptr() == self.places.data_ptr()
        )

    def append(self, new: Tensor) -> Tensor:
        """A view of everything, with `new` at the end."""
        more = new.shape[self._dim]
        self.places.narrow(self._dim, self.filled, more).copy_(new)
        self.filled += more
        return self.places.narrow(self._dim, 0, self.filled)


class GrowingTensor:
    """How one holder appends to a tensor: in a buffer if it is long and only grows, and by copying otherwise.

    Args:
        dim: The dimension that grows.
        latest: The tensor as it was when it was last appended to, if a buffer may be made for it at once.
        buffer: The buffer that holds it.
    """

    def __init__(self, dim: int, latest: Tensor | None = None, buffer: SpareBuffer | None = None) -> None:
        self.dim = dim
        self._latest = latest
        self._buffer = buffer

    def copy(self) -> GrowingTensor:
        """For another holder of the same tensor."""
        return GrowingTensor(self.dim, self._latest, self._buffer)

    def forget(self) -> None:
        """Start again, with another tensor."""
        self._latest = None
        self._buffer = None

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
        if self._buffer is None and tensor.shape[self.dim] < LONG:
            self._latest = torch.cat([tensor, new], self.dim)
            return self._latest
        more = int(new.shape[self.dim])
        if torch.is_grad_enabled():
            self._buffer = None  # a gradient needs what it was computed with as it was
        elif self._buffer is None or not self._buffer.fits(tensor, more):
            # The same object as the last time: nothing was taken out since.
            grows = spare > 0 or (more == 1 and tensor is self._latest)
            self._buffer = None
            if grows and tensor.shape[self.dim] >= LONG:
                self._buffer = SpareBuffer(tensor, self.dim, max(spare, SPARE))
        if self._buffer is None:
            self._latest = torch.cat([tensor, new], self.dim)
        else:
            self._latest = self._buffer.append(new)
        return self._latest
