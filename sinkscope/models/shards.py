"""Weights that transformers has split over processes.

Every process holds a part of them. Numbers of neurons and heads are those of the whole model everywhere; the last step
alone turns them into local ones. What a hook sees is judged by its width: the part of this process, or the whole where
a module gathers. In a model that is not split every method of `Shards` does nothing; otherwise all processes make the
same calls.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError


class Shards:
    """The processes among which a weight is split.

    Args:
        weight: The weight; None if there is none.
    """

    def __init__(self, weight: Any) -> None:
        self._mesh: Any = getattr(weight, "device_mesh", None)
        self.size = 1 if self._mesh is None else int(self._mesh.size())

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
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(tensor.detach(), self._mesh, [Shard(dim)]).full_tensor()

    def part(self, full: Shaped[Tensor, ...], held: Tensor) -> Shaped[Tensor, ...]:
        """Return the columns of a whole tensor that this process has seen; all of them if it has seen as many.

        Raises:
            UnsupportedError: It has seen a part, and gradients would pass.
        """
        width = held.shape[-1]
        if not self._is_part(width, full.shape[-1]):
            return full
        if held.requires_grad:
            raise UnsupportedError(
                "no gradient passes through an edit of a model that is split over processes: call it under "
                "torch.no_grad(), or load it with device_map"
            )
        return full.narrow(-1, self._mesh.get_local_rank() * width, width)

    def agree(self, name: str, *plan: object) -> None:
        """Refuse to go on, on all processes, if they were given different things to do.

        Args:
            name: What is compared, for the error.
            plan: Objects whose text says all that matters.

        Raises:
            SinkscopeError: The processes differ.
        """
        plans = [repr(plan)] * self.size
        if self.size > 1:
            dist.all_gather_object(plans, repr(plan), group=self._mesh.get_group())
        if len(set(plans)) > 1:
            raise SinkscopeError(
                f"the {self.size} processes have a different {name}: give all of them the same model, texts, settings "
                "and seeds"
            )

    def check_alone(self, name: str) -> None:
        """Refuse what one process does with a model that is split over several.

        Raises:
            UnsupportedError: The model is split.
        """
        if self.size > 1:
            raise UnsupportedError(
                f"{name} is for a model in one process, and this one is split over {self.size}: load it with device_map"
            )


def split_weight(model: nn.Module) -> Any:
    """Return the first weight of a model that is split over processes; None if there is none."""
    return next((weight for weight in model.parameters() if hasattr(weight, "device_mesh")), None)


def local(weight: Any) -> Any:
    """Return the part of a weight that is here; the weight itself if it is not split."""
    return weight.to_local() if hasattr(weight, "device_mesh") else weight
