"""How many tokens a policy keeps of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

LayerBudget = int | Int[Tensor, "batch _"]
"""Tokens that a layer keeps: one number, or one for each row, or for each row and kv head."""


@dataclass(frozen=True)
class RowBudgets:
    """What a policy keeps of each row, in tokens; fixed at the end of the prompt.

    Attributes:
        total: Tokens kept in each layer and kv head, unless the policy gives layers or heads budgets of their own.
        first: First tokens that are always kept, with those that a guard in the same run keeps.
        latest: Latest tokens that are always kept.
    """

    total: tuple[int, ...]
    first: tuple[int, ...]
    latest: tuple[int, ...]

    @cached_property
    def budget(self) -> LayerBudget:
        """The total as `Policy.budgets` gives it: one number if all rows have the same."""
        return _number_or_rows(self.total)

    @cached_property
    def first_kept(self) -> LayerBudget:
        """The number of first tokens in the same form."""
        return _number_or_rows(self.first)

    @cached_property
    def latest_kept(self) -> LayerBudget:
        """The number of latest tokens in the same form."""
        return _number_or_rows(self.latest)

    @cached_property
    def protects(self) -> bool:
        """Whether any token is always kept."""
        return any(self.first) or any(self.latest)


def _number_or_rows(numbers: Sequence[int]) -> LayerBudget:
    """One number if it is the same for all rows, else one for each."""
    if len(set(numbers)) == 1:
        return numbers[0]
    return torch.tensor(numbers)[:, None]
