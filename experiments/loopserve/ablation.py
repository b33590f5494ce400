"""Quality of each half of LoopServe, and of both together, on dialogues of the recall model (Figs. 5 b and 7).

    python -m experiments.loopserve.ablation [--work runs] [--out figures]

LoopServe-P is the sparse prompt alone, LoopServe-D the progressive decoding alone; both as in the paper (alpha 0.955,
interval 16, first 16 steps that read everything) at an eighth of the context. Controls: the whole cache; a random part
of it; and lines chosen from a sample that holds the prompt's last 16 queries (`recent=16`, not in the paper), also at
alpha 0.99. What the halves cost is measured by `experiments.loopserve.latency`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from experiments.loopguard.drawn import save
from experiments.loopserve.runs import CHAIN, KEPT, answers, options, rows_of, seconds_of, settings_of, specs
from experiments.loopserve.table1 import COLOURS, own_table
from experiments.record import record
from sinkscope.bench.dialogues.form import POSITIONS

NAMES = {
    "whole cache": "full",
    "LoopServe": "loopserve",
    "LoopServe-P": "loopserve-p",
    "LoopServe-D": "loopserve-d",
    "LoopServe-D, first=0": "loopserve-d:first=0",
    "LoopServe-P, recent=16": "loopserve-p:recent=16",
    "the same, alpha=0.99": "loopserve-p:recent=16:alpha=0.99",
    "LoopServe with both": "loopserve:recent=16:alpha=0.99",
    "random part": "random:window=32",
}
SHOWN = (
    (KEPT, "score", "one fact: answers that are right"),
    (CHAIN, "prefix", "chain of eight: of an answer, before its first mistake"),
)


def figure(rows: Sequence[dict[str, Any]]) -> Any:
    """Bars by half and position of the question."""
    from plotly.subplots import make_subplots

    fig: Any = make_subplots(rows=1, cols=2, subplot_titles=[title for _, _, title in SHOWN], horizontal_spacing=0.06)
    for col, (suite, key, _) in enumerate(SHOWN, 1):
        for place in POSITIONS:
            mine = [row for row in rows if (row["suite"], row["position"]) == (suite.name, place)]
            fig.add_bar(
                x=[row["label"] for row in mine],
                y=[row[key] for row in mine],
                name=f"question at {place}",
                marker_color=COLOURS[place],
                legendgroup=place,
                showlegend=col == 1,
                row=1,
                col=col,
                error_y={
                    "array": [row["high"] - row["score"] for row in mine],
                    "thickness": 1,
                    "width": 2,
                    "arrayminus": [row["score"] - row["low"] for row in mine],
                    "color": "#888",
                }
                if key == "score"
                else None,
            )
    fig.update_yaxes(range=[0, 1.06], tickformat=".0%")
    return fig.update_layout(
        title={"text": "The halves of LoopServe, alone and together", "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        width=1500,
        height=560,
        font={"size": 13},
        barmode="group",
        legend={"orientation": "h", "y": 1.18, "x": 0.6},
        margin={"l": 50, "r": 20, "t": 110, "b": 90},
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = options("ablation", __doc__).parse_args(argv)
    started = time.perf_counter()
    methods = dict(zip(NAMES, specs(list(NAMES.values())), strict=True))
    rows, seconds = list[dict[str, Any]](), 0.0
    for suite, _, _ in SHOWN:
        said = answers(suite, list(methods.values()), args.work)
        seconds += seconds_of(said)
        rows += [{"label": name, **row} for name, method in methods.items() for row in rows_of(suite, said, method)]
    print(own_table(rows))
    text = record(
        "loopserve-ablation", {"rows": rows}, settings_of([suite for suite, _, _ in SHOWN], seconds), started=started
    )
    save("loopserve_ablation", text, figure(rows), args.out)


if __name__ == "__main__":
    main()
