"""Loops by prompt, or by the value of any field: how many answers loop, since when, and how many tokens are wasted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from statistics import median

from sinkscope.loops.text.channels import CheckedOutput

Z = 1.96  # of a 95 % interval


@dataclass(frozen=True)
class LoopGroup:
    """The answers with one value of a field.

    Attributes:
        value: The value, shortened; empty where a record has none.
        answers: Number of answers.
        loop: Number of these that loop or looped.
        rate: Their share.
        low: Lower end of the 95 % interval of the rate (Wilson 1927).
        high: Its upper end.
        onset: Median position of the first token of the loops; None without any.
        wasted: Tokens after the first copies, of all answers.
    """

    value: str
    answers: int
    loop: int
    rate: float
    low: float
    high: float
    onset: float | None
    wasted: int


def groups_of(records: Iterable[CheckedOutput]) -> list[LoopGroup]:
    """Return the groups of records, those that loop most first."""
    by_value: dict[str, list[CheckedOutput]] = {}
    for record in records:
        by_value.setdefault(record.group, []).append(record)
    groups: list[LoopGroup] = []
    for value, members in by_value.items():
        loops = [output for output in members if output.verdict in ("loops", "looped")]
        low, high = wilson(len(loops), len(members))
        onsets = [output.onset for output in loops if output.onset is not None]
        wasted = sum(output.wasted or 0 for output in members)
        onset = float(median(onsets)) if onsets else None
        groups.append(LoopGroup(value, len(members), len(loops), len(loops) / len(members), low, high, onset, wasted))
    return sorted(groups, key=lambda group: (-group.rate, -group.answers))


def wilson(hits: int, cases: int) -> tuple[float, float]:
    """Return the 95 % interval of a share by Wilson's score (1927), also of few cases."""
    share = hits / cases
    middle = (share + Z * Z / (2 * cases)) / (1 + Z * Z / cases)
    half = Z * sqrt(share * (1 - share) / cases + Z * Z / (4 * cases * cases)) / (1 + Z * Z / cases)
    return max(0.0, middle - half), min(1.0, middle + half)
