"""Values are checked against their types, and whatever does not fit is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from refusals import refused

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Finite, Natural, Share, Whole, checked, checked_value
from sinkscope.generation.generate import generate


@checked
class Settings:
    """Settings of a test."""

    share: Share = 0.5
    count: Natural = 3
    names: tuple[Literal["a", "b"], ...] = ("a",)
    value: Literal["second"] | Finite = "second"

    def __post_init__(self):
        if self.count > 100:
            raise SinkscopeError("count is above 100: use a smaller one")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"share": 2}, "share is 2: expected a number from 0 to 1"),
        ({"share": "0.5"}, "share is '0.5': expected a number from 0 to 1"),
        ({"count": 0}, "count is 0: expected a whole number from 1"),
        ({"count": True}, "count is True: expected a whole number"),
        ({"names": ("a", "c")}, "names[1] is 'c': expected 'a' or 'b'"),
        ({"names": "ab"}, "names is 'ab': expected a valid tuple"),
        ({"shares": 0.5}, "Settings has no field 'shares': expected share"),
        ({"foo": 1}, "Settings has no field 'foo': expected share, count, names, value"),
        ({"value": "third"}, "value is 'third': expected 'second' or a finite number"),
    ],
)
def test_a_field_that_does_not_fit_is_named_with_what_was_expected(given, said):
    with refused(words=[said]):
        Settings(**given)


def test_an_argument_that_a_function_does_not_take_is_named_with_what_it_takes():
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperatur'; did you mean temperature"):
        generate(None, "a", temperatur=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'logits_processor'; it takes .* on_text"):
        generate(None, "a", logits_processor=[])  # type: ignore[call-arg]


def test_what_fits_makes_an_ordinary_frozen_dataclass():
    made = Settings(share=1, names=["b"])  # type: ignore[arg-type]
    assert (made.share, made.names, made.value) == (1.0, ("b",), "second")
    assert made == replace(Settings(), share=1.0, names=("b",))
    with pytest.raises(AttributeError):
        made.share = 0.1  # type: ignore[misc]


def test_the_error_of_post_init_comes_out_as_it_was():
    with pytest.raises(SinkscopeError, match=r"^count is above 100: use a smaller one$"):
        Settings(count=101)


def test_a_place_inside_of_data_is_named():
    assert checked_value(list[dict[str, Whole]], [{"a": 1}], "file") == [{"a": 1}]
    with pytest.raises(SinkscopeError, match=r"^file: \[1\]\.b is -1: expected a whole number from 0$"):
        checked_value(list[dict[str, Whole]], [{"a": 1}, {"b": -1}], "file")
