"""What became of each number, word and row of one result in another: the merging and judging of `compare`.

Merge: rows of one subject, table and key are one row. Two subjects are one if their keys are equal, or share most:
spikes at one place, layers.

Judge: a number changed if it moved by more than the margin of its change, and by 1 % of its value. The change is the
mean of the differences over the texts that both have; without values for each text, the margin is that of both
together (the root of the sum of their squares). A number without a margin is not judged. A word changed if it is
another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import hypot
from typing import Any

import numpy as np
from jaxtyping import Float

from sinkscope.measure.margin import DIFFERENCES, margin_of
from sinkscope.results.mean import Mean
from sinkscope.results.table import SIGNED, Cell, Column, Kind, Row, Subject, detail, optional, whole

SMALLEST_CHANGE = 0.01  # of its value that a number moves by at least before it counts as changed
COMES = 0.05  # share of a whole, under which the coming or going of a row is left to the search that found it


class Verdict(StrEnum):
    """What became of a number, a word or a row, in the order in which it is read."""

    CHANGED = "changed"
    CAME = "came"
    WENT = "went"
    UNJUDGED = "not judged"
    SAME = "no change"


@dataclass(frozen=True)
class Place:
    """Where something stands in both results.

    Attributes:
        about: The name of the subject.
        row: What the row is called.
        column: What the column is called; empty: the whole row.
    """

    about: str
    row: str
    column: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, [self.row, self.column]))


@dataclass(frozen=True, kw_only=True)
class Change(Row, table="changes", title="what changed"):
    """What became of a number, a word or a row.

    Attributes:
        kind: What the number is.
    """

    key: Place
    verdict: Verdict
    kind: Kind = "word"

    before: Mean | None = optional("before", "number", "The number of the first result.")
    after: Mean | None = optional("after", "number", "The number of the other result.")
    change: Mean | None = optional("change", "number", "The mean difference over the texts that both have.")
    texts: Mean | None = detail("texts", "count", "Texts over which the difference is taken.")
    words: str | None = optional("in words", "word", "What a word was, and is.")

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        return self.verdict

    @property
    def in_words(self) -> str:
        """What became of something that is no number: "went: share 20%"."""
        if self.verdict is Verdict.CHANGED and self.words:
            return self.words
        return f"{self.verdict}: {self.words}" if self.words else str(self.verdict)

    @property
    def margin(self) -> float | None:
        """The margin of the change; None: it is not judged."""
        return None if self.change is None else self.change.margin

    def cell(self, column: Column) -> Cell:
        """Return a number with the digits of its own kind, and a change with its sign."""
        if column.key in ("texts", "words"):
            return super().cell(column)
        if column.key != "change":
            return replace(column, kind=self.kind).cell(getattr(self, column.key))
        kind: Kind = "points" if self.kind in ("share", "fine_share") else self.kind
        found = replace(column, kind=kind).cell(self.change)
        if kind in SIGNED or self.change is None or self.change.value <= 0:
            return found
        return found._replace(value=f"+{found.value}")


@dataclass(frozen=True, kw_only=True)
class InWords(Change, table="words", title="what changed in words", form="title"):
    """What became of a word or a whole row, which stands in words above the table."""


# --- merging ---


def merge(before: Sequence[Subject], after: Sequence[Subject]) -> list[Change]:
    """Return what became of each number and word that both have, and of each row and subject that came or went."""
    pairs = partners(before, after)
    went = [
        Change(key=Place("", subject.name), verdict=Verdict.WENT) for subject in before if subject.name not in pairs
    ]
    known = {other.name for other in pairs.values()}
    came = [Change(key=Place("", other.name), verdict=Verdict.CAME) for other in after if other.name not in known]
    changes = [*went, *came]
    for subject in before:
        if subject.name in pairs:
            changes += of_subject(subject, pairs[subject.name])
    order = [*Verdict]
    return sorted(changes, key=lambda row: order.index(row.verdict))


def partners(before: Sequence[Subject], after: Sequence[Subject]) -> dict[str, Subject]:
    """Return the later subject of each earlier one that has a partner, by the earlier one's name."""
    pairs: list[tuple[float, str, Subject]] = []
    for subject in before:
        for other in after:
            common = common_of(subject.key, other.key)
            if common:
                pairs.append((-common, subject.name, other))
    found: dict[str, Subject] = {}
    for _, name, other in sorted(pairs, key=lambda pair: pair[:2]):  # those that share most first
        if name not in found and other not in found.values():
            found[name] = other
    return found


def common_of(first: Any, other: Any) -> float:
    """Return how much the keys of two subjects share; equal keys share everything."""
    if first == other:
        return math.inf
    return first.shared(other) if type(first) is type(other) and hasattr(first, "shared") else 0


def of_subject(first: Subject, other: Subject) -> list[Change]:
    """Return what became of a subject, and of its rows."""
    changes: list[Change] = []
    if other.key != first.key:
        words = f"{first.name} -> {other.name}"
        changes.append(Change(key=Place(first.name, "where it is"), verdict=Verdict.CHANGED, words=words))
    old = {(row.table, row.key): row for row in first.rows}
    new = {(row.table, row.key): row for row in other.rows}
    for key in dict.fromkeys([*old, *new]):
        if key in old and key in new:
            texts = first.texts, other.texts
            changes += of_row(first.name, old[key], new[key], texts)
        else:
            row = old.get(key) or new[key]
            if row.is_control:  # what it is the control of is compared
                continue
            share = row.values().get("share")
            if not isinstance(share, Mean) or abs(share.value) >= COMES:
                verdict = Verdict.WENT if key in old else Verdict.CAME
                numbers = ", ".join(f"{row.column(name).name} {row.text(name)}" for name in row.values())
                changes.append(
                    Change(key=Place(first.name, row.full_label), verdict=verdict, words=numbers or row.table)
                )
    return changes


def of_row(about: str, first: Row, second: Row, texts: tuple[Sequence[str], Sequence[str]]) -> list[Change]:
    """Return what became of the words and numbers of a row that both have."""
    changes: list[Change] = []
    later = second.values()
    for name, before in first.values().items():
        after = later.get(name)
        column = first.column(name)
        key = Place(about, first.full_label, column.name)
        if isinstance(before, str):
            verdict = Verdict.SAME if after == before else Verdict.CHANGED
            changes.append(Change(key=key, verdict=verdict, words=f"{before} -> {after or 'none'}"))
        elif isinstance(after, Mean) and name != "control":
            changes.append(change_of(key, column.kind, before, after, texts))
    return changes


def change_of(key: Place, kind: Kind, before: Mean, after: Mean, texts: tuple[Sequence[str], Sequence[str]]) -> Change:
    """Return how far a number moved, text by text where both have one of each, and the verdict."""
    pairs = pairs_of(before, after, texts)
    are_scores = kind == "share" and {*pairs.flat} <= {0.0, 1.0}  # right or wrong
    margin = margin_of(pairs[:, 1] - pairs[:, 0], DIFFERENCES if are_scores else None)
    start, end = before.value, after.value
    count = 0
    if margin is not None:
        start, end = pairs.mean(0).tolist()
        count = len(pairs)
    elif before.margin is not None and after.margin is not None:
        margin = hypot(before.margin, after.margin)
    verdict = Verdict.UNJUDGED if end != start else Verdict.SAME
    if margin is not None:
        is_far = abs(end - start) > max(margin, SMALLEST_CHANGE * abs(before.value))
        verdict = Verdict.CHANGED if is_far else Verdict.SAME
    change = Mean(end - start, margin)
    return Change(
        key=key, verdict=verdict, kind=kind, before=Mean(start), after=Mean(end), change=change, texts=whole(count)
    )


def pairs_of(before: Mean, after: Mean, texts: tuple[Sequence[str], Sequence[str]]) -> Float[np.ndarray, "text 2"]:
    """Return the finite numbers of the texts that both have; of texts without names, in their order."""
    old = dict(zip(texts[0] or range(len(before.by_text)), before.by_text, strict=False))
    new = dict(zip(texts[1] or range(len(after.by_text)), after.by_text, strict=False))
    pairs = np.array([(old[text], new[text]) for text in old if text in new]).reshape(-1, 2)
    return pairs[np.isfinite(pairs).all(1)]


def without_texts(subjects: Sequence[Subject]) -> list[Subject]:
    """Return subjects whose numbers hold nothing of single texts."""
    changed: list[Subject] = []
    for subject in subjects:
        rows: list[Row] = []
        for row in subject.rows:
            numbers: dict[str, Mean] = {}
            for name, value in row.values().items():
                if isinstance(value, Mean):
                    numbers[name] = replace(value, by_text=())
            rows.append(replace(row, **numbers))
        changed.append(replace(subject, rows=tuple(rows), texts=()))
    return changed
