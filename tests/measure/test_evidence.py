"""The rule by which a component is called needed, and the words for lists and counts."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkscope.measure.evidence import Evidence, percent_pair
from sinkscope.results.notation import count_of, interval_phrase, word_form, word_list

SHARES = st.floats(-1, 2, allow_nan=False)


@given(SHARES, SHARES | st.none(), st.floats(0.1, 10))
def test_needed_is_at_least_half_and_more_than_the_control(lost, control, total):
    scaled = None if control is None else control * total
    half, more = lost - 0.5, 9.0 if control is None else lost - control
    if min(abs(half), abs(more)) > 1e-6:  # beyond rounding
        assert Evidence(lost * total, scaled, total).holds == (half > 0 and more > 0)


@pytest.mark.parametrize("change", [None, float("nan")])
def test_what_was_not_measured_carries_nothing(change):
    assert not Evidence(change).holds
    assert not Evidence(1.0, total=0.0).holds and not Evidence(1.0, control=float("nan")).holds


@given(SHARES, SHARES)
def test_a_share_and_its_control_are_told_apart(share, control):
    texts = percent_pair(share, control)
    control = max(0, control)
    if abs(share - control) > 2e-5:
        assert texts[0] != texts[1]
    for text, value in zip(texts, (share, control), strict=True):
        assert float(text.rstrip("%")) / 100 == pytest.approx(value, abs=0.00501) and text != "-0%"


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
    assert interval_phrase(count, "token") == ("every token" if one else f"every {count:,} tokens")
    assert word_form(count, "is", "are") == ("is" if one else "are")
    assert not re.search(r"\b1 \w+s\b", count_of(count, "token") + interval_phrase(count, "token"))
