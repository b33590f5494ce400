"""How the numbers of one result differ from those of another: text by text where both read the same texts.

1. Two numbers of one key are one quantity. Where both have a value for each text, the change is the mean of the
   differences over the texts that both have, with its 95 % interval; before and after are then means over these texts.
2. Without such values the interval is that of both margins together (the root of the sum of their squares).
3. A number changed if the interval of its change leaves out zero and it moved by 1 % of its value. A number without an
   interval is shown and not judged; a word changed if it is another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import hypot, isfinite
from statistics import fmean

from sinkscope.measure.margin import DIFFERENCES, Interval, difference_of, in_points
from sinkscope.results.notation import word_list
from sinkscope.results.result import Number
from sinkscope.results.tables import cell

SMALLEST_CHANGE = 0.01  # of its value that a number moves by at least before it counts as changed
EQUAL = 1e-3  # of a change, by which it may differ between texts and is the same in all
NAMED = 6  # items of a list that a comparison names


@dataclass(frozen=True)
class Change:
    """A number or a word of two results.

    Attributes:
        label: What it is.
        about: Its subject, such as one spike; empty: the whole result.
        before: In the first result; the mean over the texts that are compared. None: it is not there.
        after: In the other result.
        value: How far the number moved. None: a word, or it is in one result alone.
        lower: Lower end of the 95 % interval of the change. None: the change is not judged.
        upper: Upper end.
        texts: Number of texts whose differences these are. 0: the interval is that of both margins together.
        changed: Whether it changed. None: it is not judged.
        which: What a list has now and had not, and the other way round; or that something came or went.
        layer: Layer of the neuron that the number is about.
        neuron: The neuron.
        expert: Its expert in a mixture.
        key: Key of the number.
        share: Whether the number is a share.
        whole: Of how many things it is a share; 0 if it is of no count.
    """

    label: str
    about: str
    before: float | str | None
    after: float | str | None
    value: float | None
    lower: float | None
    upper: float | None
    texts: int
    changed: bool | None
    which: str
    layer: int | None
    neuron: int | None
    expert: int | None
    key: str
    share: bool
    whole: int

    @property
    def interval(self) -> Interval | None:
        """The 95 % interval of the change."""
        if self.value is None or self.lower is None or self.upper is None:
            return None
        return Interval(self.value, self.lower, self.upper)

    @property
    def moved(self) -> str:
        """The change in words, such as "-3.2, 95 % -6.3 to -0.0"; empty without one."""
        if self.value is None:
            return ""
        if not self.whole:
            return in_points(self.value, self.interval, self.share)
        words = f"{self.value * self.whole:+.2f} of {self.whole}"
        if self.lower is not None and self.upper is not None:
            words += f", 95 % {self.lower * self.whole:+.2f} to {self.upper * self.whole:+.2f}"
        return words

    @property
    def is_constant(self) -> bool:
        """Whether it is the same change in every text, as at a first token that sees itself alone."""
        if self.value is None or self.lower is None or self.upper is None or not self.texts:
            return False
        return self.upper - self.lower <= EQUAL * abs(self.value)

    @property
    def is_small(self) -> bool:
        """Whether the interval leaves out zero, and the number moved by less than 1 % of its value."""
        interval = self.interval
        return self.changed is False and interval is not None and not interval.low <= 0 <= interval.high

    def shown(self, value: float | str | None) -> str:
        """Return a value of the number as a reader sees it: a count, a share in per cent, or a number."""
        if isinstance(value, float) and self.whole:
            return f"{value * self.whole:.1f}"
        return cell(value, percent=self.share)

    def sentence(self) -> str:
        """Return what is before and after, and how far it moved."""
        if self.before is None or self.after is None:
            there = self.after if self.before is None else self.before
            return f"{self.which} ({self.shown(there)})"
        moved = ""
        if self.moved:
            moved = f" ({self.moved}{f'; {self.texts} texts' if self.texts else ''})"
        if self.is_constant:
            moved = f" ({replace(self, lower=None, upper=None).moved} in each of {self.texts} texts)"
        if isinstance(self.before, str) and self.before == self.after:
            return self.before
        which = f"; {self.which}" if self.which and self.value is not None else ""
        return f"{self.shown(self.before)} -> {self.shown(self.after)}{moved}{which}"


def change_of(before: Number | None, after: Number | None, *, paired: bool) -> Change:
    """Return how a number moved, and whether by more than its interval; a word changes if it is another.

    Args:
        before: The number in the first result. None: it is not there.
        after: The number in the other result. None: it is not there; one of both is.
        paired: Whether both results read the same texts.
    """
    number = after or before
    assert number is not None
    if before is None or after is None:
        moved = Moved(None if before is None else before.value, None if after is None else after.value, changed=True)
    elif isinstance(before.value, str) or isinstance(after.value, str):
        moved = Moved(before.value, after.value, changed=before.value != after.value)
    elif before.value is None or after.value is None:
        moved = Moved(before.value, after.value)
    else:
        moved = _moved(before, before.value, after, after.value, _in_both(before, after) if paired else [])
    layer, expert, neuron = number.site or (None, None, None)
    return Change(
        label=number.label,
        about=number.about,
        before=moved.before,
        after=moved.after,
        value=moved.value,
        lower=None if moved.interval is None else moved.interval.low,
        upper=None if moved.interval is None else moved.interval.high,
        texts=moved.texts,
        changed=moved.changed,
        which=_which(before, after),
        layer=layer,
        neuron=neuron,
        expert=expert,
        key=number.key,
        share=number.share,
        whole=number.whole,
    )


@dataclass(frozen=True)
class Moved:
    """The values of a number that are compared, and how far it moved; the fields are those of `Change`."""

    before: float | str | None
    after: float | str | None
    value: float | None = None
    interval: Interval | None = None
    texts: int = 0
    changed: bool | None = None


def _moved(before: Number, old: float, after: Number, new: float, names: Sequence[str]) -> Moved:
    """How far a number moved from an old value to a new one: over some texts, or over all of each result."""
    least, value, texts = SMALLEST_CHANGE * abs(old), new - old, 0
    interval = _of_texts(before, after, names)
    if interval is not None:
        old, new = (fmean(number.samples[name] for name in names) for number in (before, after))
        value, texts = interval.mean, len(names)
    elif before.margin is not None and after.margin is not None:
        margin = hypot(before.margin, after.margin)
        interval = Interval(value, value - margin, value + margin)
    changed = None
    if interval is not None:
        changed = abs(value) > least and not interval.low <= 0 <= interval.high
    return Moved(old, new, value, interval, texts, changed)


def changes_of(before: Sequence[Number], after: Sequence[Number], *, paired: bool) -> list[Change]:
    """Return the changes of all numbers that both have, and of those that came or went, in the order of `before`.

    Args:
        before: The numbers of the first result.
        after: Those of the other result.
        paired: Whether both results read the same texts.
    """
    old, new = ({number.key: number for number in numbers} for numbers in (before, after))
    changes: list[Change] = []
    for key in dict.fromkeys([*old, *new]):
        first, second = old.get(key), new.get(key)
        number = first or second
        if (first is not None and second is not None) or (number is not None and number.comes):
            changes.append(change_of(first, second, paired=paired))
    return changes


def _in_both(before: Number, after: Number) -> list[str]:
    """The texts for which both numbers have a value."""
    names: list[str] = []
    for name, value in before.samples.items():
        if name in after.samples and isfinite(value) and isfinite(after.samples[name]):
            names.append(name)
    return names


def _of_texts(before: Number, after: Number, names: Sequence[str]) -> Interval | None:
    """The interval of the mean difference over some texts."""
    old, new = ({name: number.samples[name] for name in names} for number in (before, after))
    answers = {*old.values(), *new.values()} <= {0.0, 1.0}  # right or wrong
    return difference_of(new, old, DIFFERENCES if answers else None)


def _which(before: Number | None, after: Number | None) -> str:
    """What a list has now and had not, and the other way round; or that the number came or went."""
    if before is None or after is None:
        return "came" if before is None else "went"
    parts: list[str] = []
    for words, some, others in (("new", after.items, before.items), ("gone", before.items, after.items)):
        names = [name for name in some if name not in others]
        if names and before.items and after.items:
            parts.append(f"{words}: {word_list(names, NAMED)}")
    return "; ".join(parts)


def by_chance(judged: int) -> str:
    """Return how many of some numbers leave out zero by chance, at intervals of 95 %."""
    return f"{judged * 0.05:.1g}" if judged < 20 else f"{judged * 0.05:.0f}"
