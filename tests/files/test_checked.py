"""Values are checked against their types, and whatever does not fit is refused in one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
from refusals import refused

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Finite, Natural, Share, Whole, check_fields, checked_value
from sinkscope.generation.generate import generate


@dataclass(frozen=True)
class Settings:
    """Settings of a test."""

    share: Share = 0.5
    count: Natural = 3
    names: tuple[Literal["a", "b"], ...] = ("a",)
    value: Literal["second"] | Finite = "second"

    def __post_init__(self):
        check_fields(self)
        if self.count > 100:
            raise SinkscopeError("count is above 100: use a smaller one")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"share": 2}, "Settings: share=2: expected a number from 0 to 1"),
        ({"share": "0.5"}, "Settings: share='0.5': expected a number from 0 to 1"),
        ({"count": 0}, "Settings: count=0: expected a whole number from 1"),
        ({"count": True}, "Settings: count=True: expected a whole number"),
        ({"names": ("a", "c")}, "Settings: names[1]='c': expected 'a' or 'b'"),
        ({"names": "ab"}, "Settings: names='ab': expected a valid tuple"),
        ({"value": "third"}, "Settings: value='third': expected 'second' or a finite number"),
    ],
)
def test_a_field_that_does_not_fit_is_named_with_what_was_expected(given, said):
    with refused(words=[said]):
        Settings(**given)


def test_an_argument_that_a_function_does_not_take_is_named_with_what_it_takes():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'temperatur'; it takes .* temperature"):
        generate(None, "a", temperatur=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'logits_processor'; it takes .* batch_size"):
        generate(None, "a", logits_processor=[])  # type: ignore[call-arg]


def test_the_error_of_post_init_comes_out_as_it_was():
    with pytest.raises(SinkscopeError, match=r"^count is above 100: use a smaller one$"):
        Settings(count=101)


def test_a_place_inside_of_data_is_named():
    assert checked_value(list[dict[str, Whole]], [{"a": 1}], "file") == [{"a": 1}]
    with pytest.raises(SinkscopeError, match=r"^file: \[1\]\.b is -1: expected a whole number from 0$"):
        checked_value(list[dict[str, Whole]], [{"a": 1}, {"b": -1}], "file")
