"""One of several equal shares of some work, each for a machine or a job of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from sinkscope.errors import SinkscopeError

T = TypeVar("T")


def shard_of(items: Sequence[T], shard: str | None) -> list[T]:
    """The items of one share: of N, share I has every N-th item from the I-th on. The shares are a partition.

    Args:
        items: All items.
        shard: "I/N" with I from 1 to N. None: all items.

    Raises:
        SinkscopeError: It is no such text, or the share is empty.
    """
    if shard is None:
        return list(items)
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", shard)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise SinkscopeError(f"--shard {shard!r}: expected I/N with I from 1 to N, such as 2/8")
    share = list(items[int(match[1]) - 1 :: int(match[2])])
    if not share:
        raise SinkscopeError(f"--shard {shard} is empty: there are only {len(items)} to share, so give a smaller N")
    return share
