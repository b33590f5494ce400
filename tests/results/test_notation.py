"""The words for lists and counts."""

from __future__ import annotations

import pytest

from sinkscope.results.notation import count_of, percent, word_list


def test_lists_and_counts_are_said_in_words():
    assert [word_list("abcd"[:count], 3) for count in range(5)] == [
        "none",
        "a",
        "a and b",
        "a, b and c",
        "a, b, c and 1 more",
    ]
    assert [count_of(count, "token") for count in (0, 1, 2000)] == ["no token", "1 token", "2,000 tokens"]


@pytest.mark.parametrize(
    ("share", "digits", "said"),
    [(-1e-5, 0, "0%"), (-1e-5, 1, "0.0%"), (-1e-5, 3, "-0.001%"), (-0.0005, 1, "-0.1%"), (-1.0, 0, "-100%")],
)
def test_what_rounds_to_zero_has_no_sign(share, digits, said):
    assert percent(share, digits) == said
