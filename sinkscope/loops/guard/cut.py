"""What an act of LoopGuard cuts: where a row repeats itself, which tokens stay, and what leaves the cache.

Anchors, a sparse history and recent tokens without the repetition stay (LoopGuard, section 5.3, Eqs. 10 and 11).
Positions are true positions in a row, from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sinkscope.kv.cache import CacheLayer
from sinkscope.loops.text.monitor import WatchedRow
from sinkscope.loops.text.signals import tail_period

MAX_LEVEL = 3
"""Cap on the aggressiveness level (section 6.1). Each level halves the recent tokens: at last an eighth is left."""


@dataclass(frozen=True)
class Retention:
    """How many tokens of each kind are kept. The paper specifies `budget` and `anchors` and leaves the rest open.

    Attributes:
        budget: Largest number of tokens right after an intervention (B), more than the anchors.
        anchors: Number of first positions that are kept (N_anchor), with a recent window even if they are bad.
        recent: Length of the recent window (R), as in the paper: recent tokens come from the last R tokens, so a loop
            that fills the window leaves no clean ones. At level 0, half the window is kept ("a small amount of local
            context"), but at most half of what the anchors leave. None takes the latest clean tokens, wherever they
            are, and the clean tokens before them are the history. Level 0 then keeps seven eighths of what the anchors
            leave, because models copy badly from tokens whose neighbours are missing.
    """

    budget: int = 1024
    anchors: int = 32
    recent: int | None = None

    def recent_tokens(self, level: int) -> int:
        """Return the number of recent tokens that a level keeps, B_recent(l) of section 5.3, at least 1."""
        after_anchors = self.budget - self.anchors
        recent = after_anchors - after_anchors // 8
        if self.recent is not None:
            recent = min(self.recent, after_anchors) // 2 >> min(level, MAX_LEVEL)
        return max(1, recent)


def tokens_to_keep(cached: Sequence[int], length: int, bad: range, retention: Retention, level: int = 0) -> list[int]:
    """Choose the positions to keep, ascending.

    The history is sampled from the positions that the cache still holds. At a second intervention, a sample of all
    positions would contain few that the first one left.

    Args:
        cached: Positions in the cache, ascending.
        length: Number of tokens in the row so far; the recent window ends there.
        bad: Positions to remove; with a recent window, only within the window.
        retention: Budgets.
        level: Aggressiveness, from 0; a level above `MAX_LEVEL` counts as `MAX_LEVEL`.

    Returns:
        At most `retention.budget` positions. With a recent window, every anchor that the cache holds is among them,
        even if it is bad; without one, bad anchors go, except the first token.
    """
    anchors = [position for position in cached if position < retention.anchors]  # I_anchor
    not_anchors = cached[len(anchors) :]
    clean = [position for position in not_anchors if position not in bad]  # C_recent, Eq. 11
    count = retention.recent_tokens(level)
    if retention.recent is None:
        anchors = [position for position in anchors if position == 0 or position not in bad]
        history = clean[:-count]
    else:
        begin = length - retention.recent
        history = [position for position in not_anchors if position < begin]
        clean = [position for position in clean if position >= begin]
    # At every level as many of the history: recent tokens that a higher level gives up are not replaced, so that the
    # cache shrinks with the level.
    sparse_tokens = retention.budget - retention.anchors - retention.recent_tokens(0)
    sparse, recent = evenly_spaced(history, sparse_tokens), clean[-count:]  # I_sparse, I_recent
    return [*anchors, *sparse, *recent]  # I_keep, Eq. 10


def evenly_spaced(positions: Sequence[int], count: int) -> list[int]:
    """Choose `count` positions, evenly spaced by rank: the middle one of each of `count` equal parts."""
    total = len(positions)
    if count >= total:
        return list(positions)
    return [positions[(2 * part + 1) * total // (2 * count)] for part in range(count)]


def ranges_of(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Join ascending positions into ranges [start, stop)."""
    ranges: list[tuple[int, int]] = []
    for position in positions:
        start = position
        if ranges and ranges[-1][1] == position:
            start, _ = ranges.pop()
        ranges.append((start, position + 1))
    return ranges


def find_repetition(row: WatchedRow, retention: Retention) -> tuple[int, int | None]:
    """Find I_bad(t) (section 5.3): from which position on a row repeats itself, and the period; else its length, None.

    Recent tokens may reach into the prompt, so a loop that began in the prompt is bad there too. At the end of the
    recent window two copies are bad whatever their period: the paper's monitor tests short periods only.
    """
    alarmed = row.monitor.last.tail
    recent = row.ids
    if retention.recent:
        recent = recent[-retention.recent :]
    tail = tail_period(recent, repeats=2)
    begin = row.length
    if tail is not None:
        begin += tail.start - len(recent)
    if retention.recent is None and alarmed is not None:  # copies that differ slightly are bad too
        begin = min(begin, row.prompt + alarmed.start)
    tail = tail or alarmed
    return begin, None if tail is None else tail.period


def copied_tokens(row: WatchedRow) -> int:
    """Return the number of tokens at the end of a row's text that repeat what stands before them."""
    tail = row.monitor.last.tail
    if tail is None:
        return 0
    return max(0, row.written - tail.start - tail.period)


def cached_positions(layers: list[CacheLayer], row: int) -> list[int]:
    """Return the positions of a row that at least one layer and head holds."""
    held = [kv.pos[row].flatten().to(layers[0].pos.device) for kv in layers]
    return [position for position in torch.cat(held).unique().tolist() if position >= 0]


def evict_rows(layers: list[CacheLayer], kept_positions: dict[int, list[int]]) -> None:
    """Evict from these rows all positions that are not listed, in all layers and heads; other rows stay whole."""
    longest = 1 + max(int(kv.pos.max()) for kv in layers)
    allowed = torch.ones(len(layers[0].pos), longest, dtype=torch.bool)
    for row, positions in kept_positions.items():
        allowed[row] = False
        allowed[row, positions] = True
    for kv in layers:
        kv.evict_others(allowed)


@dataclass(frozen=True)
class Act:
    """What a guard does about a row that loops.

    Attributes:
        row: The row.
        period: Tokens of one copy of the loop. None: it is not exact.
        bad: Positions of the repetition that is cut, or that is reported.
        n_cached: Number of tokens that were cached.
        kept: Positions that stay cached.
        level: How strongly the row is steered.
        taken_back: Number of tokens that leave the output.
    """

    row: WatchedRow
    period: int | None
    bad: range
    n_cached: int
    kept: list[int]
    level: int = 0
    taken_back: int = 0

    def data(self) -> dict[str, Any]:
        """Return the data of the event, before the row has lost anything."""
        return {
            "period": self.period,
            "bad": ranges_of(self.bad),
            "level": self.level,
            "cached_before": self.n_cached,
            "taken_back": self.taken_back,
            "left_in_text": 0 if self.taken_back else copied_tokens(self.row),
            "kept": ranges_of(self.kept),
            "kept_count": len(self.kept),
            "generated": self.row.written,
        }
