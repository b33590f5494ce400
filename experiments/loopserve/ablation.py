"""Quality of each half of LoopServe, and of both together, on dialogues of the recall model (Figs. 5 b and 7).

    python -m experiments.loopserve.ablation [--work runs] [--out figures]

-P is the sparse prompt alone, -D the progressive decoding alone, at an eighth of the context; the decoding half is the
paper's (interval 16, first 16 steps that read everything). Prompts are read as by default, as printed (alpha 0.955,
rows drawn, one overlap for all lines), and with exact weights on the printed sample. Controls: the whole cache; a
random part of it. What the halves cost is measured by `experiments.loopserve.latency`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from experiments.drawn import at_place, error_bars, save
from experiments.loopserve.runs import CHAIN, KEPT, answers, rows_of, seconds_of, settings_of, specs
from experiments.loopserve.table1 import COLOURS, own_table
from experiments.record import Row, record, value_of_each
from experiments.script import run
from sinkscope.bench.tasks.recall import POSITIONS
from sinkscope.results.style import figure_of

NAMES = {
    "whole cache": "full",
    "default": "loopserve",
    "default, -P": "loopserve-p",
    "-D": "loopserve-d",
    "-D, first=0": "loopserve-d:first=0",
    "as printed": "loopserve:paper",
    "as printed, -P": "loopserve-p:paper",
    "exact weights, rows drawn, -P": "loopserve-p:paper:variant=exact",
    "default, alpha=0.955, -P": "loopserve-p:alpha=0.955",
    "random part": "random:window=32",
}
SHOWN = (
    (KEPT, "score", "one fact: answers that are right"),
    (CHAIN, "prefix", "chain of eight: of an answer, before its first mistake"),
)


def figure(data: Row) -> Any:
    """Bars by half and position of the question."""
    rows = data["result"]["rows"]
    from plotly.subplots import make_subplots

    fig: Any = make_subplots(rows=1, cols=2, subplot_titles=[title for _, _, title in SHOWN], horizontal_spacing=0.06)
    for col, (suite, key, _) in enumerate(SHOWN, 1):
        for place in POSITIONS:
            mine = []
            for row in rows:
                if (row["suite"], row["position"]) == (suite.name, place):
                    mine.append(row)
            error_y = None
            if key == "score":
                error_y = error_bars(mine, key, width=2, color="#888")
            x = value_of_each(mine, "label")
            y = []
            for each in mine:
                y.append(each[key])
            fig.add_bar(
                x=x,
                y=y,
                name=f"question {at_place(place)}",
                marker_color=COLOURS[place],
                legendgroup=place,
                showlegend=col == 1,
                row=1,
                col=col,
                error_y=error_y,
            )
    fig.update_yaxes(range=[0, 1.06], tickformat=".0%")
    right = {}
    for row in rows:
        if (row["suite"], row["position"]) == (KEPT.name, "middle"):
            right[row["label"]] = row["score"]
    found = (
        f"Asked in the middle for one fact, LoopServe's default answers {right['default']:.0%} right, the whole cache "
        f"{right['whole cache']:.0%}, a random part of it {right['random part']:.0%}"
    )
    return figure_of(fig, None, found, width=1500, height=600, barmode="group", legend=-0.38, bottom=170)


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
        said = answers(suite, list(methods.values()), work)
        seconds += seconds_of(said)
        rows += [{"label": name, **row} for name, method in methods.items() for row in rows_of(suite, said, method)]
    print(own_table(rows))
    text = record(
        "loopserve-ablation", {"rows": rows}, settings_of([suite for suite, _, _ in SHOWN], seconds), started=started
    )
    save("loopserve_ablation", text, figure, out)


if __name__ == "__main__":
    run(main)
