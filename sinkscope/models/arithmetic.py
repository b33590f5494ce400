"""The one way into matrix products of our own: autocast, which a caller may have switched on, rounds none of them.

The model's own arithmetic stays under autocast. What we compute of its numbers keeps their type, or the wider one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager in which no autocast of the caller rounds numbers on a device."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def product(first: Shaped[Tensor, "*left"], right: Shaped[Tensor, "*right"]) -> Shaped[Tensor, "*product"]:
    """Return the matrix product of two tensors, in the wider of their types."""
    if first.dtype != right.dtype:
        wider = torch.promote_types(first.dtype, right.dtype)
        first = first.to(wider)
        right = right.to(wider)
    with without_autocast(first.device):
        return first @ right


def affine(
    hidden: Shaped[Tensor, "*n d_in"],
    weight: Shaped[Tensor, "d_out d_in"],
    bias: Shaped[Tensor, " d_out"] | None = None,
) -> Shaped[Tensor, "*n d_out"]:
    """Return what a linear layer with these weights gives, in their type."""
    with without_autocast(weight.device):
        return torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias)
