"""The shares of some work are a partition of it."""

from __future__ import annotations

import pytest
from refusals import refused

from sinkscope.files.shard import shard_of


@pytest.mark.parametrize(("items", "count"), [(1, 1), (7, 1), (7, 2), (7, 7), (12, 5)])
def test_shares_are_a_partition_and_differ_by_one_at_most(items, count):
    every: list[int] = []
    sizes: set[int] = set()
    for number in range(1, count + 1):
        share = shard_of(range(items), f"{number}/{count}")
        every += share
        sizes.add(len(share))
    assert sorted(every) == list(range(items)) and max(sizes) - min(sizes) <= 1
    assert shard_of(range(items), None) == list(range(items))


@pytest.mark.parametrize("shard", ["", "1", "0/2", "3/2", "1/0", "-1/2", "1/2/3", "a/b", "1 /2", "¹/²"])
def test_other_words_are_refused(shard):
    with refused("expected I/N with I from 1 to N"):
        shard_of(range(9), shard)


def test_an_empty_share_is_refused():
    with refused("there are only 2 to share"):
        shard_of(range(2), "3/3")
