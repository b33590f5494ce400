"""LoopServe, its halves and its settings, beside other methods, on dialogues of the recall model.

    python -m experiments.loopserve.dialogues NAME [--only WORD] [--work runs] [--out figures]

NAME is one of `FIGURES`:

- `table1`: answers of one fact (the prompt's last token looks for it) and chains of eight facts (each found only when
  the one before is written), at an eighth of the context for every method, and chains at the sizes of Table 7.
  Each half alone is among the methods (Figs. 5 b and 7): -P is the sparse prompt, -D progressive decoding.
- `turns`: nine turns (Fig. 12) on one cache that grows to 2,700 tokens. A token that a method evicts in one turn is
  missing in the next, and the budget stays at 128 tokens.
- `alpha`: right answers by the share of attention that lines hold, on other dialogues.

Prompts are read along bands by the default, with smaller alphas, as printed (`LoopServe.paper()`), and along bands from
the printed sample. Controls are the whole cache, and a random part of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plotly.subplots import make_subplots

from experiments.drawn import at_place, error_bars, save
from experiments.loopserve.runs import (
    ALL,
    CHAIN,
    FIXED,
    KEPT,
    LONG,
    LONGBENCH,
    NINE,
    NINE_CHAIN,
    SWEPT_CHAIN,
    SWEPT_KEPT,
    TABLE7,
    Suite,
    answers,
    rows_of,
    specs,
)
from experiments.record import Row, earlier, record, value_of_each
from experiments.script import run
from sinkscope.bench.tasks.recall import POSITIONS
from sinkscope.results.style import COLOURS, figure_of

PRINTED, DRAWN = "as printed", "bands from the printed sample"
FEW = (0.75, 0.5)
ALPHAS = (0.3, 0.5, 0.75, 0.9, 0.955, 0.98, 0.99, 0.995)  # from 0.98 on, the paper's sweep (Figs. 5 c, 10 a)

Values = tuple[float | None, ...]
ALONE: Values = (None,)


@dataclass(frozen=True)
class Panel:
    """A panel of a figure.

    Attributes:
        title: What it shows.
        suite: What is answered.
        key: The score that is drawn.
        curves: Label, text of the method with {} for the value, and the values (`ALONE`: the text has no {}).
        by: What a method's scores are drawn by.
    """

    title: str
    suite: Suite
    key: str
    curves: tuple[tuple[str, str, Values], ...]
    by: Literal["position", "turn", "value"] = "value"

    @property
    def methods(self) -> dict[tuple[str, float | None], str]:
        """The method of each curve and value."""
        found: dict[tuple[str, float | None], str] = {}
        for label, text, values in self.curves:
            for value in values:
                found[label, value] = specs([text.format(value)])[0]
        return found


def alone(methods: dict[str, str]) -> tuple[tuple[str, str, Values], ...]:
    """Methods that no value is swept of, as curves."""
    return tuple((label, text, ALONE) for label, text in methods.items())


LESS = {f"loopserve-p, alpha={alpha}": f"loopserve-p:alpha={alpha}" for alpha in FEW}
OWN = {
    "whole cache": "full",
    "h2o": "h2o",
    "snapkv": f"snapkv:{LONGBENCH}",
    "adakv": f"adakv:{LONGBENCH}",
    "streaming": "streaming",
    "tova": "tova",
    "a-shape": "a-shape",
    "tri-shape": "tri-shape",
    "minference": "minference",
    "loopserve": "loopserve",
    "loopserve, first=0": "loopserve-0",
    "loopserve-p": "loopserve-p",
    **LESS,
    PRINTED: "loopserve:paper",
    f"{PRINTED}, -P": "loopserve-p:paper",
    f"{DRAWN}, -P": "loopserve-p:paper:variant=bands",
    "loopserve-d": "loopserve-d",
    "loopserve-d, first=0": "loopserve-d:first=0",
    "random part": "random:window=32",
}
LONGER = {
    **TABLE7,
    "loopserve-p": "loopserve-p",
    **LESS,
    PRINTED: "loopserve:paper:1024",
    f"{DRAWN}, -P": "loopserve-p:paper:variant=bands",
    "loopserve-d": "loopserve-d:1024",
    "random part": "random:1024:window=32",
}
TURNS = {
    "whole cache": "full",
    "LoopServe": f"loopserve:budget={FIXED}",
    f"LoopServe, alpha={FEW[0]}": f"loopserve:alpha={FEW[0]}:budget={FIXED}",
    PRINTED: f"loopserve:paper:budget={FIXED}",
    DRAWN: f"loopserve:paper:variant=bands:budget={FIXED}",
    "LoopServe-D": f"loopserve-d:budget={FIXED}",
    "LoopServe-D, first=0": f"loopserve-d:first=0:budget={FIXED}",
    "SnapKV": f"snapkv:{LONGBENCH}:budget={FIXED}",
    "AdaKV": f"adakv:{LONGBENCH}:budget={FIXED}",
    "MInference": "minference",
    "random part": f"random:window=32:budget={FIXED}",
}
CHAIN_TURNS = {name: text for name, text in TURNS.items() if "paper" not in text}
BY_ALPHA = (
    (PRINTED, "loopserve-p:paper:alpha={}", ALPHAS[3::2]),
    (DRAWN, "loopserve-p:paper:variant=bands:alpha={}", ALPHAS),
    ("loopserve-p", "loopserve-p:alpha={}", ALPHAS),
)


FIGURES: dict[str, tuple[Panel, ...]] = {
    "table1": (
        Panel("one fact, 12.5 %: right answers", KEPT, "score", alone(OWN), "position"),
        Panel("chain of eight, 12.5 %: before the first mistake", CHAIN, "prefix", alone(OWN), "position"),
        Panel("chain, Table 7's sizes: before the first mistake", LONG, "prefix", alone(LONGER), "position"),
    ),
    "turns": (
        Panel("one fact: right answers", NINE, "score", alone(TURNS), "turn"),
        Panel("chain of seven: before the first mistake", NINE_CHAIN, "prefix", alone(CHAIN_TURNS), "turn"),
    ),
    "alpha": (
        Panel("one fact: right answers", SWEPT_KEPT, "score", BY_ALPHA),
        Panel("chain of eight: before the first mistake", SWEPT_CHAIN, "prefix", BY_ALPHA[2:]),
    ),
}


def measured(panels: Sequence[Panel], work: Path, only: str) -> list[Row]:
    """Scores of all methods whose text holds a word."""
    wanted: dict[str, tuple[Suite, list[str]]] = {}
    for panel in panels:
        methods = wanted.setdefault(panel.suite.name, (panel.suite, []))[1]
        methods += [one for one in panel.methods.values() if only in one and one not in methods]
    rows: list[Row] = []
    for suite, methods in wanted.values():
        if not methods:
            continue
        said = answers(suite, methods, work)
        for panel in panels:
            if panel.suite != suite:
                continue
            for (label, value), method in panel.methods.items():
                if method in methods:
                    about = {"panel": panel.title, "label": label, "value": value}
                    rows += [about | row for row in rows_of(said, method, panel.by == "turn")]
    return rows


def place_of(row: Row) -> tuple[Any, ...]:
    """Panel, label, value and method of a row."""
    return row["panel"], row["label"], row["value"], row["method"]


def drawn_rows(panel: Panel, rows: Sequence[Row], label: str) -> list[Row]:
    """What a panel draws under a label: a row by position, by turn or by value."""
    found = []
    for row in rows:
        if (row["panel"], row["label"]) == (panel.title, label) and (row["at"] == ALL) == (panel.by == "value"):
            found.append(row)
    return found


def named(label: str, value: float | None) -> str:
    """A label, and the value if there is one."""
    if value is None:
        return label
    return f"{label}, {value:g}"


def figure(data: Row) -> Any:
    """A panel for each measurement: bars by position of the question, or curves over turns or values."""
    panels = FIGURES[data["settings"]["figure"]]
    rows = data["result"]["rows"]
    columns = min(len(panels), 4)
    lines = -(-len(panels) // columns)
    titles = [panel.title for panel in panels]
    fig: Any = make_subplots(lines, columns, subplot_titles=titles, horizontal_spacing=0.05, vertical_spacing=0.28)
    legends: Row = {}
    for number, panel in enumerate(panels):
        at: Row = {"row": number // columns + 1, "col": number % columns + 1}
        legend = "legend"
        if number:
            legend = f"legend{number + 1}"
        if panel.by == "value":  # each panel has curves of its own
            box = fig.get_subplot(at["row"], at["col"])
            place = {"x": box.xaxis.domain[0], "y": box.yaxis.domain[0] - 0.05}
            legends[legend] = {**place, "orientation": "v", "xanchor": "left", "yanchor": "top"}
            at["legend"] = legend
        if panel.by == "position":
            bars(fig, panel, rows, showlegend=not number, **at)
        else:
            curves(fig, panel, rows, showlegend=panel.by == "value" or not number, **at)
        fig.update_yaxes(range=[-0.03, 1.06], tickformat=".0%", row=at["row"], col=at["col"])
    fig.update_xaxes(type="category")
    size = {"width": 1750, "height": 230 + 450 * lines, "bottom": 190}
    style: Row = {"legend": -0.38, "barmode": "group", "font": {"size": 12}}
    return figure_of(fig, None, finding(panels[0], rows), **size, **style).update_layout(legends)


def bars(fig: Any, panel: Panel, rows: Sequence[Row], **at: Any) -> None:
    """A group of bars for each method, a colour for each position of the question."""
    for place, colour in zip(POSITIONS, COLOURS, strict=False):
        mine = []
        for label, _, _ in panel.curves:
            mine += [row for row in drawn_rows(panel, rows, label) if row["at"] == place]
        error = None
        if panel.key == "score":
            error = error_bars(mine, panel.key, width=2, color="#888")
        y = value_of_each(mine, panel.key)
        name = f"question {at_place(place)}"
        fig.add_bar(x=value_of_each(mine, "label"), y=y, name=name, marker_color=colour, error_y=error, **at)


def curves(fig: Any, panel: Panel, rows: Sequence[Row], **at: Any) -> None:
    """A curve for each label; those that lie on one another show their markers inside each other."""
    for number, (label, _, values) in enumerate(panel.curves):
        mine = drawn_rows(panel, rows, label)
        x = []
        for row in mine:
            here = row["value"]
            if values == ALONE:
                here = row["at"] if panel.by == "turn" else label
            x.append(str(here))
        error = None
        if panel.by == "value" and panel.key != "prefix":  # intervals are those of right answers
            error = error_bars(mine, panel.key)
        marker = {"size": 17 - 2 * (number % 6), "symbol": number % 6}
        line = {"color": COLOURS[number % len(COLOURS)], "dash": ("solid", "dash")[number % 2]}
        style = {"name": label, "mode": "lines+markers", "line": line, "marker": marker, "error_y": error}
        fig.add_scatter(x=x, y=value_of_each(mine, panel.key), **style, **at)


def finding(panel: Panel, rows: Sequence[Row]) -> str:
    """The best and the worst point of the first panel."""
    mine = [row for row in rows if row["panel"] == panel.title and row["at"] == ALL]
    mine.sort(key=lambda row: row[panel.key])
    said = []
    for row in (mine[0], mine[-1]):
        said.append(f"{row[panel.key]:.0%} ({named(row['label'], row['value'])})")
    return f"{panel.title}: from {said[0]} to {said[1]}"


def main(name: Literal[*FIGURES], *, only: str = "", work: Path = Path("runs"), out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        only: Answer only methods whose text holds this word; the others' rows stay as the figure's JSON has them.
        work: Folder of the answers.
    """
    started = time.perf_counter()
    panels = FIGURES[name]
    rows = measured(panels, work, only)
    file = f"loopserve_{name}"
    places = [(panel.title, *place, method) for panel in panels for place, method in panel.methods.items()]
    if only:
        for row in earlier(out / f"{file}.json")["rows"]:
            if place_of(row) in places and only not in row["method"]:
                rows.append(row)
    rows.sort(key=lambda row: places.index(place_of(row)))
    settings = {"figure": name, "suites": [panel.suite for panel in panels], "only": only}
    save(file, record(f"loopserve-{name}", {"rows": rows}, settings, started=started), figure, out)


if __name__ == "__main__":
    run(main)
