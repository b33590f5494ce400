"""The sink card of a model: what a scan found, and what differs from another card."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from sinkscope.errors import SinkscopeError
from sinkscope.measure.changes import Change, changes_of
from sinkscope.results.cards import Card
from sinkscope.results.pages import render
from sinkscope.results.result import Number, Result
from sinkscope.results.tables import Grid, Table, cell, constant_last, strings

CARD = "card.json"
SAME_TEXTS = ("text", "seed", "bos")
"""Settings of two cards that read the same texts and prompts."""
RULE = (
    "A number changed if the 95 % interval of its change leaves out zero and it moved by 1 % of its value. The "
    "interval is that of the differences text by text or, of a number without values for each text, of both margins "
    "together; a number without a margin is shown and not judged."
)


@dataclass(frozen=True)
class CardPart:
    """One measurement of a scan.

    Attributes:
        name: Name of the measurement.
        command: Command that runs it alone.
        conclusion: What it found, or why there is no result.
        numbers: Its numbers and words, each with its control.
        cards: Its labels with numbers.
        measured: Whether there is a result.
        topic: What it is about, on the first screen of the card; of other parts empty.
    """

    name: str
    command: str
    conclusion: str
    numbers: tuple[Number, ...] = ()
    cards: tuple[Card, ...] = ()
    measured: bool = True
    topic: str = ""


@dataclass(frozen=True)
class CardChange:
    """A number or a word on two cards.

    Attributes:
        label: Description of the number or word.
        before: Value on the other card.
        after: Value on this card.
        change: How far the number moved, with its 95 % interval if that is known.
        which: What a list has now and had not, and the other way round.
        paired: Whether the margin is that of the differences text by text.
        margin: Margin of the change; None if unknown, or for a word.
        changed: Whether the change exceeds the margin; None if it is not judged.
        part: Name of the measurement.
        key: Key of the number in it.
    """

    label: str
    before: str
    after: str
    change: str
    which: str
    paired: bool
    margin: float | None
    changed: bool | None
    part: str
    key: str


@dataclass(frozen=True, kw_only=True)
class SinkCard(Result):
    """All findings of a scan, conclusions first.

    Attributes:
        quick: Whether the parts ran with smaller numbers.
        parts: The parts in the order of the card.
        against: Model of the other card; None if there is none.
        changes: Comparison with the other card, including what stayed the same.
    """

    kind = "sink-card"
    page = "scan"

    quick: bool
    parts: tuple[CardPart, ...]
    against: str | None = None
    changes: tuple[CardChange, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 if nothing was measured."""
        return int(not any(part.measured for part in self.parts))

    def conclusion(self) -> str:
        """Return what changed since the other card; without another card, the first part's conclusion."""
        if self.against is None:
            return self.parts[0].conclusion
        judged = [change for change in self.changes if change.changed is not None]
        changed = [change for change in judged if change.changed]
        finding = f"Compared with {self.against}, {len(changed)} of {len(judged)} judged values changed"
        for first in changed[:1]:
            moved = first.change or f"{first.before} before, {first.after} now"
            finding = f"{finding}, first {first.label} ({moved})"
        return f"{finding}."

    def details(self) -> list[str]:
        """Return what every part says."""
        lines = [f"{part.command}: {part.conclusion}" for part in self.parts]
        if self.quick:
            lines.append("With --quick, most parts rest on fewer samples.")
        return lines

    def cards(self) -> list[Card]:
        """Return the cards of the first part: the spikes."""
        return list(self.parts[0].cards)

    def first_screen(self) -> str:
        """Return a tile for each topic (number, control, conclusion) and the cards of the spikes, as escaped HTML.

        In a comparison, what changed stands first.
        """
        return render("results/pages/tiles.html", scan=self)

    def rows(self) -> Table:
        """Return one row per number and word; in a comparison, beside those of the other card."""
        if self.against is not None:
            return [asdict(change) for change in self.changes]
        rows: Table = []
        for part in self.parts:
            for number in part.numbers:
                row = {"part": part.name, **asdict(number)}
                rows.append({name: row[name] for name in row if name not in ("samples", "items")})
        return rows

    def grids(self) -> list[Grid]:
        """Return what changed, and the numbers with their controls."""
        grids: list[Grid] = []
        if self.changes:
            important = ("label", "change", "before", "after", "which", "changed")
            grids.append(Grid(constant_last(strings(self.rows())), f"Compared with {self.against}", RULE, important))
        important = ("label", "value", "control", "margin")
        rows = replace(self, against=None).rows()
        for row in rows:
            for name in important[1:]:
                if row["share"] and row[name] is not None:
                    row[name] = cell(row[name], percent=True)
        return [*grids, Grid(strings(rows), title="Numbers, each with its control", important=important)]

    def by_key(self) -> dict[tuple[str, str], Number]:
        """Return the numbers by the name of their part and their key."""
        return {(part.name, number.key): number for part in self.parts for number in part.numbers}

    def numbers_beside(self, other: SinkCard) -> tuple[list[Number], list[Number]]:
        """Return the numbers of both cards, each by its part and key."""
        sides: list[list[Number]] = []
        for card in (self, other):
            numbers: list[Number] = []
            for (part, key), number in card.by_key().items():
                numbers.append(replace(number, key=f"{part}.{key}", about=part))
            sides.append(numbers)
        return sides[0], sides[1]

    def compared(self, other: SinkCard) -> SinkCard:
        """Return this card with its changes from another card; what changed stands first.

        Raises:
            SinkscopeError: The cards have no number or fact in common, are of other texts, or only one of them was made
                with --quick.
        """
        if self.quick != other.quick:
            raise SinkscopeError(
                "one of the two cards was made with --quick and the other without: their numbers are of different "
                "settings; make both in the same way"
            )
        differing = [name for name in SAME_TEXTS if self.settings.get(name) != other.settings.get(name)]
        if differing:
            raise SinkscopeError(
                f"the two cards are of other texts ({', '.join(differing)}): make both with the same --text, --seed "
                "and --bos"
            )
        changes: dict[tuple[str, str, str], CardChange] = {}
        for moved in changes_of(*other.numbers_beside(self), paired=True):
            change = _card_change(moved)
            changes.setdefault((change.label, change.before, change.after), change)  # two parts may share it
        if not changes:
            raise SinkscopeError("the two cards have no number in common: give the card of a scan with the same parts")
        ordered = sorted(changes.values(), key=lambda change: (change.changed is not True, change.changed is None))
        return replace(self, against=other.model.name, changes=tuple(ordered))


def _card_change(change: Change) -> CardChange:
    """A change as a card has it."""
    old, new = (cell(value, percent=change.share) for value in (change.before, change.after))
    margin = None if change.interval is None else change.interval.margin
    return CardChange(
        change.label, old, new, change.moved, change.which, change.texts > 0, margin, change.changed, change.about,
        change.key.removeprefix(f"{change.about}."),
    )  # fmt: skip
