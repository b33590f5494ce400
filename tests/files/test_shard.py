"""The shares of some work are a partition of it."""

from __future__ import annotations

import pytest

from sinkscope.errors import SinkscopeError
from sinkscope.files.shard import shard_of


@pytest.mark.parametrize(("items", "count"), [(1, 1), (7, 1), (7, 2), (7, 7), (12, 5)])
def test_shares_are_a_partition_and_differ_by_one_at_most(items, count):
    shares = [shard_of(range(items), f"{number}/{count}") for number in range(1, count + 1)]
    assert sorted(item for share in shares for item in share) == list(range(items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert shard_of(range(items), None) == list(range(items))


@pytest.mark.parametrize("shard", ["", "1", "0/2", "3/2", "1/0", "-1/2", "1/2/3", "a/b", "1 /2", "¹/²"])
def test_other_words_are_refused(shard):
    with pytest.raises(SinkscopeError, match="expected I/N with I from 1 to N"):
        shard_of(range(9), shard)


def test_an_empty_share_is_refused():
    with pytest.raises(SinkscopeError, match="there are only 2 to share"):
        shard_of(range(2), "3/3")
