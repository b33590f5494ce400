"""Warnings stand at the line of the user's own code, wherever in the package or in a library they arise."""

from __future__ import annotations

import sys
import warnings

import pytest
import shape_checks
from kv_kit import model_of, prompts

from sinkscope import errors
from sinkscope.errors import SinkscopeWarning, warn
from sinkscope.kv import H2O

IDS, MASK = prompts([9, 6])


@pytest.fixture(autouse=True)
def _checks_of_shapes_are_no_code_of_the_user(monkeypatch):
    monkeypatch.setattr(errors, "_LIBRARIES", (*errors._LIBRARIES, shape_checks.__file__))


def own_line(caught: list[warnings.WarningMessage]) -> int:
    (warning,) = [one for one in caught if one.category is SinkscopeWarning]
    assert warning.filename == __file__
    return warning.lineno


def test_a_warning_is_at_the_line_that_led_to_it():
    with pytest.warns(SinkscopeWarning) as caught:
        line = sys._getframe().f_lineno + 1
        sorted([2, 1], key=lambda _: warn("once") or 0)
    assert {(one.filename, one.lineno) for one in caught} == {(__file__, line)}


def test_a_policy_that_never_acted_is_said_at_the_with():
    model = model_of("llama")
    line = sys._getframe().f_lineno + 2
    with pytest.warns(SinkscopeWarning, match="never acted") as caught:
        with H2O(budget=6).on(model):
            model(IDS, attention_mask=MASK)
    assert own_line(list(caught)) == line
