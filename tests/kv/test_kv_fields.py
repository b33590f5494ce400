"""Settings of the wrong type are refused, whatever else a policy of somebody's own has among its fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pytest
from jaxtyping import Float
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import check_fields
from sinkscope.kv.policy import At, Policy

if TYPE_CHECKING:
    from fractions import Fraction


@dataclass(frozen=True)
class Mixed:
    """Fields that are checked, and others."""

    number: int | float = 1
    word: Literal["a", "b"] | None = None
    some: list[int] | None = None
    more: Sequence[int] = (1, 2)
    pair: tuple[int, int] = (1, 2)
    fn: Callable[[int], int] = abs
    kind: type[int] = int


@dataclass(frozen=True, kw_only=True)
class Unresolved(Policy):
    """Names what is imported for type checkers only."""

    share: Fraction | None = None

    def scores(self, at: At) -> Float[Tensor, "batch kv_head slot"]:
        return at.kv.pos.float()


def test_only_numbers_switches_and_words_are_checked() -> None:
    check_fields(Mixed(some=[1], word="a", number=0.5))
    wrong: Any
    for wrong, says in (
        (Mixed(number=True), "Mixed: number=True: expected a number"),
        (Mixed(number="1"), "Mixed: number='1': expected a number"),  # pyright: ignore[reportArgumentType]
        (Mixed(word="c"), "Mixed: word='c': expected 'a' or 'b'"),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(SinkscopeError) as caught:
            check_fields(wrong)
        assert str(caught.value).startswith(says)


def test_a_policy_whose_annotations_cannot_be_resolved_is_made() -> None:
    assert Unresolved(budget=8).budget == 8
