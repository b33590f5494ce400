"""`sinkscope scan table` joins the cards of several scans into one table."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from sinkscope.app.card import CARD, SinkCard
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.output import path_of
from sinkscope.files.plain import pathless
from sinkscope.files.provenance import UNKNOWN_MODEL, UNKNOWN_PROVENANCE
from sinkscope.files.store import SETTINGS, begun_by
from sinkscope.results.notation import count_of, percent
from sinkscope.results.result import Result
from sinkscope.results.tables import Table

NO_CARD = "it is not finished, or failed: run the same command again to see why"
ON_CARDS = {
    "place": ("find_sinks", "place"),
    "layers": ("find_sinks", "layers"),
    "neurons": ("find_sinks", "neurons"),
    "heads": ("find_sinks", "heads"),
    "loops": ("loops", "text.full.loop"),
}
"""Columns that repeat a number of the card: the part, and the number's key there."""


@dataclass(frozen=True, kw_only=True)
class ScanTable(Result):
    """The cards of several scans.

    Attributes:
        scans: A row for each, in the order of their names: `scan`, the name of its folder; the numbers of its card; and
            `problem`, why there is no card.
    """

    kind = "scan-table"
    page = "scan"
    columns = ("scan", "layers", "neurons", "heads", "loops")
    glossary: ClassVar = {
        "scan": "name of the folder",
        "place": "where the spike is that most heads read",
        "layers": "the layers in which it stands out",
        "neurons": "the smallest set of neurons found that it needs",
        "heads": "share of heads that attend to the sink",
        "loops": "share of greedy answers that loop",
        "loops_margin": "two standard errors of that",
        "problem": "why there is no card",
    }

    scans: tuple[dict[str, Any], ...]

    @property
    def exit_code(self) -> int:
        """1 if a scan has no card."""
        return int(any(row["problem"] for row in self.scans))

    def rows(self) -> Table:
        """Return one row per scan."""
        return list(self.scans)

    def conclusion(self) -> str:
        """Return how many of the models have a spike, and how many heads attend to the sink."""
        measured = [row for row in self.scans if not row["problem"]]
        having = [row for row in measured if row["place"]]
        said = f"{len(having)} of {len(measured)} models have a norm spike"
        heads = sorted(row["heads"] for row in measured if row["heads"] is not None)
        if heads:
            shares = " to ".join(dict.fromkeys([percent(heads[0]), percent(heads[-1])]))
            said += f"; {shares} of the heads attend to the sink"
        return f"{said}."

    def details(self) -> list[str]:
        """Return what has no card."""
        return [f"{row['scan']} has no card: {row['problem']}" for row in self.scans if row["problem"]]


@checks_arguments
def scan_table(folder: Path) -> ScanTable:
    """Join the cards of several scans into one table, such as those of the checkpoints of a model.

    If a scan has no card, the status is 1.

    Args:
        folder: The folder that holds the folders of the scans.

    Raises:
        SinkscopeError: There is no card, or one cannot be read.
    """
    rows: Table = []
    made = UNKNOWN_PROVENANCE
    for place in sorted(path_of(folder).glob("*/"), key=_natural):
        row: dict[str, Any] = {**dict.fromkeys(ScanTable.glossary), "scan": place.name, "problem": NO_CARD}
        if (place / CARD).is_file():
            card = SinkCard.load(place / CARD)
            made, row["problem"] = card.provenance, ""
            numbers = {(part.name, number.key): number for part in card.parts for number in part.numbers}
            for column, key in ON_CARDS.items():
                if key in numbers:
                    row[column] = numbers[key].value
            if ON_CARDS["loops"] in numbers:
                row["loops_margin"] = numbers[ON_CARDS["loops"]].margin
        elif not (place / SETTINGS).is_file() or begun_by(place) != "scan":
            continue
        rows.append(row)
    if all(row["problem"] for row in rows):
        raise SinkscopeError(f"{pathless(str(folder))} holds no scans: give the folder of their folders")
    model = replace(UNKNOWN_MODEL, name=count_of(len(rows), "model"))
    return ScanTable(model=model, settings={"folder": str(folder)}, provenance=made, scans=tuple(rows))


def _natural(path: Path) -> str:
    """Return the key that sorts step9 before step10."""
    return re.sub(r"\d+", lambda number: number[0].zfill(16), path.name)
