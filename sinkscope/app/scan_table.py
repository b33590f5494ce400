"""`sinkscope scan table` joins cards into one table; over checkpoints of a model it shows when the sink emerges."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from sinkscope.app.card import CARD, SinkCard, read_card
from sinkscope.errors import SinkscopeError
from sinkscope.files.output import PathName, path_of
from sinkscope.files.plain import pathless
from sinkscope.files.provenance import UNKNOWN_MODEL, UNKNOWN_PROVENANCE
from sinkscope.measure.margin import margin_of
from sinkscope.results.notation import count_of, word_form
from sinkscope.results.options import Option, command
from sinkscope.results.result import Result
from sinkscope.results.tables import cell
from sinkscope.sinks.find.result import NOWHERE, FindSinks

NO_CARD = "it is not finished, or failed: run the same command again to see why"
ON_CARDS = {
    "sink": ("find_sinks", "sink"),
    "sink_layer": ("find_sinks", "sink_layer"),
    "neurons": ("find_sinks", "neurons"),
    "spike_lost": ("find_sinks", "spike.neurons"),
    "spike_ratio": ("find_sinks", "ratio"),
    "heads": ("find_sinks", "heads"),
    "copies": ("repeat", "norm.tokens"),
    "loops": ("loops", "text.full.loop"),
}
"""Columns that repeat a number of the card, with its margin: the part, and the number's key there."""


@dataclass(frozen=True)
class ScanRow:
    """A scan in the table. What was not measured is None.

    Attributes:
        scan: Name of its folder.
        shape: Family, number of layers and width of the model.
        step: The last number in the name of the folder, as in checkpoint-500.
        sink: Where the attention sink is.
        sink_layer: The layer that adds most to the norm of the spike.
        neurons: The smallest set of neurons found whose ablation removes the spike.
        share: Share of the MLP's output at the spike that the first causal neuron writes.
        spike_lost: Share of the spike that is lost without these neurons, along its direction.
        spike_lost_margin: Two standard errors over texts, as for every margin.
        spike_ratio: Norm of the spike over the typical norm.
        heads: Share of heads that attend to the sink.
        sink_rate: Share of heads whose mean attention to position 0 exceeds 0.3 (Gu et al. 2024).
        repeats: Repetitions after which a repeated token becomes a sink, median over tokens.
        copies: Norm after copies of a token, as `repeat` measures it.
        loops: Share of greedy answers that loop.
        quick: Whether it was made with --quick, from fewer samples.
        problem: Why there is no card.
    """

    scan: str
    shape: str = ""
    step: int | None = None
    sink: str | None = None
    sink_layer: str | None = None
    neurons: str | None = None
    share: float | None = None
    spike_lost: float | None = None
    spike_lost_margin: float | None = None
    spike_ratio: float | None = None
    spike_ratio_margin: float | None = None
    heads: float | None = None
    heads_margin: float | None = None
    sink_rate: float | None = None
    repeats: float | None = None
    repeats_margin: float | None = None
    copies: float | None = None
    copies_margin: float | None = None
    loops: float | None = None
    loops_margin: float | None = None
    quick: bool | None = None
    problem: str | None = None

    @property
    def stem(self) -> str:
        """Name of the folder without its last number and what stands around it."""
        return re.sub(r"\W?\d+(?=\D*$)", "", self.scan)


@dataclass(frozen=True, kw_only=True)
class ScanTable(Result):
    """The cards of several scans.

    Attributes:
        scans: A row for each; checkpoints of a model in the order of their steps.
    """

    kind = "scan-table"
    page = "scan"
    drawing = "sinkscope.app.scan_table:draw"
    table_of = "scans"
    columns = ("scan", "sink_layer", "neurons", "heads", "sink_rate", "repeats", "loops")

    scans: tuple[ScanRow, ...]

    @property
    def exit_code(self) -> int:
        """1 if a scan has no card."""
        return int(any(row.problem for row in self.scans))

    @property
    def having_sink(self) -> list[ScanRow]:
        """The scans of models with an attention sink."""
        return [row for row in self.scans if row.sink not in (None, NOWHERE)]

    def series(self) -> list[list[ScanRow]]:
        """Checkpoints of one model: scans whose names differ in the last number alone, of models of one shape."""
        series: dict[tuple[str, str], list[ScanRow]] = {}
        for row in self.scans:
            if row.step is not None and not row.problem:
                series.setdefault((row.stem, row.shape), []).append(row)
        return [rows for rows in series.values() if len(rows) > 1]

    def conclusion(self) -> str:
        """When the sink emerges, over checkpoints; else how many of the models have one."""
        for rows in self.series():
            return self._emergence(rows)
        measured = [row for row in self.scans if not row.problem]
        have = word_form(len(measured), "has", "have")
        return f"{len(self.having_sink)} of {count_of(len(measured), 'model')} {have} an attention sink."

    def details(self) -> list[str]:
        """The other series of checkpoints, and what has no card."""
        lines = [self._emergence(rows) for rows in self.series()[1:]]
        return lines + [f"{row.scan} has no card: {row.problem}" for row in self.scans if row.problem]

    def _emergence(self, rows: Sequence[ScanRow]) -> str:
        """A sentence on the first checkpoint from which on all have an attention sink."""
        since = len(rows)
        while since and rows[since - 1] in self.having_sink:
            since -= 1
        if since == len(rows):
            return f"The last checkpoint, {rows[-1].scan}, has no attention sink."
        before = "it is the first checkpoint"
        if since:
            before = f"{rows[since - 1].scan} has none"
        share = cell(rows[since].heads)
        return f"The attention sink is there from {rows[since].scan} on, where {share} of heads attend to it; {before}."


def draw(result: ScanTable) -> Any:
    """Draw the share of heads that attend to the sink, over checkpoints, or else over models; 0: there is no sink.

    Args:
        result: The table.
    """
    import plotly.express as px

    from sinkscope.results.style import figure_of  # with plotly, which a printed table does not need

    rows = [row for series in result.series() for row in series] or result.scans
    data = {
        "model": [html.escape(row.stem) for row in rows],
        "scan": [html.escape(row.scan) for row in rows],
        "checkpoint": [row.step for row in rows],
        "share of heads that attend to the sink": [row.heads or 0.0 for row in rows],
        "margin": [row.heads_margin or 0.0 for row in rows],
    }
    axes: dict[str, Any] = {"y": "share of heads that attend to the sink", "error_y": "margin"}
    if result.series():
        fig = px.line(data, x="checkpoint", color="model", hover_name="scan", markers=True, render_mode="svg", **axes)
    else:
        fig = px.scatter(data, x="scan", render_mode="svg", **axes)
    return figure_of(fig, result, width=1200, height=480)


@command(
    words="scan table",
    group="Look",
    help="Join the cards of several scans into one table.",
)
def scan_table(folder: Annotated[Path, Option(argument=True, metavar="DIR")]) -> ScanTable:
    """Join the cards of several scans into one table; over checkpoints of a model, say and draw when the sink emerges.

    Folders are checkpoints of one model if their names differ in the last number alone, and the models have one shape.
    If a scan has no card, the status is 1.

    Args:
        folder: The folder that was given to `sinkscope scan MODEL MODEL ... --out`.

    Raises:
        SinkscopeError: There is no card.

    Example:
        sinkscope scan table small --html small.html --csv small.csv
    """
    files = sorted(path_of(folder).glob(f"*/{CARD}"))
    if not files:
        raise SinkscopeError(f"{pathless(str(folder))} holds no scans: give what --out of scan was given")
    scans: dict[str, str] = {}
    for place in files[0].parents[1].iterdir():
        if place.is_dir():
            scans[place.name] = NO_CARD
    for file in files:
        scans[file.parent.name] = ""
    return join_cards(folder, scans)


def join_cards(folder: PathName, scans: Mapping[str, str]) -> ScanTable:
    """The table of scans.

    Args:
        folder: What holds their folders.
        scans: The name of each folder, with the reason if its card does not count or is not there.

    Raises:
        SinkscopeError: A card cannot be read.
    """
    rows: list[ScanRow] = []
    made = UNKNOWN_PROVENANCE
    for name, problem in scans.items():
        if problem:
            rows.append(ScanRow(name, problem=problem))
        else:
            card = read_card(Path(folder) / name)
            rows.append(_row(Path(folder) / name, card))
            made = card.provenance
    rows.sort(key=lambda row: (row.stem, row.step or 0, row.scan))
    model = replace(UNKNOWN_MODEL, name=count_of(len(rows), "model"))
    return ScanTable(model=model, settings={"folder": str(folder)}, provenance=made, scans=tuple(rows))


def _row(folder: Path, card: SinkCard) -> ScanRow:
    """The row of a finished scan: the numbers of its card, and of what `find_sinks` measured beside."""
    numbers = {(part.name, number.key): number for part in card.parts for number in part.numbers}
    values: dict[str, Any] = {}
    for column, key in ON_CARDS.items():
        if key in numbers:
            values[column] = numbers[key].value
            if numbers[key].margin is not None:
                values[f"{column}_margin"] = numbers[key].margin
    with suppress(SinkscopeError):  # the card alone was copied here
        result = FindSinks.load(folder / "find-sinks.json")
        for neuron in result.causal[:1]:
            values["share"] = neuron.share
        if result.sink_rate is not None:
            values["sink_rate"] = result.sink_rate.value
        needed = [token.repeats for token in result.repeats.tokens if (token.repeats or 1) > 1]
        values["repeats"] = result.repeats.median
        values["repeats_margin"] = margin_of(np.array(needed, dtype=float), np.median)
    for step in re.findall(r"(\d{1,15})\D*$", folder.name):
        values["step"] = int(step)
    model = card.model
    return ScanRow(folder.name, f"{model.family} {model.n_layers} x {model.d_model}", quick=card.quick, **values)
