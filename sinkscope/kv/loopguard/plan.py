"""What a cache keeps when LoopGuard intervenes: anchors, a sparse history, recent tokens without the repeating tail.

LoopGuard, section 5.3, Eqs. 10 and 11. Plain numbers in and out: positions are true positions in a row, 0 the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sinkscope.errors import SinkscopeError
from sinkscope.records import Natural, Whole, check_fields

Pick = Literal["latest", "uniform"]
Clean = Literal["tail", "repeats"]


@dataclass(frozen=True, kw_only=True)
class Retention:
    """How many tokens of which kind are kept. The paper names `budget` and `anchors` and leaves the other fields open.

    Attributes:
        budget: largest number of tokens right after an intervention (B).
        anchors: number of first positions, which are always kept (N_anchor).
        recent: length of the recent window (R), as in the paper: recent tokens come from the last R tokens, and a loop
            that fills them leaves no clean one. None: the latest clean tokens are the recent ones, wherever they are,
            and the history is what is clean before them.
        recent_budget: number of recent tokens kept at level 0. By default seven eighths of what the anchors leave:
            models copy badly from tokens whose neighbours are missing. With a recent window, half the window, "a small
            amount of local context", and never more than half of what the anchors leave.
        recent_pick: "latest" takes the clean tokens nearest to the end, for a smooth continuation; "uniform" spreads
            the choice over the recent window, and needs one.
        clean: which tokens are bad. "tail" is the paper's rule: blocks that repeat at the end are removed from the
            recent window, and with a window earlier parts of the loop stay in the history. "repeats" is ours: besides
            these blocks, it removes from recent window and history every token of prompt and output that ends an
            n-gram which the row had before. It also finds copies further back, copies in the prompt, and copies that
            differ a little.
        max_level: cap of the aggressiveness level. Every level halves the recent budget, so the default ends at an
            eighth.
    """

    budget: Natural = 1024
    anchors: Whole = 32
    recent: Natural | None = None
    recent_budget: Natural | None = None
    recent_pick: Pick = "latest"
    clean: Clean = "tail"
    max_level: Whole = 3

    def __post_init__(self) -> None:
        """Refuse settings that cannot work.

        Raises:
            SinkscopeError: a field is wrong; the message names the first one and what was expected.
        """
        check_fields(self)
        if self.budget <= self.anchors:
            raise SinkscopeError(
                f"budget={self.budget} leaves nothing beside the {self.anchors} anchors: expected at least "
                f"{self.anchors + 1}; raise the budget or keep fewer anchors",
                page="kv-budget",
            )
        if self.recent is None and self.recent_pick == "uniform":
            raise SinkscopeError('recent_pick="uniform" spreads tokens over a recent window: give recent=... as well')
        room, given = self.budget - self.anchors, self.recent_budget
        if given is not None and given > room:
            raise SinkscopeError(
                f"recent_budget={given!r}: expected a whole number from 1 to {room}, what the anchors leave of the "
                "budget",
                page="kv-budget",
            )

    def recent_tokens(self, level: int) -> int:
        """Number of recent tokens kept, B_recent(level), at least 1."""
        room = self.budget - self.anchors
        usual = room - room // 8 if self.recent is None else min(max(1, self.recent // 2), max(1, room // 2))
        at_first = usual if self.recent_budget is None else self.recent_budget
        return max(1, at_first >> min(level, self.max_level))

    @property
    def sparse_tokens(self) -> int:
        """Number of history tokens kept at every level: what the anchors and the recent tokens of level 0 leave.

        Recent tokens that a higher level gives up are not replaced, so the cache shrinks with the level.
        """
        return self.budget - self.anchors - self.recent_tokens(0)


@dataclass(frozen=True)
class Plan:
    """The tokens that are kept of one row.

    Attributes:
        keep: positions in rising order.
        anchors: how many of them are anchors.
        sparse: how many of them are a sample of the history.
        recent: how many of them are recent.
    """

    keep: tuple[int, ...]
    anchors: int
    sparse: int
    recent: int

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The positions as ranges [start, stop)."""
        return spans(self.keep)


def plan(
    held: Sequence[int], length: int, bad: Sequence[tuple[int, int]], retention: Retention, level: int = 0
) -> Plan:
    """Choose the positions to keep.

    The history is sampled among the positions that the cache still holds. At the second intervention, a sample of all
    positions would contain few of those that the first one left.

    Args:
        held: positions in the cache, ascending.
        length: tokens of the row so far; the recent window ends there.
        bad: ranges [start, stop) of positions to remove; with `clean="tail"` and a recent window only from
            this one.
        retention: budgets.
        level: aggressiveness, from 0; a level above `max_level` counts as `max_level`.

    Returns:
        At most `retention.budget` positions; every anchor that the cache holds is among them, even if it is bad.
    """
    gone = {p for start, stop in bad for p in range(start, stop)}
    anchors = [p for p in held if p < retention.anchors]
    clean = [p for p in held if p >= retention.anchors and p not in gone]
    count = retention.recent_tokens(level)
    if retention.recent is None:
        history, clean = clean[:-count], clean[-count:]
    else:
        begin = length - retention.recent
        in_history: set[int] = set() if retention.clean == "tail" else gone
        history = [p for p in held if retention.anchors <= p < begin and p not in in_history]
        clean = [p for p in clean if p >= begin]
    sparse = uniform(history, retention.sparse_tokens)
    recent = uniform(clean, count) if retention.recent_pick == "uniform" else clean[-count:]
    return Plan((*anchors, *sparse, *recent), len(anchors), len(sparse), len(recent))


def repeated(tokens: Sequence[int], n: int) -> list[int]:
    """Indices of tokens that end an n-gram which also ended at an earlier index."""
    seen: set[tuple[int, ...]] = set()
    found: list[int] = []
    for i in range(n - 1, len(tokens)):
        gram = tuple(tokens[i - n + 1 : i + 1])
        if gram in seen:
            found.append(i)
        seen.add(gram)
    return found


def uniform(positions: Sequence[int], count: int) -> list[int]:
    """Choose `count` of the positions, evenly spaced by rank: the middle one of each of `count` equal parts."""
    total = len(positions)
    if count >= total:
        return list(positions)
    return [positions[(2 * i + 1) * total // (2 * count)] for i in range(count)]


def spans(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Join rising positions to ranges [start, stop)."""
    ranges: list[tuple[int, int]] = []
    for position in positions:
        if ranges and ranges[-1][1] == position:
            ranges[-1] = (ranges[-1][0], position + 1)
        else:
            ranges.append((position, position + 1))
    return ranges
