"""The sink card: what every part of a scan concluded, its numbers with their controls, and what changed since another.

Nothing here knows a measurement: which numbers and facts stand on a card, the measurements say (`registry.ScanMark`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, isfinite
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from sinkscope._plain import visible
from sinkscope.errors import SinkscopeError
from sinkscope.registry import Entry
from sinkscope.results import Result
from sinkscope.tables import Grid, cell, strings

CARD = "card.json"
LEAST = 0.01  # of its value that a number moves by at least before it counts as changed
_SHOWN = ("label", "value", "control", "margin")
_CHANGED = ("label", "before", "after", "margin", "changed")
RULE = (
    "A number changed if it moved by more than the margins of both cards together and by 1 % of its value; a number "
    "without a margin is shown and not judged."
)


@dataclass(frozen=True)
class CardPart:
    """One measurement of a scan.

    Attributes:
        name: of the measurement.
        command: that makes it alone.
        conclusion: what it found; empty where it failed.
        problem: why there is no result; None: there is one.
        seconds: it took.
        peak_memory_bytes: largest memory of the process until its end.
    """

    name: str
    command: str
    conclusion: str
    problem: str | None = None
    seconds: float | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class CardNumber:
    """A number of a part.

    Attributes:
        part: name of the measurement.
        label: what it is.
        value: the number.
        control: the same under the control.
        margin: within which it changes by chance, from the control's draws or two standard errors; None: not known.
    """

    part: str
    label: str
    value: float
    control: float | None
    margin: float | None = None


@dataclass(frozen=True)
class CardFact:
    """Something that two models have alike or not, in words."""

    part: str
    label: str
    value: str


@dataclass(frozen=True)
class CardChange:
    """A number or a fact of two cards.

    Attributes:
        part: name of the measurement.
        label: what it is.
        before: on the other card.
        after: on this one.
        margin: of the change, both cards' margins together; None: not known, or it is a fact.
        changed: whether the change exceeds the margin; None: not known.
    """

    part: str
    label: str
    before: str
    after: str
    margin: float | None
    changed: bool | None


@dataclass(frozen=True, kw_only=True)
class SinkCard(Result):
    """All that a scan found, conclusions first.

    Attributes:
        quick: whether the parts ran with smaller numbers.
        parts: in the order of the card.
        numbers: each with its control.
        facts: in words.
        against: the other card's model; None: there is none.
        changes: what is different from the other card, or the same.
    """

    kind: ClassVar[str] = "sink-card"
    page: ClassVar[str] = "scan"
    glossary: ClassVar[dict[str, str]] = {"fact": "what it is, in words", "word": "what it is in this model"}

    quick: bool
    parts: tuple[CardPart, ...]
    numbers: tuple[CardNumber, ...] = ()
    facts: tuple[CardFact, ...] = ()
    against: str | None = None
    changes: tuple[CardChange, ...] = ()

    def beside(self) -> tuple[Result, ...]:
        """The results of the parts, where the scan has just made it."""
        return vars(self).get("shown", ())

    @property
    def done(self) -> tuple[CardPart, ...]:
        """Parts with a result."""
        return tuple(part for part in self.parts if part.problem is None)

    def conclusion(self) -> str:
        """What changed since the other card; without one, the first part's conclusion."""
        if self.against is not None:
            moved = [c for c in self.changes if c.changed]
            known = [c for c in self.changes if c.changed is not None]
            names = "; ".join(f"{c.label}: {c.before} before, {c.after} now" for c in moved[:3])
            return (
                f"Compared with {self.against}, {len(moved)} of {len(known)} numbers and facts changed by more than "
                f"their margin{': ' * bool(moved)}{names}{'; and more' * (len(moved) > 3)}."
            )
        return self.done[0].conclusion if self.done else "No part could be measured."

    def details(self) -> list[str]:
        """Every part's conclusion, what failed, and what it cost."""
        told = [f"{part.command}: {part.conclusion} ({part.seconds or 0:.1f} s)" for part in self.done]
        failed = [f"{part.command} is missing: {part.problem}" for part in self.parts if part.problem]
        return [*told, *failed, self.costs()]

    def costs(self) -> str:
        """Seconds and memory, the most expensive parts first."""
        taken = sorted((p for p in self.done if p.seconds is not None), key=lambda p: -(p.seconds or 0))
        peak = max((p.peak_memory_bytes or 0 for p in self.done), default=0) / 1e9
        total, most = sum(p.seconds or 0 for p in taken), ", ".join(f"{p.command} {p.seconds:.1f} s" for p in taken[:4])
        return f"{len(self.done)} of {len(self.parts)} parts took {total:.0f} s and at most {peak:.1f} GB ({most})."

    def rows(self) -> list[dict[str, Any]]:
        """One row per number; in a comparison one per number and fact."""
        some, names = (self.changes, _CHANGED) if self.against is not None else (self.numbers, _SHOWN)
        return [{name: getattr(one, name) for name in names} for one in some]

    def grids(self) -> list[Grid]:
        """What changed, the numbers with their controls, and the facts."""
        numbers = [{name: getattr(one, name) for name in _SHOWN} for one in self.numbers]
        changes = self.rows() if self.changes else []
        parts = (
            (f"Compared with {self.against}", RULE, changes),
            ("Numbers, each with its control", "", numbers),
            ("Facts", "", [{"fact": fact.label, "word": fact.value} for fact in self.facts]),
        )
        return [Grid(*strings(rows, ()), title=title, note=note) for title, note, rows in parts if rows]

    def markdown(self) -> str:
        """The card for a model's page on the hub."""

        def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
            return [*(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)), ""]

        lines = [f"## Sink card of {_marked(self.model.name)}", "", f"**{_marked(self.conclusion())}**", ""]
        numbers = [(_marked(n.label), cell(n.value), cell(n.control), cell(n.margin)) for n in self.numbers]
        lines += table(("number", "value", "control", "margin"), numbers)
        if self.changes:
            rows = [(_marked(c.label), _marked(c.before), _marked(c.after), cell(c.changed)) for c in self.changes]
            lines += table(("compared with " + _marked(self.against or ""), "before", "now", "changed"), rows)
        lines += [f"- **{_marked(fact.label)}**: {_marked(fact.value)}" for fact in self.facts]
        lines += ["", *(f"- `{part.command}`: {_marked(part.conclusion)}" for part in self.done)]
        lines += [f"- `{p.command}` is missing: {_marked(p.problem or '')}" for p in self.parts if p.problem]
        way = "sinkscope scan MODEL" + " --quick" * self.quick
        made = f"fingerprint {self.model.fingerprint}, {self.provenance.dtype} on {self.provenance.device}"
        return "\n".join([*lines, "", f"{self.costs()} Made by `{way}` ({made}).", ""])

    def compared(self, other: SinkCard) -> SinkCard:
        """This card with what changed since another one.

        Raises:
            SinkscopeError: they have no number or fact in common, or one of them was made with --quick.
        """
        if self.quick != other.quick:
            raise SinkscopeError(
                "one of the two cards was made with --quick and the other without: their numbers are of different "
                "settings; make both in the same way"
            )
        before = {(n.part, n.label): n for n in other.numbers}
        words = {(f.part, f.label): f.value for f in other.facts}
        changes = [_moved(before[n.part, n.label], n) for n in self.numbers if (n.part, n.label) in before]
        changes += [
            CardChange(f.part, f.label, was, f.value, None, was != f.value)
            for f in self.facts
            if (was := words.get((f.part, f.label))) is not None
        ]
        if not changes:
            raise SinkscopeError("the two cards have no number in common: give the card of a scan with the same parts")
        changes.sort(key=lambda c: (c.changed is not True, c.changed is None))
        same = other.model.name == self.model.name
        name = f"{other.model.name} ({other.model.fingerprint[:8]})" if same else other.model.name
        return replace(self, against=name, changes=tuple(changes))


def _marked(words: str) -> str:
    """Words of a model in Markdown, where nothing of them is markup."""
    clean = visible(words).replace("\n", " ").replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{c}" if c in "|`*_[]\\" else c for c in clean)


def _moved(before: CardNumber, after: CardNumber) -> CardChange:
    known = before.margin is not None and after.margin is not None
    margin = hypot(before.margin or 0, after.margin or 0) if known else None
    moved = abs(after.value - before.value)
    changed = None if margin is None else moved > max(margin, LEAST * abs(before.value))
    if before.value == after.value:
        changed = False
    return CardChange(after.part, after.label, cell(before.value), cell(after.value), margin, changed)


def read_card(path: str | Path) -> SinkCard:
    """The card in a file, or in the folder of a scan.

    Raises:
        SinkscopeError: there is none.
    """
    file = Path(path) / CARD if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise SinkscopeError(f"{path} holds no card: give the card.json of a scan, or the scan's folder")
    return SinkCard.load(file)


def numbers_of(entry: Entry, result: Result) -> list[CardNumber]:
    """The numbers that a measurement puts on the card; those that this model does not have are left out."""
    found: list[CardNumber] = []
    for label, (value, *more) in (entry.scan.numbers if entry.scan else {}).items():
        control, margin = (at_path(result, path) for path in [*more, "", ""][:2])
        if (number := at_path(result, value)) is not None:
            found.append(CardNumber(entry.name, label, number, control, margin))
    return found


def facts_of(entry: Entry, result: Result) -> list[CardFact]:
    """The facts that a measurement puts on the card."""
    found = {label: _follow(result, path) for label, path in (entry.scan.facts if entry.scan else {}).items()}
    return [CardFact(entry.name, label, _worded(value)) for label, value in found.items() if value is not None]


def _worded(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(_worded, value)) if isinstance(value, tuple | list) else str(value)


def at_path(result: object, path: str) -> float | None:
    """The number at a path, the median where there are several, the distance of two paths for "a - b"; None: none.

    Args:
        result: of a measurement.
        path: as `registry.ScanMark` says.
    """
    if " - " in path:
        a, b = (at_path(result, part) for part in path.split(" - "))
        return None if a is None or b is None else abs(a - b)
    found = _follow(result, path) if path else None
    several = found if isinstance(found, tuple | list) else [found]
    numbers = [float(v) for v in several if isinstance(v, int | float) and not isinstance(v, bool) and isfinite(v)]
    return float(median(numbers)) if numbers else None


def _follow(value: Any, path: str) -> Any:
    """What stands at a path; None: nothing."""
    for i, name in enumerate(parts := path.split(".")):
        if value is None:
            return None
        if name == "*":
            inner = [_follow(item, ".".join(parts[i + 1 :])) for item in value] if parts[i + 1 :] else list(value)
            return [item for item in inner if item is not None]
        if name.lstrip("-").isdigit():
            index = int(name)
            value = value[index] if -len(value) <= index < len(value) else None
        else:
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
    return value


__all__ = ["CardChange", "CardFact", "CardNumber", "CardPart", "SinkCard", "read_card"]
