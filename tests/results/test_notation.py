"""The words for lists and counts."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from sinkscope.results.notation import count_of, word_form, word_list


@given(st.lists(st.text("abc", min_size=1), max_size=30), st.integers(1, 20))
def test_lists_name_each_once_with_one_and(names, most):
    text = word_list(names, most)
    parts = re.split(", | and ", text)
    more = max(0, len(names) - most)
    assert parts == [*names[:most], *([f"{more} more"] if more else [])] or (not names and text == "none")
    assert text.count(" and ") == (len(parts) > 1)


@given(st.integers(0, 5000))
def test_one_is_singular_and_nothing_else(count):
    one = count == 1
    assert count_of(count, "head").endswith("heads") == (count > 1)
    assert word_form(count, "is", "are") == ("is" if one else "are")
    assert not re.search(r"\b1 \w+s\b", count_of(count, "token"))
