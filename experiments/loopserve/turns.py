"""Dialogues of nine turns (Fig. 12), answered by the recall model at a fixed budget.

    python -m experiments.loopserve.turns [--work runs] [--out figures]

One cache grows over all turns of a dialogue, to 2,700 tokens and the answers, and a token that a method evicts in one
turn is missing in the next. The budget stays at 128 tokens, as the paper's stays at 1,024 while Qasper's dialogues
grow. MInference has no budget and computes an eighth of the prompt's cells. Answers are one fact, or a chain of seven.
The history consists of right answers. LoopServe runs with its defaults, as printed, and with exact weights on the
printed sample. The controls are the whole cache, and a random part of it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from experiments.drawn import save
from experiments.loopserve.paper import TURNS
from experiments.loopserve.runs import (
    LONGBENCH,
    NINE,
    NINE_CHAIN,
    answers,
    seconds_of,
    settings_of,
    specs,
    turns_of,
)
from experiments.record import Row, record, value_of_each
from experiments.script import run
from sinkscope.results.style import BLUE, COLOURS, GREEN, GREY, ORANGE, RED, figure_of

BUDGET = 128
PURPLE, SKY = COLOURS[3:5]
NAMES = {
    "whole cache": "full",
    "LoopServe": f"loopserve:budget={BUDGET}",
    "LoopServe as printed": f"loopserve:paper:budget={BUDGET}",
    "exact weights, rows drawn": f"loopserve:paper:variant=exact:budget={BUDGET}",
    "LoopServe-D": f"loopserve-d:budget={BUDGET}",
    "LoopServe-D, first=0": f"loopserve-d:first=0:budget={BUDGET}",
    "SnapKV": f"snapkv:{LONGBENCH}:budget={BUDGET}",
    "AdaKV": f"adakv:{LONGBENCH}:budget={BUDGET}",
    "MInference": "minference",
    "random part": f"random:window=32:budget={BUDGET}",
}
LINES = (
    ("#000000", "solid", "circle-open", 17),
    (RED, "solid", "circle", 8),
    (RED, "dot", "x", 9),
    (PURPLE, "dot", "cross", 9),
    (SKY, "dash", "square-open", 11),
    (SKY, "dot", "triangle-up", 8),
    (BLUE, "solid", "diamond", 9),
    (GREEN, "dash", "triangle-down", 9),
    (ORANGE, "solid", "diamond-open", 14),
    (GREY, "dot", "circle", 5),
)
"""Colour, dash, marker and its size: curves that lie on one another show their markers inside each other."""
SHOWN = (
    (NINE, "score", "one fact: answers that are right"),
    (NINE_CHAIN, "prefix", "chain of seven: of an answer, before its first mistake"),
)


def figure(data: Row) -> Any:
    """A curve per method over the turns."""
    rows = data["result"]["rows"]
    names = list(dict.fromkeys(row["label"] for row in rows))
    from plotly.subplots import make_subplots

    fig: Any = make_subplots(rows=1, cols=2, subplot_titles=[title for _, _, title in SHOWN], horizontal_spacing=0.04)
    for col, (suite, key, _) in enumerate(SHOWN, 1):
        for name, (colour, dash, symbol, size) in sorted(zip(names, LINES, strict=False), key=lambda pair: -pair[1][3]):
            mine = []
            for row in rows:
                if (row["suite"], row["label"]) == (suite.name, name):
                    mine.append(row)
            x = value_of_each(mine, "turn")
            y = []
            for each in mine:
                y.append(each[key])
            fig.add_scatter(
                x=x,
                y=y,
                name=name,
                legendgroup=name,
                legendrank=names.index(name),
                showlegend=col == 1,
                mode="lines+markers",
                line={"color": colour, "dash": dash, "width": 2},
                marker={"symbol": symbol, "size": size, "line": {"width": 2, "color": colour}},
                row=1,
                col=col,
            )
    fig.update_xaxes(title="turn", dtick=1)
    fig.update_yaxes(range=[-0.03, 1.06], tickformat=".0%")
    last = {}
    for row in rows:
        if (row["suite"], row["turn"]) == (NINE.name, len(TURNS)):
            last[row["label"]] = row["score"]
    found = (
        f"In turn {len(TURNS)}, LoopServe answers {last['LoopServe']:.0%} right, the whole cache "
        f"{last['whole cache']:.0%}, a random part of {data['settings']['budget']} tokens {last['random part']:.0%}"
    )
    legend = {"x": 0, "xanchor": "left", "y": -0.16, "entrywidth": 220, "itemwidth": 50}
    return figure_of(
        fig,
        None,
        found,
        width=1400,
        height=660,
        bottom=150,
        legend=legend,
    )


def main(*, work: Path = Path("runs"), out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        work: Folder of the answers.
    """
    started = time.perf_counter()
    methods = dict(zip(NAMES, specs(list(NAMES.values())), strict=True))
    rows = list[Row]()
    seconds = 0.0
    for suite, _, _ in SHOWN:
        assert suite.task.turns == len(TURNS)
        said = answers(suite, list(methods.values()), work)
        seconds += seconds_of(said)
        rows += [{"label": name, **row} for name, method in methods.items() for row in turns_of(suite, said, method)]
    for suite, key, title in SHOWN:
        print(
            title,
            *(
                f"{name:<22}"
                + " ".join(f"{row[key]:>5.0%}" for row in rows if (row["suite"], row["label"]) == (suite.name, name))
                for name in NAMES
            ),
            sep="\n",
        )
    settings = settings_of([suite for suite, _, _ in SHOWN], seconds) | {"budget": BUDGET}
    save("loopserve_turns", record("loopserve-turns", {"rows": rows}, settings, started=started), figure, out)


if __name__ == "__main__":
    run(main)
