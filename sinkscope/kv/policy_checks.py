"""Checks of the settings of a policy, and of what its class gives."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.kv.slots import Slots


def check_scores(scores: object, kv: Slots, name: str, is_first: bool) -> None:
    """Check that there is a number for each slot.

    On an accelerator only the first scores of a cache are checked for NaN, because every later check would have to wait
    for the device.

    Args:
        scores: What was returned.
        kv: The slots.
        name: Name of the policy.
        is_first: Whether these are the first scores after a prompt.

    Raises:
        SinkscopeError: The scores have the wrong shape, or some are NaN.
    """
    shape, layer = kv.keys.shape[:3], kv.number
    if not isinstance(scores, Tensor) or scores.shape != shape:
        raise SinkscopeError(
            f"{name}.scores returned a {type(scores).__name__} of shape {tuple(getattr(scores, 'shape', ()))} for "
            f"layer {layer}: expected a tensor of shape {tuple(shape)}, one number per row, kv head, slot"
        )
    checked = is_first or scores.device.type == "cpu"
    if not checked or not scores.is_floating_point() or not scores.numel():
        return
    # The smallest number is NaN if any is, and it is much faster to find. Padding may be NaN, since it is not kept.
    if math.isnan(scores.amin().item()) and bool((scores.isnan() & (kv.pos >= 0)).any()):
        raise SinkscopeError(
            f"{name}.scores returned NaN for layer {layer}: slots without a score cannot be compared; return "
            "-torch.inf for what is worth nothing"
        )


def check_room(budget: int, always_kept: int, named: str) -> None:
    """Refuse a budget in tokens that is smaller than what is always kept.

    Raises:
        SinkscopeError: It is.
    """
    if budget < max(1, always_kept):
        raise SinkscopeError(
            f"{named} is below the {max(1, always_kept)} tokens that are always kept: raise the budget or protect fewer"
        )


def check_layer_room(
    budget: int | Int[Tensor, "batch _"], first: Sequence[int], latest: Sequence[int], named: str
) -> None:
    """Refuse a layer's own budgets if one is smaller than the first and latest tokens that are kept of its row.

    Raises:
        SinkscopeError: One is.
    """
    fewest = torch.atleast_2d(torch.as_tensor(budget)).amin(1).tolist()
    for row, kept in enumerate(zip(first, latest, strict=True)):
        tokens = fewest[row % len(fewest)]
        check_room(tokens, sum(kept), f"{named} has a budget of {tokens} tokens, which")


def unseen_queries() -> UnsupportedError:
    """Return the error of a policy that needs queries which were read before it could see them."""
    return UnsupportedError(
        "the latest queries were not seen, because this cache was filled outside of the `with`: read the prompt inside"
    )
