"""Rows of two results merged by key, with how far each number moved: text by text where both read the same texts.

1. Rows of one subject, table and name are one row. Two subjects are one if their names are the same, or differ in
   numbers alone; if they name layers, these overlap, and those with most common layers are one.
2. Where both have a number for each text, the change is the mean of the differences over the texts that both have, with
   its 95 % interval; before and after are then means over these texts. Else the interval is that of both margins
   together (the root of the sum of their squares).
3. A number changed if the interval of its change leaves out zero and it moved by 1 % of its value. A number without an
   interval is shown and not judged; a word changed if it is another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import hypot, isfinite

import numpy as np

from sinkscope.measure.margin import DIFFERENCES, Interval, interval_of
from sinkscope.results.row import Mean, Row

SMALLEST_CHANGE = 0.01  # of its value that a number moves by at least before it counts as changed
COMES = 0.05  # share of a whole, under which the coming or going of a row is left to the search that found it
CHANGED, CAME, WENT, UNJUDGED, SMALL, SAME = "changed", "came", "went", "not judged", "under 1 %", "no change"
VERDICTS = (CHANGED, CAME, WENT, UNJUDGED, SMALL, SAME)
"""The tables of a comparison, in the order in which they are read."""
_LAYERS = re.compile(r"layers? (\d+)(?:-(\d+))?$")


def merge(before: Sequence[Row], after: Sequence[Row]) -> list[Row]:
    """Return a row for each number and word that both have, and for each row and subject that came or went.

    The table of a row is its verdict, and the note of a number the table that it is from. The numbers are before,
    after, change, lower, upper (the interval of the change) and texts (those that are compared).
    """
    names = _matched([row.about for row in before], [row.about for row in after])
    old = {(row.about, row.table, row.name): row for row in before}
    new = {(names[row.about], row.table, row.name): row for row in after}
    subjects = [{about for about, _, _ in rows} for rows in (old, new)]
    rows: list[Row] = []
    for key in dict.fromkeys([*old, *new]):
        about, _, name = key
        first = old.get(key)
        second = new.get(key)
        if first is not None and second is not None:
            both = [number for number in first.numbers if number in second.numbers and number != "control"]
            rows += [*_word(first, second), *(_number(first, second, number) for number in both)]
            continue
        there, verdict = (second, CAME) if first is None else (first, WENT)
        assert there is not None
        if about in subjects[0] & subjects[1]:
            if abs(there.get("share")) >= COMES or "share" not in there.numbers:
                rows.append(Row(verdict, name, {}, there.words() or there.table, about))
        elif not any(row.name == about for row in rows):
            rows.append(Row(verdict, about))
    return sorted(rows, key=lambda row: VERDICTS.index(row.table))


def _word(first: Row, second: Row) -> list[Row]:
    """Whether the note of a row is another; none if it has none."""
    if first.note == second.note:
        return [Row(SAME, first.name, {}, first.note, first.about)] if first.note else []
    words = f"{first.note or 'none'} -> {second.note or 'none'}"
    return [Row(CHANGED, first.name, {}, words, first.about)]


def _number(first: Row, second: Row, number: str) -> Row:
    """How far a number of a row moved, text by text where both have one of each, and the verdict."""
    before = first.numbers[number]
    after = second.numbers[number]
    old, new = ({text: value for text, value in _by_text(row, number) if isfinite(value)} for row in (first, second))
    pairs = np.array([(old[text], new[text]) for text in old if text in new]).reshape(-1, 2)
    scores = before.kind == "share" and {*pairs.flat} <= {0.0, 1.0}  # right or wrong
    interval = interval_of(pairs[:, 1] - pairs[:, 0], DIFFERENCES if scores else None)
    start = before.value
    end = after.value
    texts = 0
    if interval is not None:
        (start, end), texts = pairs.mean(0).tolist(), len(pairs)
    elif before.margin is not None and after.margin is not None:
        margin = hypot(before.margin, after.margin)
        interval = Interval(end - start, end - start - margin, end - start + margin)
    moved = {"before": start, "after": end, "change": end - start}
    verdict = UNJUDGED
    if interval is not None:
        moved |= {"lower": interval.low, "upper": interval.high, "texts": float(texts)}
        verdict = SAME
        if not interval.low <= 0 <= interval.high:
            verdict = CHANGED if abs(interval.mean) > SMALLEST_CHANGE * abs(before.value) else SMALL
    name = first.name if first.table == "findings" else f"{first.name}: {number.replace('_', ' ')}"
    numbers = {key: Mean(value, kind="count" if key == "texts" else before.kind) for key, value in moved.items()}
    return Row(verdict, name, numbers, first.table, first.about)


def _by_text(row: Row, number: str) -> Iterable[tuple[str, float]]:
    return zip(row.texts, row.numbers[number].by_text, strict=False)


def _matched(before: Sequence[str], after: Sequence[str]) -> dict[str, str]:
    """The name that each later subject has among the earlier ones; a subject without a partner keeps its own."""
    names = {about: about for about in after if about in before}
    free = [about for about in dict.fromkeys(before) if about not in names]
    pairs = [(-common, own, other) for own in free for other in {*after} if (common := _common(own, other)) > 0]
    for _, own, other in sorted(pairs):
        if other not in names and own not in names.values():
            names[other] = own
    return {about: names.get(about, about) for about in after}


def _common(own: str, other: str) -> int:
    """How many layers two subjects have in common whose names differ in numbers alone; 1 if they name no layers."""
    (name, first, last), (other_name, start, end) = map(_in_layers, (own, other))
    return min(last, end) - max(first, start) + 1 if name == other_name else 0


def _in_layers(about: str) -> tuple[str, int, int]:
    """The name of a subject without numbers, and its first and last layer; layer 0 if it names none."""
    found = _LAYERS.search(about)
    first, last = (0, 0) if found is None else (int(found[1]), int(found[2] or found[1]))
    return re.sub(r"\d+", "", _LAYERS.sub("", about)), first, last


def by_chance(judged: int) -> str:
    """Return how many of some numbers leave out zero by chance, at intervals of 95 %."""
    return f"{judged * 0.05:.1g}" if judged < 20 else f"{judged * 0.05:.0f}"
