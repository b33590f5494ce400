"""The sink card of a model: what a scan found."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sinkscope.results.result import Result
from sinkscope.results.row import Card, Row

CARD = "card.json"


@dataclass(frozen=True)
class CardPart:
    """One measurement of a scan.

    Attributes:
        name: Name of the measurement.
        command: Command that runs it alone.
        conclusion: What it found, or why there is no result.
        rows: Its rows, each with its control or beside the rows of its controls.
        cards: Its labels with numbers.
        measured: Whether there is a result.
        topic: What it is about, on the first screen of the card; of other parts empty.
    """

    name: str
    command: str
    conclusion: str
    rows: tuple[Row, ...] = ()
    cards: tuple[Card, ...] = ()
    measured: bool = True
    topic: str = ""

    @property
    def headline(self) -> Row | None:
        """The first number with a control beside it."""
        return next((row for row in self.rows if "control" in row.numbers), None)


@dataclass(frozen=True, kw_only=True)
class SinkCard(Result):
    """All findings of a scan, conclusions first.

    Attributes:
        quick: Whether the parts ran with smaller numbers.
        parts: The parts in the order of the card.
    """

    kind = "sink-card"
    columns = ("about", "name", "share", "value", "control", "note")

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
            lines.append("This was a quick scan: most parts rest on fewer samples.")
        return lines

    def cards(self) -> list[Card]:
        """Return the cards of the first part: the spikes."""
        return list(self.parts[0].cards)

    def findings(self) -> list[Row]:
        """Return the rows of all parts, each about its part."""
        rows: list[Row] = []
        for part in self.parts:
            rows += [replace(row, about=": ".join(filter(None, [part.name, row.about]))) for row in part.rows]
        return rows
