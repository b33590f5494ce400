"""`sinkscope scan table` joins the cards of several scans into one table."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from sinkscope.app.card import CARD, SinkCard, read_card
from sinkscope.errors import SinkscopeError
from sinkscope.files.output import PathName, path_of
from sinkscope.files.plain import pathless
from sinkscope.files.provenance import UNKNOWN_MODEL, UNKNOWN_PROVENANCE
from sinkscope.results.notation import count_of
from sinkscope.results.options import Option, command
from sinkscope.results.result import Result
from sinkscope.results.tables import Table
from sinkscope.sinks.find.result import NOWHERE

NO_CARD = "it is not finished, or failed: run the same command again to see why"
ON_CARDS = {
    "sink": ("find_sinks", "sink"),
    "sink_layer": ("find_sinks", "sink_layer"),
    "neurons": ("find_sinks", "neurons"),
    "heads": ("find_sinks", "heads"),
    "loops": ("loops", "text.full.loop"),
}
"""Columns that repeat a number of the card: the part, and the number's key there."""


@dataclass(frozen=True, kw_only=True)
class ScanTable(Result):
    """The cards of several scans.

    Attributes:
        scans: A row for each, in the order of their names: `scan`, the name of its folder; the numbers of its card;
            and `problem`, why there is no card.
    """

    kind = "scan-table"
    page = "scan"
    drawing = "sinkscope.app.scan_table:draw"
    columns = ("scan", "sink_layer", "neurons", "heads", "loops")
    glossary: ClassVar = {
        "scan": "name of the folder",
        "sink": "where the attention sink is",
        "sink_layer": "the layer that adds most to the norm of the spike",
        "neurons": "the smallest set of neurons found whose ablation removes the spike",
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
        """One row per scan."""
        return list(self.scans)

    def conclusion(self) -> str:
        """How many of the models have an attention sink."""
        measured, having = 0, 0
        for row in self.scans:
            measured += not row["problem"]
            having += row["sink"] not in (None, NOWHERE)
        return f"{having} of {measured} models have an attention sink."

    def details(self) -> list[str]:
        """What has no card."""
        return [f"{row['scan']} has no card: {row['problem']}" for row in self.scans if row["problem"]]


def draw(result: ScanTable) -> Any:
    """Draw the share of heads that attend to the sink; 0: there is no sink.

    Args:
        result: The table.
    """
    import plotly.express as px

    from sinkscope.results.style import figure_of  # with plotly, which a printed table does not need

    frame = result.to_frame().fillna({"heads": 0.0})
    frame["scan"] = frame["scan"].map(html.escape)
    labels = {"heads": "share of heads that attend to the sink"}
    fig = px.scatter(frame, x="scan", y="heads", labels=labels, render_mode="svg")
    return figure_of(fig, result, width=1200, height=480)


@command(
    words="scan table",
    group="Look",
    help="Join the cards of several scans into one table.",
)
def scan_table(folder: Annotated[Path, Option(argument=True, metavar="DIR")]) -> ScanTable:
    """Join the cards of several scans into one table, such as those of the checkpoints of a model.

    If a scan has no card, the status is 1.

    Args:
        folder: The folder that was given to `sinkscope scan MODEL MODEL ... --out`.

    Raises:
        SinkscopeError: There is no card.

    Example:
        sinkscope scan table small --html small.html --csv small.csv
    """
    scans: dict[str, str] = {}
    for place in path_of(folder).glob("*"):
        if (place / CARD).is_file():
            scans[place.name] = ""
        elif place.is_dir():
            scans[place.name] = NO_CARD
    if "" not in scans.values():
        raise SinkscopeError(f"{pathless(str(folder))} holds no scans: give what --out of scan was given")
    return join_cards(folder, scans)


def join_cards(folder: PathName, scans: Mapping[str, str]) -> ScanTable:
    """The table of scans.

    Args:
        folder: What holds their folders.
        scans: The name of each folder, with the reason if its card does not count or is not there.

    Raises:
        SinkscopeError: A card cannot be read.
    """
    rows: Table = []
    made = UNKNOWN_PROVENANCE
    for name in sorted(scans, key=_natural):
        card: SinkCard | None = None
        if not scans[name]:
            card = read_card(Path(folder) / name)
            made = card.provenance
        rows.append(_row(name, card, scans[name]))
    model = replace(UNKNOWN_MODEL, name=count_of(len(rows), "model"))
    return ScanTable(model=model, settings={"folder": str(folder)}, provenance=made, scans=tuple(rows))


def _natural(name: str) -> str:
    """A name by which step9 stands before step10."""
    return re.sub(r"\d+", lambda number: number[0].zfill(16), name)


def _row(name: str, card: SinkCard | None, problem: str) -> dict[str, Any]:
    """The row of a scan: the numbers of its card."""
    row: dict[str, Any] = {"scan": name, **dict.fromkeys(ON_CARDS), "loops_margin": None}
    numbers = {}
    for part in () if card is None else card.parts:
        for number in part.numbers:
            numbers[part.name, number.key] = number
    for column, key in ON_CARDS.items():
        if key in numbers:
            row[column] = numbers[key].value
            if f"{column}_margin" in row:
                row[f"{column}_margin"] = numbers[key].margin
    return row | {"problem": problem}
