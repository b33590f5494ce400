"""The words for lists and counts."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkscope.results.notation import percent, word_list


@given(st.lists(st.text("abc", min_size=1), max_size=30), st.integers(1, 20))
def test_lists_name_each_once_with_one_and(names, most):
    text = word_list(names, most)
    parts = re.split(", | and ", text)
    more = max(0, len(names) - most)
    assert parts == [*names[:most], *([f"{more} more"] if more else [])] or (not names and text == "none")
    assert text.count(" and ") == (len(parts) > 1)


@pytest.mark.parametrize(
    ("share", "digits", "said"),
    [
        (-1e-5, 0, "0%"),
        (-1e-5, 1, "0.0%"),
        (-1e-5, 3, "-0.001%"),
        (-0.0005, 1, "-0.1%"),
        (-0.004, 2, "-0.40%"),
        (-1.0, 0, "-100%"),
    ],
)
def test_what_rounds_to_zero_has_no_sign(share, digits, said):
    assert percent(share, digits) == said
