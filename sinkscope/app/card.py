"""The sink card of a model: what a scan found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from sinkscope.results.cards import Card
from sinkscope.results.pages import render
from sinkscope.results.result import Number, Result
from sinkscope.results.tables import Grid, Table, cell, strings

CARD = "card.json"


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


@dataclass(frozen=True, kw_only=True)
class SinkCard(Result):
    """All findings of a scan, conclusions first.

    Attributes:
        quick: Whether the parts ran with smaller numbers.
        parts: The parts in the order of the card.
    """

    kind = "sink-card"
    page = "scan"

    quick: bool
    parts: tuple[CardPart, ...]

    @property
    def exit_code(self) -> int:
        """1 if nothing was measured."""
        return int(not any(part.measured for part in self.parts))

    def conclusion(self) -> str:
        """Return the first part's conclusion."""
        return self.parts[0].conclusion

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
        """Return a tile for each topic (number, control, conclusion) and the cards of the spikes, as escaped HTML."""
        return render("results/pages/tiles.html", scan=self)

    def rows(self) -> Table:
        """Return one row per number and word."""
        rows: Table = []
        for part in self.parts:
            for number in part.numbers:
                row = {"part": part.name, **asdict(number)}
                rows.append({name: row[name] for name in row if name not in ("samples", "items")})
        return rows

    def grids(self) -> list[Grid]:
        """Return the numbers with their controls."""
        important = ("label", "value", "control", "margin")
        rows = self.rows()
        for row in rows:
            for name in important[1:]:
                if row["share"] and row[name] is not None:
                    row[name] = cell(row[name], percent=True)
        return [Grid(strings(rows), title="Numbers, each with its control", important=important)]

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
