"""LoopServe and its halves, beside other methods, on dialogues of the recall model.

    python -m experiments.loopserve.dialogues NAME [--only WORD] [--work runs] [--out figures]

NAME is one of `FIGURES`:

- `table1`: answers of one fact (the prompt's last token looks for it) and chains of eight facts (each found only when
  the one before is written), at an eighth of the context for every method, and chains at the sizes of Table 7.
  Each half alone is among the methods (Figs. 5 b and 7): -P is the sparse prompt, -D progressive decoding.
- `turns`: nine turns (Fig. 12) on one cache that grows to 2,700 tokens. A token that a method evicts in one turn is
  missing in the next, and the budget stays at 128 tokens.

Prompts are read along bands by the default, with smaller alphas, as printed (`LoopServe.paper()`), and along bands from
the printed sample. Controls are the whole cache, and a random part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from plotly.subplots import make_subplots

from experiments.drawn import PLACES, draw, error_bars
from experiments.loopserve.runs import (
    ALL,
    CHAIN,
    FIXED,
    KEPT,
    LONG,
    LONGBENCH,
    NINE,
    NINE_CHAIN,
    TABLE7,
    Suite,
    answers,
    rows_of,
    specs,
)
from experiments.record import Row, earlier, value_of_each, write_record
from experiments.script import run
from sinkscope.bench.tasks.recall import POSITIONS
from sinkscope.results.style import COLOURS, figure_of

PRINTED, DRAWN = "as printed", "bands from the printed sample"
FEW = (0.75, 0.5)


@dataclass(frozen=True)
class Panel:
    """A panel of a figure.

    Attributes:
        title: What it shows.
        suite: What is answered.
        key: The score that is drawn.
        methods: The methods under their labels.
        by_turn: Whether scores are drawn by turn, and not by position of the question.
    """

    title: str
    suite: Suite
    key: str
    methods: dict[str, str]
    by_turn: bool = False

    @property
    def specs(self) -> dict[str, str]:
        """The methods as their records are kept, under their labels."""
        return dict(zip(self.methods, specs(list(self.methods.values())), strict=True))


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
FIGURES: dict[str, tuple[Panel, ...]] = {
    "table1": (
        Panel("one fact, 12.5 %: right answers", KEPT, "score", OWN),
        Panel("chain of eight, 12.5 %: before the first mistake", CHAIN, "prefix", OWN),
        Panel("chain, Table 7's sizes: before the first mistake", LONG, "prefix", LONGER),
    ),
    "turns": (
        Panel("one fact: right answers", NINE, "score", TURNS, by_turn=True),
        Panel("chain of seven: before the first mistake", NINE_CHAIN, "prefix", CHAIN_TURNS, by_turn=True),
    ),
}


def measured(panels: Sequence[Panel], work: Path, only: str) -> list[Row]:
    """Scores of all methods whose text holds a word."""
    rows: list[Row] = []
    for panel in panels:
        methods = {label: method for label, method in panel.specs.items() if only in method}
        if methods:
            said = answers(panel.suite, list(methods.values()), work)
            for label, method in methods.items():
                about = {"panel": panel.title, "label": label}
                rows += [about | row for row in rows_of(said, method, panel.by_turn)]
    return rows


def figure(data: Row) -> Any:
    """A panel for each measurement: bars by position of the question, or curves over turns."""
    panels = FIGURES[data["settings"]["figure"]]
    rows = data["result"]["rows"]
    by_turn = panels[0].by_turn
    shape: Row = {"shared_yaxes": not by_turn, "horizontal_spacing": 0.05 if by_turn else 0.02}
    fig: Any = make_subplots(1, len(panels), subplot_titles=[panel.title for panel in panels], **shape)
    share: Row = {"range": [-0.03, 1.06], "tickformat": ".0%"}
    for column, panel in enumerate(panels, 1):
        add = curves if by_turn else bars
        own = [row for row in rows if row["panel"] == panel.title and row["at"] != ALL]
        add(fig, panel, own, showlegend=column == 1, row=1, col=column)
    style: Row = {"barmode": "group", "font": {"size": 13}}
    if by_turn:
        fig.update_xaxes(type="category", title_text="turn").update_yaxes(share)
        style |= {"legend": -0.2, "height": 640, "bottom": 150}
    else:
        fig.update_xaxes(share).update_yaxes(autorange="reversed", ticksuffix=" ")
        style |= {"legend": -0.05, "height": 1000, "bottom": 90}
    return figure_of(fig, None, finding(panels[0], rows), width=1750, **style)


def bars(fig: Any, panel: Panel, rows: Sequence[Row], **at: Any) -> None:
    """A group of bars for each method, a colour for each position of the question."""
    for place, colour in zip(POSITIONS, COLOURS, strict=False):
        mine = [row for row in rows if row["at"] == place]
        error = None
        if panel.key == "score":
            error = error_bars(mine, panel.key, width=2, color="#888")
        labels = [{"full": "whole cache"}.get(label, label) for label in value_of_each(mine, "label")]
        style: Row = {"name": f"question {PLACES[place]}", "marker_color": colour, "orientation": "h"}
        fig.add_bar(y=labels, x=value_of_each(mine, panel.key), error_x=error, **style, **at)


def curves(fig: Any, panel: Panel, rows: Sequence[Row], **at: Any) -> None:
    """A curve for each label; those that lie on one another show their markers inside each other."""
    for number, label in enumerate(TURNS):  # a method looks the same in every panel
        mine = [row for row in rows if row["label"] == label]
        marker = {"size": 17 - 2 * (number % 6), "symbol": number % 6}
        line = {"color": COLOURS[number % len(COLOURS)], "dash": ("solid", "dash")[number % 2]}
        style = {"name": label, "mode": "lines+markers", "line": line, "marker": marker}
        fig.add_scatter(x=value_of_each(mine, "at"), y=value_of_each(mine, panel.key), **style, **at)


def finding(panel: Panel, rows: Sequence[Row]) -> str:
    """The best and the worst point of the first panel."""
    mine = [row for row in rows if row["panel"] == panel.title and row["at"] == ALL]
    mine.sort(key=lambda row: row[panel.key])
    said = [f"{row[panel.key]:.0%} ({row['label']})" for row in (mine[0], mine[-1])]
    return f"{panel.title}: from {said[0]} to {said[1]}"


def main(name: Literal[*FIGURES], *, only: str = "", work: Path = Path("runs"), out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        only: Answer only methods whose text holds this word; the others' rows stay as the figure's JSON has them.
        work: Folder of the answers.
    """
    panels = FIGURES[name]
    rows = measured(panels, work, only)
    file = f"loopserve_{name}"
    places = [(panel.title, *place) for panel in panels for place in panel.specs.items()]
    place_of = itemgetter("panel", "label", "method")
    if only:
        kept = earlier(out / f"{file}.json")["rows"]
        rows += [row for row in kept if place_of(row) in places and only not in row["method"]]
    rows.sort(key=lambda row: places.index(place_of(row)))
    settings = {"figure": name, "suites": [panel.suite for panel in panels], "only": only}
    draw(write_record(out / f"{file}.json", f"loopserve-{name}", {"rows": rows}, settings), figure)


if __name__ == "__main__":
    run(main)
