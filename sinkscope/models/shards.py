"""Tensors of which every process holds a part, where transformers has split a model's weights over processes.

Numbers of neurons and heads are those of the whole model everywhere; the last step alone turns them into local ones.
What a hook sees is judged by its width: the part of this process, or the whole where a module gathers. In a model that
is not split every method does nothing; otherwise all processes make the same calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
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

    @cached_property
    def _group(self) -> Any:
        return self._mesh.get_group()

    def axis(self, size: int) -> range:
        """Return the part of a dimension that is here, as `torch.chunk` cuts it: the last parts may be shorter."""
        each = -(-size // self.size)
        return range(min(self.rank * each, size), min((self.rank + 1) * each, size))

    def here(self, numbers: Sequence[int], size: int) -> tuple[list[int], list[int]]:
        """Return the numbers that are here: their places in `numbers`, and where they are in the part."""
        part = self.axis(size)
        places = [place for place, number in enumerate(numbers) if number in part]
        return places, [part.index(numbers[place]) for place in places]

    def is_part(self, width: int, size: int) -> bool:
        """Return whether a dimension of this width is the part that is here, and not the whole.

        Raises:
            UnsupportedError: It is neither.
        """
        if width == size:
            return False
        expected = len(self.axis(size))
        if self.size == 1 or width != expected:
            raise UnsupportedError(
                f"a process of {self.size} holds {width} of {size} columns, where {expected} were expected: this "
                "split is not served; load the model with device_map"
            )
        return True

    def gather(self, tensor: Shaped[Tensor, ...], size: int, dim: int = -1) -> Shaped[Tensor, ...]:
        """Return the whole of a tensor of which processes may hold parts along a dimension of this size."""
        width = tensor.shape[dim]
        if not self.is_part(width, size):
            return tensor
        mine = tensor.detach().movedim(dim, 0)
        padded = mine.new_zeros(-(-size // self.size), *mine.shape[1:])  # parts may differ by their last columns
        padded[:width] = mine
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group)
        return torch.cat(parts)[:size].movedim(0, dim)

    def part(self, whole: Shaped[Tensor, ...], width: int) -> Shaped[Tensor, ...]:
        """Return the columns of a whole tensor that this process holds; all of them if it holds `width` of as many."""
        size = whole.shape[-1]
        if not self.is_part(width, size):
            return whole
        return whole.narrow(-1, self.axis(size).start, width)

    def columns(self, part: Shaped[Tensor, "*n _"], numbers: Sequence[int], size: int) -> Shaped[Tensor, "*n column"]:
        """Return columns of a tensor of which every process holds some: one sum brings them to all."""
        if not self.is_part(part.shape[-1], size):
            return part[..., list(numbers)]
        places, local = self.here(numbers, size)
        found = part.new_zeros(*part.shape[:-1], len(numbers))
        found[..., places] = part.detach()[..., local]
        dist.all_reduce(found, group=self._group)
        return found

    def all(self, value: Any) -> list[Any]:
        """Return what every process gives, in their order; any small object."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def agree(self, what: str, *plan: object) -> None:
        """Refuse to go on, on all processes, if they were given different things to do.

        Args:
            what: What is compared, for the error.
            plan: Objects whose text says all that matters.

        Raises:
            SinkscopeError: The processes differ.
        """
        if self.size == 1:
            return
        digest = hashlib.sha256(repr(plan).encode()).hexdigest()
        first, *others = self.all(digest)
        for rank, other in enumerate(others, 1):
            if other != first:
                raise SinkscopeError(
                    f"processes 0 and {rank} of {self.size} have a different {what}: give all of them the same model, "
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


def split_of(module: Any, side: str, seen: Any) -> tuple[Shards, int] | None:
    """Return the processes that share what a hook on a module sees, and its whole width; None if all of it is here.

    Args:
        module: The module.
        side: "in_features" before the module, "out_features" after it.
        seen: What the hook sees.
    """
    shards, size = shards_of(getattr(module, "weight", None)), getattr(module, side, None)
    if shards.size == 1 or size is None or not isinstance(seen, Tensor) or not shards.is_part(seen.shape[-1], size):
        return None
    return shards, size


def check_no_gradient(seen: Tensor) -> None:
    """Refuse an edit through which a gradient would have to pass.

    Raises:
        UnsupportedError: It would.
    """
    if seen.requires_grad:
        raise UnsupportedError(
            "no gradient passes through an edit of a model that is split over processes: call it under "
            "torch.no_grad(), or load it with device_map"
        )


def check_divides(config: Any, name: str, count: int) -> None:
    """Refuse to split a model over processes among which its heads cannot be shared out.

    Raises:
        SinkscopeError: They cannot.
    """
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config.get_text_config(), what, None) or count
        if heads % count:
            raise SinkscopeError(
                f"{count} processes cannot share the {heads} heads ({what}) of {name}: start a number that divides them"
            )
