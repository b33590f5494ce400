"""LoopServe and its halves, beside other methods, on dialogues of the recall model.

    python -m experiments.papers.loopserve.dialogues NAME [--only WORD] [--work runs] [--out figures]

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

import pandas as pd
import plotly.express as px

from experiments.drawn import draw
from experiments.papers.loopserve.runs import (
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
from experiments.record import Row, earlier, write_record
from experiments.script import run
from sinkscope.results.style import figure_of

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
    name = data["settings"]["figure"]
    keys = {panel.title: panel.key for panel in FIGURES[name]}
    frame = pd.DataFrame(row | {"answers": row[keys[row["panel"]]]} for row in data["result"]["rows"])
    frame = frame[frame["at"] != ALL]
    if "turns" in name:
        fig = px.line(frame, x="at", y="answers", color="label", symbol="label", facet_col="panel")
        return figure_of(fig.update_yaxes(tickformat=".0%"), None, width=1750, height=640, bottom=150)
    has_interval = frame["panel"].map(keys) == "score"
    for side, length in {"above": frame["high"] - frame["answers"], "below": frame["answers"] - frame["low"]}.items():
        frame[side] = length.where(has_interval, 0.0)
    errors: Row = {"error_x": "above", "error_x_minus": "below"}
    fig = px.bar(frame, x="answers", y="label", color="at", barmode="group", facet_col="panel", **errors)
    fig.update_xaxes(tickformat=".0%").update_yaxes(autorange="reversed", col=1)
    return figure_of(fig, None, width=1750, height=1000, legend=-0.08)


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
