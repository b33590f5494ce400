"""Sums that do not depend on the order in which a GPU adds."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor


def add_at(
    into: Float[Tensor, "row place"],
    index: Int[Tensor, "row number"],
    values: Float[Tensor, "row number"],
    most: int | float,
    *,
    in_order: bool | None = None,
) -> Float[Tensor, "row place"]:
    """Add each value at its place, in place, so that every run gives the same bits.

    A CPU adds in order. A GPU adds in whichever order its threads arrive, and sums of floating-point numbers depend on
    it; sums of integers do not, so there the values are added as multiples of a small unit.

    Args:
        into: what is added to.
        index: places.
        values: finite numbers.
        most: no sum of values at a place is larger than this; the unit is 2**-61 of it (of the next power of two).
        in_order: whether the device adds in order; None: as described.

    Returns:
        `into`.
    """
    if in_order is None:
        in_order = into.device.type == "cpu"
    if in_order:
        return into.scatter_add_(1, index, values)
    unit = 2.0 ** (math.ceil(math.log2(most)) - 61)
    whole = torch.zeros(into.shape, dtype=torch.int64, device=into.device)
    whole.scatter_add_(1, index, (values.double() / unit).round_().long())
    return into.add_((whole.double() * unit).to(into.dtype))
