"""Figure 2 (d) of the LoopServe paper: accuracy by position of the question.

    python -m experiments.loopserve.figure2d [--count 40] [--out figures]

The recall model answers dialogues of one turn with the whole cache, SnapKV, AdaKV and Progressive, LoopServe's decoding
half, at an equal budget (`sinkscope bench --task recall`). The panels show answers of 1, 2 and 7 facts (3, 6 and
21 tokens). Controls are the whole cache, which is right at every position, and StreamingLLM, which keeps the last
tokens whatever the question is. Progressive attends to everything for the first 16 tokens of an answer, so shorter
answers equal those of the whole cache; `progressive-0` selects from the first step on.
"""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.drawn import at_place, save
from experiments.record import Row, record, value_of_each
from experiments.script import run
from sinkscope.bench.record import BenchRecord
from sinkscope.bench.run import run_bench
from sinkscope.bench.tasks.recall import POSITIONS, Recall
from sinkscope.display.console import ProgressBar
from sinkscope.display.style import BLUE, GREEN, ORANGE, figure_of
from sinkscope.measure.rate import mean_known, wilson
from sinkscope.opening.load import load

METHODS = ("full", "streaming", "snapkv", "adakv", "progressive", "progressive-0")
HOPS = (1, 2, 7)


def measure(model: Any, hops: int, count: int, tokens: int, budget: int, progress: ProgressBar) -> list[Row]:
    """Accuracy with its interval by method and position."""
    task = Recall(count=count, turns=1, total=tokens, hops=hops)
    methods = [name if name == "full" else f"{name}:{budget}" for name in METHODS]
    records = run_bench(model, task, methods, batch_size=10, progress=progress)
    points: list[Row] = []
    for name, method in zip(METHODS, methods, strict=True):
        for place in POSITIONS:
            mine = []
            for each in records:
                if (each.method, each.settings["part"]) == (method, place):
                    mine.append(each)
            points.append({"method": name, "position": place, **_point(mine)})
    return points


def _point(records: Sequence[BenchRecord]) -> Row:
    counts = []
    for each in records:
        counts.append(each.metrics["score"] or 0)
    rate = wilson(sum(counts), len(records))
    return {
        "questions": len(records),
        "accuracy": rate.share,
        "low": rate.low,
        "high": rate.high,
        "read": mean_known(each.metrics["read"] for each in records),
        "answer_tokens": mean_known(each.metrics["length"] for each in records),
    }


def figure(data: Row) -> Any:
    """A panel for each number of facts: bars by method and position."""
    panels = data["result"]["panels"]
    budget = data["settings"]["budget"]
    from plotly.subplots import make_subplots

    fig: Any = make_subplots(
        rows=1,
        cols=len(panels),
        shared_yaxes=True,
        horizontal_spacing=0.03,
        subplot_titles=[f"{p['hops']} fact{'s' * (p['hops'] > 1)}: answers of {3 * p['hops']} tokens" for p in panels],
    )
    for column, panel in enumerate(panels, 1):
        for place, colour in zip(POSITIONS, (BLUE, ORANGE, GREEN), strict=True):
            bars = []
            for point in panel["points"]:
                if point["position"] == place:
                    bars.append(point)
            x = []
            for b in bars:
                x.append(html.escape(b["method"]))
            y = value_of_each(bars, "accuracy")
            array = []
            for b in bars:
                array.append(b["high"] - b["accuracy"])
            arrayminus = []
            for b in bars:
                arrayminus.append(b["accuracy"] - b["low"])
            fig.add_bar(
                x=x,
                y=y,
                name=f"question {at_place(place)}",
                legendgroup=place,
                showlegend=column == 1,
                marker_color=colour,
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "thickness": 1,
                    "array": array,
                    "arrayminus": arrayminus,
                },
                row=1,
                col=column,
            )
    fig.update_yaxes(range=[-0.02, 1.05], tickformat=".0%")
    fig.update_yaxes(title_text="right answers", row=1, col=1)
    one = {}
    for p in panels[0]["points"]:
        one[(p["method"], p["position"])] = p["accuracy"]
    spread = {m: {place: one[m, place] for place in POSITIONS} for m, _ in one}
    most = max(spread, key=lambda m: max(spread[m].values()) - min(spread[m].values()))
    places = spread[most]
    best = max(places, key=lambda place: places[place])
    worst = min(places, key=lambda place: places[place])
    found = (
        f"With {budget} cached tokens, {most} answers {places[best]:.0%} of the questions {at_place(best)} and "
        f"{places[worst]:.0%} of those {at_place(worst)}; the whole cache answers {min(spread['full'].values()):.0%} "
        "or more at every place"
    )
    return figure_of(fig, None, found, width=1500, height=560, barmode="group", legend=-0.3)


def main(*, count: int = 40, tokens: int = 400, budget: int = 96, out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        count: Questions of each panel and position.
        tokens: Of a prompt.
        budget: Cached tokens per layer and kv head.
    """
    torch.set_num_threads(1)
    started = time.perf_counter()
    model = load("recall", backend="hf")
    with ProgressBar() as progress:
        panels: list[Row] = []
        for hops in HOPS:
            panels.append({"hops": hops, "points": measure(model, hops, count, tokens, budget, progress)})
    settings = {
        "model": "recall",
        "count": count,
        "turns": 1,
        "tokens": tokens,
        "budget": budget,
        "hops": HOPS,
        "methods": METHODS,
        "controls": ["full", "streaming"],
    }
    text = record("loopserve-fig2d", {"panels": panels}, settings, started=started)
    save("loopserve_fig2d", text, figure, out)
    for panel in panels:
        for method in METHODS:
            points = []
            for p in panel["points"]:
                if p["method"] == method:
                    points.append(p)
            shown = ", ".join(f"{p['position']} {p['accuracy']:.0%}" for p in points)
            print(f"{panel['hops']} facts, {method}: {shown}")


if __name__ == "__main__":
    run(main)
