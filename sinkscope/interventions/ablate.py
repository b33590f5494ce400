"""Ablation of neurons, and writing a value: is a neuron necessary for a sink, and is it sufficient?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Run
from sinkscope.interventions.edits import Group, NeuronEdit
from sinkscope.interventions.positions import Call, Memory

Positions = int | tuple[int, ...] | list[int] | slice | Literal["first"] | None


@dataclass(frozen=True, kw_only=True)
class Ablate(NeuronEdit):
    """Switch neurons off.

    Args:
        value: "zero", a number, or "mean": the row's mean over its real positions after the first, in the first call
            that has any (the first token is left out, because a sink there is what one wants to see against the rest).
            Until such a call came, "mean" leaves the values as they are.
        positions: where, counted from the first real token of each row: None for everywhere, "first", a number,
            several, or a slice.

    Example:
        >>> Ablate(layer=1, neurons=[3, 4], positions="first").sites[0]
        Site(layer=1, neuron=3, expert=None)
    """

    value: Literal["zero", "mean"] | float = "zero"
    positions: Positions = None

    KIND: ClassVar[str] = "ablated"

    def __post_init__(self, layer: int | None, neurons: Sequence[int]) -> None:
        super().__post_init__(layer, neurons)
        if self.value not in ("zero", "mean"):
            _number(self.value, '"zero", "mean" or a number')
        object.__setattr__(self, "positions", _positions(self.positions))

    def new_values(
        self, old: Float[Tensor, "batch pos neuron"], call: Call, memory: Memory, group: Group, run: Run
    ) -> Float[Tensor, "batch pos neuron"]:
        """Zero, the mean or the number at the chosen positions."""
        index = call.on(old.device)
        if self.value == "mean":
            later = (index > 0)[..., None]
            mean = torch.where(later, old.detach(), 0).sum(1, dtype=torch.float32) / later.sum(1)
            kept = memory.get("mean", torch.full_like(mean, torch.nan))
            memory["mean"] = torch.where(kept.isnan(), mean, kept)
            value = torch.where(memory["mean"].isnan()[:, None], old, memory["mean"][:, None].to(old.dtype))
        else:
            value = torch.full_like(old, 0.0 if self.value == "zero" else float(self.value))
        return torch.where(_chosen(index, self.positions)[..., None], value, old)


@dataclass(frozen=True, kw_only=True)
class Write(NeuronEdit):
    """Give neurons a value at chosen positions: does that alone make a sink there?

    Args:
        value: the number to write.
        position: where, counted from the first real token of each row: a number, several, "first" or a slice.

    Example:
        >>> Write(sites=[(1, 3)], value=40.0, position=[5, 9]).position
        (5, 9)
    """

    value: float
    position: Positions

    KIND: ClassVar[str] = "written"

    def __post_init__(self, layer: int | None, neurons: Sequence[int]) -> None:
        super().__post_init__(layer, neurons)
        _number(self.value, "a number")
        object.__setattr__(self, "position", _positions(self.position))

    def new_values(
        self, old: Float[Tensor, "batch pos neuron"], call: Call, memory: Memory, group: Group, run: Run
    ) -> Float[Tensor, "batch pos neuron"]:
        """The number at the chosen positions."""
        return old.masked_fill(_chosen(call.on(old.device), self.position)[..., None], float(self.value))


def _number(value: object, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise SinkscopeError(f"value={value!r}: expected {expected}", page="neuron-sites")


def _positions(given: Any) -> Positions:
    numbers = given if isinstance(given, tuple | list) else (given,)
    if isinstance(given, slice):
        numbers = tuple(n for n in (given.start, given.stop, given.step) if n is not None)
    elif given is None or given == "first":
        return given
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise SinkscopeError(
            f'positions {given!r}: expected "first", whole numbers from 0 (0 is the first token that is not padding) '
            "or a slice of them",
            page="neuron-sites",
        )
    return tuple(given) if isinstance(given, list) else given


def _chosen(index: Int[Tensor, "batch pos"], positions: Positions) -> Bool[Tensor, "batch pos"]:
    if positions is None:
        return index >= 0
    if isinstance(positions, slice):
        start, step = positions.start or 0, positions.step or 1
        inside = (index >= start) & ((index - start) % step == 0)
        return inside if positions.stop is None else inside & (index < positions.stop)
    wanted = (0,) if positions == "first" else positions if isinstance(positions, tuple) else (positions,)
    return torch.isin(index, torch.tensor(wanted, device=index.device, dtype=index.dtype))
