"""Rows: what a result has measured, each with its numbers and their margins; how a row is said, and rows as a table.

Whatever compares, prints, draws or exports reads rows, and knows no measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any, Literal

from sinkscope.errors import SinkscopeError
from sinkscope.results.notation import percent
from sinkscope.results.tables import Table

Kind = Literal["share", "count", "number"]
"""What a number is: a share of a whole, which is said in per cent; a count of things; or any other number."""
WORDS = ("about", "table", "name", "note")
"""The columns of a table of rows that are no numbers."""


@dataclass(frozen=True)
class Mean:
    """A number, most often a mean over texts.

    Attributes:
        value: The number.
        margin: Half of its 95 % interval over texts. None: it has none.
        by_text: The number of each text; empty: it was not kept.
        kind: What it is.
    """

    value: float
    margin: float | None = None
    by_text: tuple[float, ...] = ()
    kind: Kind = "number"

    def __str__(self) -> str:
        return format(self)

    def __format__(self, noun: str) -> str:
        """Return the number as text, with its margin where that shows.

        Args:
            noun: A noun that agrees with it, such as "head" in "{heads:head}" for "2 heads". Empty: none.
        """
        text = self.digits(self.value)
        margin = "" if self.margin is None else self.digits(self.margin)
        if margin.strip("0.%"):
            text += f" (± {margin})"
        if not noun:
            return text
        return f"{text} {noun}" + "s" * (text != "1")

    def digits(self, value: float) -> str:
        """Return a value of this kind as text; what rounds to zero has no sign."""
        if self.kind == "share":
            return percent(value)
        if self.kind == "count" or abs(value) >= 100:
            return f"{value:z,.0f}"
        return f"{value:z,.2f}"


@dataclass(frozen=True)
class Row:
    """What was measured of one thing.

    Attributes:
        table: Its table, such as "effects". The rows of "controls" are what the others are compared with.
        name: What it is about: a neuron, a component, or what was done; the same in every model.
        numbers: Its numbers, by their names.
        note: A word that is no number, such as the role of a neuron.
        about: Its subject, such as one of several spikes; empty: the whole result.
        texts: Names of the texts of `by_text`, by which two results are compared text by text; empty: their numbers.
    """

    table: str
    name: str
    numbers: dict[str, Mean] = field(default_factory=dict)
    note: str = ""
    about: str = ""
    texts: tuple[str, ...] = ()

    def get(self, number: str, default: float | None = None) -> float:
        """Return the value of a number.

        Args:
            number: Its name.
            default: The value where it was not measured. None: there is none.

        Raises:
            SinkscopeError: It was not measured, and there is no default.
        """
        if number not in self.numbers and default is not None:
            return default
        return self._measured(number).value

    def margin(self, number: str) -> float:
        """Return the margin of a number; zero if it has none.

        Raises:
            SinkscopeError: It was not measured.
        """
        return self._measured(number).margin or 0.0

    def _measured(self, number: str) -> Mean:
        """The number, or an error that names those that there are."""
        if number not in self.numbers:
            known = ", ".join(self.numbers) or "nothing"
            raise SinkscopeError(f"{number!r} was not measured of {self.name!r} ({self.table}), which has {known}")
        return self.numbers[number]

    def words(self, phrases: Sequence[str] = ()) -> str:
        """Return the numbers in words, then the note.

        Args:
            phrases: How numbers are said, such as "{heads:head} of {total}", where the noun agrees with the number; a
                phrase whose numbers were not read is left out. Empty: each number is said by its name.
        """
        said: list[str] = []
        for phrase in phrases or [f"{name.replace('_', ' ')} {{{name}}}" for name in self.numbers]:
            with suppress(KeyError):
                said.append(phrase.format_map(self.numbers))
        return ", ".join([*said, self.note] if self.note else said)


def row_of(table: str, name: str, note: str = "", **numbers: Mean | float | None) -> Row:
    """Return a row of the numbers that were read: whole numbers are counts, and None was not read."""
    means: dict[str, Mean] = {}
    for key, number in numbers.items():
        if isinstance(number, Mean):
            means[key] = number
        elif number is not None:
            means[key] = Mean(float(number), kind="count" if isinstance(number, int) else "number")
    return Row(table, name, means, note)


def of_table(rows: Iterable[Row], table: str) -> dict[str, Row]:
    """Return the rows of a table by their names."""
    return {row.name: row for row in rows if row.table == table}


def table_of(rows: Iterable[Row]) -> Table:
    """Return rows with a column for each number and each margin, as CSV and pages have them."""
    made: Table = []
    for row in rows:
        columns: dict[str, Any] = {name: getattr(row, name) for name in WORDS}
        for name, mean in row.numbers.items():
            columns[name] = mean.value
            if mean.margin is not None:
                columns[f"{name}_margin"] = mean.margin
        made.append(columns)
    return made


# --- cards ---

LONGEST = 200  # characters of a line where a reader gives no width


@dataclass(frozen=True)
class Card:
    """What a result says of one thing.

    Attributes:
        title: What it is.
        rows: Labels, each with its numbers. A row without numbers is left out by whoever makes the card.
    """

    title: str
    rows: tuple[tuple[str, str], ...]

    def text(self, width: int | None = None) -> str:
        """Return the card as lines; what does not fit goes on under its own numbers.

        Args:
            width: Characters of a line. None: 200.
        """
        width = width or LONGEST
        margin = 4 + max(map(len, dict(self.rows)), default=0)
        lines = wrap(self.title, width)
        for label, numbers in self.rows:
            start = f"  {label}".ljust(margin)
            end = max(20 + margin, width)
            lines += wrap(numbers, end, initial_indent=start, subsequent_indent=" " * margin, break_on_hyphens=False)
        return "\n".join(lines)
