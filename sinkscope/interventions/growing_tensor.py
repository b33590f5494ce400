"""Tensors that grow by one token at a time, with spare room, so that a long one is not copied for every token."""

from __future__ import annotations

import torch
from jaxtyping import Shaped
from torch import Tensor

FROM = 512
"""Length from which a copy per token costs more than the room."""
SPARE = 64


class SpareBuffer:
    """A tensor with empty places at the end of one dimension.

    Holders have views of its first places. No place is written twice, so several holders may share the room or a
    shorter part of it, and none sees what another appends.
    """

    def __init__(self, held: Tensor, dim: int, spare: int = SPARE) -> None:
        shape = list(held.shape)
        self.filled, self._dim = shape[dim], dim
        shape[dim] += spare
        self.held = held.new_empty(shape)
        self.held.narrow(dim, 0, self.filled).copy_(held)

    def fits(self, held: Tensor, more: int) -> bool:
        """Whether `held` is everything in the room, and there are places left for `more`."""
        return (
            self.filled == held.shape[self._dim]
            and self.held.is_inference() == torch.is_inference_mode_enabled()
            and self.filled + more <= self.held.shape[self._dim]
            and held.data_ptr() == self.held.data_ptr()
        )

    def append(self, new: Tensor) -> Tensor:
        """A view of everything, with `new` at the end."""
        more = new.shape[self._dim]
        self.held.narrow(self._dim, self.filled, more).copy_(new)
        self.filled += more
        return self.held.narrow(self._dim, 0, self.filled)


class GrowingTensor:
    """How one holder appends to a tensor: in a room if the tensor is long and only grows, and by copying otherwise.

    Args:
        dim: The dimension that grows.
        latest: The tensor as it was when it was last appended to, if a room may be made for it at once.
    """

    def __init__(self, dim: int, latest: Tensor | None = None, room: SpareBuffer | None = None) -> None:
        self.dim, self._latest, self._room = dim, latest, room

    def copy(self) -> GrowingTensor:
        """For another holder of the same tensor."""
        return GrowingTensor(self.dim, self._latest, self._room)

    @property
    def allocated(self) -> int | None:
        """Places in memory; None if there are only those of the tensor."""
        return None if self._room is None else int(self._room.held.shape[self.dim])

    def append(self, held: Shaped[Tensor, ...], new: Shaped[Tensor, ...], spare: int = 0) -> Shaped[Tensor, ...]:
        """`held` with `new` at its end.

        Args:
            held: A tensor, which is not changed.
            new: Tensor to append.
            spare: Number of further places, if more tokens are certain to follow. With 0, room is made only when
                single tokens arrive.
        """
        more = int(new.shape[self.dim])
        if torch.is_grad_enabled():
            self._room = None  # a gradient needs what it was computed with as it was
        elif self._room is None or not self._room.fits(held, more):
            # The same object as the last time: nothing was taken out since.
            grows = spare or (more == 1 and held is self._latest)
            roomy = grows and held.shape[self.dim] >= FROM
            self._room = SpareBuffer(held, self.dim, max(spare, SPARE)) if roomy else None
        self._latest = torch.cat([held, new], self.dim) if self._room is None else self._room.append(new)
        return self._latest
