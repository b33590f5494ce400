"""Checks of what the class of a policy gives, for who writes one."""

from __future__ import annotations

import math

from jaxtyping import Bool, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError


def check_scores(scores: object, pos: Int[Tensor, "batch kv_head slot"], name: str, where: str, is_first: bool) -> None:
    """Check that there is a number for each slot.

    On an accelerator only the first scores of a cache are checked for NaN, because every later check would have to wait
    for the device.

    Args:
        scores: What was returned.
        pos: True position of each slot.
        name: Name of the method.
        where: The layer, for the error.
        is_first: Whether these are the first scores after a prompt.

    Raises:
        SinkscopeError: The scores have the wrong shape, or some are NaN.
    """
    if not isinstance(scores, Tensor) or scores.shape != pos.shape:
        raise SinkscopeError(
            f"{name} returned a {type(scores).__name__} of shape {tuple(getattr(scores, 'shape', ()))} for "
            f"{where}: expected a tensor of shape {tuple(pos.shape)}, one number per row, kv head, slot"
        )
    checked = is_first or scores.device.type == "cpu"
    if not checked or not scores.is_floating_point() or not scores.numel():
        return
    # The smallest number is NaN if any is, and it is much faster to find. Padding may be NaN, since it is not kept.
    if math.isnan(scores.amin().item()) and bool((scores.isnan() & (pos >= 0)).any()):
        raise SinkscopeError(
            f"{name} returned NaN for {where}: slots without a score cannot be compared; return -torch.inf for what "
            "is worth nothing"
        )


def check_kept(keep: Bool[Tensor, "batch kv_head slot"], exact: int, name: str, where: str) -> None:
    """Check that a class that says `KEEPS_BUDGET` keeps as many slots in every row and head.

    Raises:
        SinkscopeError: Another number is kept.
    """
    if bool((keep.sum(-1) != exact).any()):
        raise SinkscopeError(
            f"{name} says KEEPS_BUDGET, and {where} keeps other numbers of tokens than its budget of {exact}: set "
            "KEEPS_BUDGET = False in its class"
        )
