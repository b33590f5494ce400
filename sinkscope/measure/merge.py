"""Rows of two results merged by key, with how far each number moved: text by text where both read the same texts.

1. Rows of one subject, table and name are one row. Two subjects are one if their names are the same, or differ in
   numbers alone; if they name layers, these overlap, and those with most common layers are one.
2. Where both have a number for each text, the change is the mean of the differences over the texts that both have, with
   its margin; before and after are then means over these texts. Else the margin is that of both together (the root of
   the sum of their squares).
3. A number changed if it moved by more than its margin, and by 1 % of its value. A number without a margin is not
   judged: it is shown if it moved at all. A word changed if it is another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import hypot

import numpy as np

from sinkscope.measure.margin import DIFFERENCES, margin_of
from sinkscope.results.row import Mean, Row

SMALLEST_CHANGE = 0.01  # of its value that a number moves by at least before it counts as changed
COMES = 0.05  # share of a whole, under which the coming or going of a row is left to the search that found it
CHANGED, CAME, WENT, UNJUDGED, SAME = "changed", "came", "went", "not judged", "no change"
VERDICTS = (CHANGED, CAME, WENT, UNJUDGED, SAME)
"""The tables of a comparison, in the order in which they are read."""
_LAYERS = re.compile(r"layers? (\d+)(?:-(\d+))?$")


def merge(before: Sequence[Row], after: Sequence[Row]) -> list[Row]:
    """Return a row for each number and word that both have, and for each row and subject that came or went.

    The table of a row is its verdict, and the note of a number the table that it is from. The numbers are before,
    after, change with its margin, and texts (those that are compared).
    """
    names = _matched([row.about for row in before], [row.about for row in after])
    old = {(row.about, row.table, row.name): row for row in before}
    new = {(names[row.about], row.table, row.name): row for row in after}
    subjects = {about for about, _, _ in old}
    later = {about for about, _, _ in new}
    rows = [Row(WENT, about) for about in sorted(subjects - later)]
    rows += [Row(CAME, about) for about in sorted(later - subjects)]
    for key in dict.fromkeys([*old, *new]):
        first = old.get(key)
        second = new.get(key)
        if first is not None and second is not None:
            rows += _word(first, second)
            both = [number for number in first.numbers if number in second.numbers and number != "control"]
            rows += [_number(first, second, number) for number in both]
        elif key[0] in subjects & later:
            rows += _alone(key[0], first, WENT) + _alone(key[0], second, CAME)
    return sorted(rows, key=lambda row: VERDICTS.index(row.table))


def _alone(about: str, row: Row | None, verdict: str) -> list[Row]:
    """What is said of a row that only one result has; nothing of a small share."""
    if row is None or ("share" in row.numbers and abs(row.get("share")) < COMES):
        return []
    return [Row(verdict, row.name, {}, row.words() or row.table, about)]


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
    old = dict(zip(first.texts or range(len(before.by_text)), before.by_text, strict=False))
    new = dict(zip(second.texts or range(len(after.by_text)), after.by_text, strict=False))
    pairs = np.array([(old[text], new[text]) for text in old if text in new]).reshape(-1, 2)
    pairs = pairs[np.isfinite(pairs).all(1)]
    scores = before.kind == "share" and {*pairs.flat} <= {0.0, 1.0}  # right or wrong
    margin = margin_of(pairs[:, 1] - pairs[:, 0], DIFFERENCES if scores else None)
    start = before.value
    end = after.value
    texts = 0
    if margin is not None:
        (start, end), texts = pairs.mean(0).tolist(), len(pairs)
    elif before.margin is not None and after.margin is not None:
        margin = hypot(before.margin, after.margin)
    change = Mean(end - start, margin, kind=before.kind)
    verdict = UNJUDGED if change.value else SAME
    if margin is not None:
        moved = abs(change.value) > max(margin, SMALLEST_CHANGE * abs(before.value))
        verdict = CHANGED if moved else SAME
    name = first.name if first.table == "findings" else f"{first.name}: {number.replace('_', ' ')}"
    numbers = {"before": Mean(start, kind=before.kind), "after": Mean(end, kind=before.kind), "change": change}
    numbers["texts"] = Mean(texts, kind="count")
    return Row(verdict, name, numbers, first.table, first.about)


def _matched(before: Sequence[str], after: Sequence[str]) -> dict[str, str]:
    """The name that each later subject has among the earlier ones; a subject without a partner keeps its own."""
    names = {about: about for about in after}
    free = {about for about in before if about not in names}
    pairs = [(-_common(own, other), own, other) for own in free for other in names if other not in before]
    for common, own, other in sorted(pairs):
        if common and own in free and names[other] == other:
            free.remove(own)
            names[other] = own
    return names


def _common(own: str, other: str) -> int:
    """How many layers two subjects have in common whose names differ in numbers alone; 1 if they name no layers."""
    name, layers = _in_layers(own)
    other_name, other_layers = _in_layers(other)
    return len({*layers} & {*other_layers}) if name == other_name else 0


def _in_layers(about: str) -> tuple[str, range]:
    """The name of a subject without numbers, and its layers; layer 0 if it names none."""
    found = _LAYERS.search(about)
    layers = range(1) if found is None else range(int(found[1]), int(found[2] or found[1]) + 1)
    return re.sub(r"\d+", "", _LAYERS.sub("", about)), layers
