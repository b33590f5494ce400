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

    A CPU adds in order. A GPU adds in the order in which its threads arrive, and floating-point sums depend on that
    order. Integer sums do not, so on a GPU the values are added as multiples of a small unit.

    Args:
        into: Tensor to which values are added.
        index: Place of each value.
        values: Finite numbers.
        most: Upper bound of the sum of values at any place; the unit is 2**-61 of its next power of two.
        in_order: Whether the device adds in order. None means only a CPU does.

    Returns:
        `into`.
    """
    if in_order or (in_order is None and into.device.type == "cpu"):
        return into.scatter_add_(1, index, values)
    unit = 2.0 ** (math.ceil(math.log2(most)) - 61)
    whole = torch.zeros(into.shape, dtype=torch.int64, device=into.device)
    whole.scatter_add_(1, index, (values.double() / unit).round_().long())
    return into.add_((whole.double() * unit).to(into.dtype))
