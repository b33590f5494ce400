"""Between declared tables and rows of the older form, until every measurement has declared tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sinkscope.results import row as older
from sinkscope.results.row import Mean
from sinkscope.results.table import Column, Row, Subject


@dataclass(frozen=True, kw_only=True)
class OlderRow(Row):
    """A row of the older form, as a declared one."""

    key: tuple[str, str]
    numbers: dict[str, Mean]
    remark: str

    @property
    def label(self) -> str:
        """What it is called."""
        return self.key[1]

    def values(self) -> dict[str, Mean | str]:
        """What was measured."""
        return {**self.numbers, **({"note": self.remark} if self.remark else {})}

    def column(self, key: str) -> Column:
        """Return the column of a key."""
        number = self.numbers.get(key)
        return Column(key, key.replace("_", " "), "word" if number is None else number.kind, "")


def subjects_of(rows: Iterable[older.Row]) -> list[Subject]:
    """Return rows of the older form by their subjects."""
    found: dict[str, list[older.Row]] = {}
    for row in rows:
        found.setdefault(row.about, []).append(row)
    subjects: list[Subject] = []
    for about, some in found.items():
        own = tuple(OlderRow(key=(row.table, row.name), numbers=row.numbers, remark=row.note) for row in some)
        subjects.append(Subject(about, own, about, max((row.texts for row in some), key=len)))
    return subjects


def rows_of(subjects: Iterable[Subject]) -> list[older.Row]:
    """Return declared rows in the older form, as the card of a scan has them."""
    found: list[older.Row] = []
    for subject in subjects:
        for row in subject.rows:
            numbers = {key: value for key, value in row.values().items() if isinstance(value, Mean)}
            note = ", ".join(value for value in row.values().values() if isinstance(value, str))
            found.append(older.Row(row.table, row.full_label, numbers, note, subject.name, subject.texts))
    return found
