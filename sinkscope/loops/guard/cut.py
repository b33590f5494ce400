"""What an act of LoopGuard needs of a row and of the cache: where a row repeats itself, what is cached, what leaves."""

from __future__ import annotations

from typing import Any

import torch

from sinkscope.kv.cache import CacheLayer
from sinkscope.loops.guard.detect import WatchedRow
from sinkscope.loops.guard.retention import Retention, ranges_of
from sinkscope.loops.text.signals import tail_period


def find_repetition(row: WatchedRow, retention: Retention) -> tuple[int, int | None]:
    """Find I_bad(t) (section 5.3): from which position on a row repeats itself, and the period; else its length, None.

    Recent tokens may reach into the prompt, so a loop that began in the prompt is bad there too. At the end of the
    recent window two copies are bad whatever their period: the paper's monitor tests short periods only.
    """
    found = row.monitor.last.tail
    recent = row.ids
    if retention.recent:
        recent = recent[-retention.recent :]
    tail = tail_period(recent, repeats=2)
    begin = row.length
    if tail is not None:
        begin += tail.start - len(recent)
    if retention.recent is None and found is not None:  # copies that differ slightly are bad too
        begin = min(begin, row.prompt + found.start)
    tail = tail or found
    return begin, None if tail is None else tail.period


def copies_of(row: WatchedRow) -> int:
    """Return the number of tokens at the end of a row's text that repeat what stands before them."""
    tail = row.monitor.last.tail
    if tail is None:
        return 0
    return max(0, row.written - tail.start - tail.period)


def event_data(
    row: WatchedRow,
    period: int | None,
    bad: range,
    cached: list[int],
    kept: list[int],
    level: int = 0,
    taken_back: int = 0,
) -> dict[str, Any]:
    """Return the data of an event."""
    return {
        "period": period,
        "bad": ranges_of(bad),
        "level": level,
        "cached_before": len(cached),
        "taken_back": taken_back,
        "left_in_text": 0 if taken_back else copies_of(row),
        "kept": ranges_of(kept),
        "kept_count": len(kept),
        "generated": row.written,
    }


def cached_positions(layers: list[CacheLayer], row: int) -> list[int]:
    """Return the positions of a row that at least one layer and head holds."""
    held = [kv.pos[row].flatten().to(layers[0].pos.device) for kv in layers]
    return [position for position in torch.cat(held).unique().tolist() if position >= 0]


def evict_rows(layers: list[CacheLayer], kept: dict[int, list[int]]) -> None:
    """Evict everything else from some rows, in all layers and heads; the others stay."""
    longest = 1 + max(int(kv.pos.max()) for kv in layers)
    allowed = torch.ones(len(layers[0].pos), longest, dtype=torch.bool)
    for row, positions in kept.items():
        allowed[row] = False
        allowed[row, positions] = True
    for kv in layers:
        kv.evict_others(allowed)
