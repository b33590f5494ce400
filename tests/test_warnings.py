"""Warnings stand at the line of the user's own code, wherever in the package or in a library they arise."""

from __future__ import annotations

import sys

import pytest

from sinkscope.errors import SinkscopeWarning, warn


def test_a_warning_is_at_the_line_that_led_to_it():
    with pytest.warns(SinkscopeWarning) as caught:
        line = sys._getframe().f_lineno + 1
        sorted([2, 1], key=lambda _: warn("once") or 0)
    assert {(one.filename, one.lineno) for one in caught} == {(__file__, line)}
