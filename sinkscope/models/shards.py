"""Weights that transformers has split over processes.

Every process holds a part of them. Numbers of neurons and heads are those of the whole model everywhere; the last step
alone turns them into local ones. What a hook sees is judged by its width: the part of this process, or the whole where
a module gathers. In a model that is not split every method of `Shards` does nothing; otherwise all processes make the
same calls.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError


class Shards:
    """The processes among which a weight is split.

    Args:
        mesh: The device mesh of the weight; None if it is not split.
    """

    def __init__(self, mesh: Any = None) -> None:
        self._mesh = mesh
        self.size = 1 if mesh is None else int(mesh.size())
        self.rank = 0 if mesh is None else int(mesh.get_local_rank())

    def _is_part(self, width: int, size: int) -> bool:
        """Whether a dimension of this width is the part that is here, and not the whole.

        Raises:
            UnsupportedError: It is neither.
        """
        if width != size and width * self.size != size:
            raise UnsupportedError(
                f"a process of {self.size} holds {width} of {size} columns, which no even split gives it: load the "
                "model with device_map"
            )
        return width != size

    def gather(self, tensor: Shaped[Tensor, ...], size: int, dim: int = -1) -> Shaped[Tensor, ...]:
        """Return a whole tensor, if each process holds a part of the dimension of this size."""
        if not self._is_part(tensor.shape[dim], size):
            return tensor
        mine = tensor.detach().contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self._mesh.get_group())
        return torch.cat(parts, dim)

    def part(self, whole: Shaped[Tensor, ...], width: int) -> Shaped[Tensor, ...]:
        """Return the columns of a whole tensor that this process holds; all of them if it holds `width` of as many."""
        return whole.narrow(-1, self.rank * width, width) if self._is_part(width, whole.shape[-1]) else whole

    def all(self, value: Any) -> list[Any]:
        """Return what every process gives, in their order; any small object."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._mesh.get_group())
        return values

    def agree(self, what: str, *plan: object) -> None:
        """Refuse to go on, on all processes, if they were given different things to do.

        Args:
            what: What is compared, for the error.
            plan: Objects whose text says all that matters.

        Raises:
            SinkscopeError: The processes differ.
        """
        plans = self.all(repr(plan))
        others = [rank for rank, each in enumerate(plans) if each != plans[0]]
        if others:
            raise SinkscopeError(
                f"processes 0 and {others[0]} of {self.size} have a different {what}: give all of them the same model, "
                "texts, settings and seeds"
            )

    def check_alone(self, what: str) -> None:
        """Refuse what one process does with a model that is split over several.

        Raises:
            UnsupportedError: The model is split.
        """
        if self.size > 1:
            raise UnsupportedError(
                f"{what} is for a model in one process, and this one is split over {self.size}: load it with device_map"
            )


ALONE = Shards()
"""Of what is not split."""


def shards_of(weight: Any) -> Shards:
    """Return the processes among which a weight is split."""
    mesh = getattr(weight, "device_mesh", None)
    return ALONE if mesh is None else Shards(mesh)


def split_weight(model: nn.Module) -> Any:
    """Return the first weight of a model that is split over processes; None if there is none."""
    for parameter in model.parameters():
        if hasattr(parameter, "device_mesh"):
            return parameter
    return None


def local(weight: Any) -> Any:
    """Return the part of a weight that is here; the weight itself if it is not split."""
    return weight.to_local() if hasattr(weight, "device_mesh") else weight
