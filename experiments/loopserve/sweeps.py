"""LoopServe's settings one by one, on dialogues of the recall model (Figs. 5 c, 5 d, 10, 11).

    python -m experiments.loopserve.sweeps [--work runs] [--out figures]

Swept are alpha and the sample of the prompt's half (loopserve-p); the budget, the interval, the first steps that read
everything, and choosing against evicting of the decoding half; and the observation window of SnapKV and of that half,
which is its interval. Contexts are 512 to 1,800 tokens, so beside the paper's budgets there are smaller ones that bite.
The prompt's half is run as printed, with exact weights on the same drawn sample, and as it is by default. Controls:
everything, and a random part.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.drawn import error_bars, save
from experiments.loopserve import paper
from experiments.loopserve.runs import (
    ALL,
    LONGBENCH,
    SWEPT_CHAIN,
    SWEPT_KEPT,
    Suite,
    answers,
    rows_of,
    seconds_of,
    settings_of,
    specs,
)
from experiments.record import Row, record
from experiments.script import run
from sinkscope.lines.serve import LoopServe
from sinkscope.results.style import BLUE, GREEN, GREY, ORANGE, figure_of

DEFAULT = LoopServe()
PRINTED, DRAWN = "as printed", "exact weights, rows drawn"
DENSE = f"default: last {DEFAULT.dense_rows} rows dense"
"""Curves of the prompt's half: algorithm 5 with its one overlap, the same with exact weights, and ours."""

ALPHAS = (DEFAULT.alpha, 0.9, 0.955, *paper.ALPHAS)
BUDGETS = (32, 64, 128, *paper.BUDGETS)
SAMPLES, INTERVALS, FIXED = (12, 24, 48, 96), (8, 16, 32, 64), 128

# (figure, suite, curve, text of the method with {} for the value, values)
CURVES: tuple[tuple[str, Suite, str, str, tuple[float, ...]], ...] = (
    ("alpha", SWEPT_KEPT, PRINTED, "loopserve-p:paper:alpha={}", ALPHAS),
    ("alpha", SWEPT_KEPT, DRAWN, "loopserve-p:paper:variant=exact:alpha={}", ALPHAS),
    ("alpha", SWEPT_KEPT, DENSE, "loopserve-p:alpha={}", ALPHAS),
    ("sample", SWEPT_KEPT, f"{PRINTED}, 0.995", "loopserve-p:paper:alpha=0.995:sample={}", SAMPLES),
    ("sample", SWEPT_KEPT, f"{DRAWN}, 0.995", "loopserve-p:paper:variant=exact:alpha=0.995:sample={}", SAMPLES),
    ("sample", SWEPT_KEPT, f"{DENSE}, {DEFAULT.alpha}", "loopserve-p:sample={}", SAMPLES),
    ("budget, one fact", SWEPT_KEPT, "LoopServe-D, first=0", "loopserve-d:first=0:budget={}", BUDGETS),
    ("budget, one fact", SWEPT_KEPT, "SnapKV", f"snapkv:{LONGBENCH}:budget={{}}", BUDGETS),
    ("budget, one fact", SWEPT_KEPT, "SnapKV, window 16, not pooled", "snapkv:window=16:kernel=1:budget={}", BUDGETS),
    ("budget, one fact", SWEPT_KEPT, "random part", "random:window=32:budget={}", BUDGETS),
    ("budget, chain", SWEPT_CHAIN, "LoopServe-D", "loopserve-d:budget={}", BUDGETS),
    ("budget, chain", SWEPT_CHAIN, "LoopServe-D, first=0", "loopserve-d:first=0:budget={}", BUDGETS),
    ("budget, chain", SWEPT_CHAIN, "random part, anew", "random-progressive:budget={}", BUDGETS),
    ("window", SWEPT_KEPT, "LoopServe-D, first=0", f"loopserve-d:first=0:budget={FIXED}:interval={{}}", paper.WINDOWS),
    ("window", SWEPT_KEPT, "SnapKV", f"snapkv:budget={FIXED}:kernel=7:pooling=max:window={{}}", paper.WINDOWS),
    ("interval, chain", SWEPT_CHAIN, "LoopServe-D", "loopserve-d:interval={}", INTERVALS),
    ("interval, chain", SWEPT_CHAIN, "LoopServe-D, first=0", "loopserve-d:first=0:interval={}", INTERVALS),
    ("first, chain", SWEPT_CHAIN, "chosen from everything", "loopserve-d:first={}", (0, 16)),
    ("first, chain", SWEPT_CHAIN, "chosen from what is left", "progressive:mode=evict:after={}", (0, 16)),
)
TITLES = {
    "alpha": "alpha of the prompt's half (one fact)",
    "sample": "queries in the sample (one fact)",
    "budget, one fact": "budget (one fact)",
    "window": f"observation window (one fact, budget {FIXED})",
    "budget, chain": "budget (chain of eight)",
    "interval, chain": "interval (chain of eight, 12.5 %)",
    "first, chain": "first steps that read all (chain of eight)",
}


def methods_of(suite: Suite) -> dict[tuple[str, str, float], str]:
    """Method of every point of the curves on a suite, by figure, curve and value."""
    return {
        (figure, curve, value): specs([text.format(value)])[0]
        for figure, at, curve, text, values in CURVES
        if at == suite
        for value in values
    }


LINES = ((BLUE, 6), (ORANGE, 4), (GREEN, 2), (GREY, 1))
"""Colour and width of the curves of a panel: one that lies on another shows it at its sides."""


def figure(data: Row) -> Any:
    """A panel per setting: right answers with intervals where one fact is asked, else how far answers go."""
    points = data["result"]["points"]
    from plotly.subplots import make_subplots

    fig: Any = make_subplots(
        rows=2, cols=4, subplot_titles=list(TITLES.values()), horizontal_spacing=0.045, vertical_spacing=0.2
    )
    for number, panel in enumerate(TITLES):
        mine = []
        for point in points:
            if point["figure"] == panel and point["position"] == ALL:
                mine.append(point)
        at = {"row": number // 4 + 1, "col": number % 4 + 1}
        curves = dict.fromkeys(p["curve"] for p in mine)
        for curve, (colour, width) in zip(curves, LINES, strict=False):
            line = []
            for point in mine:
                if point["curve"] == curve:
                    line.append(point)
            x = [str(point["value"]) for point in line]
            exact = "chain" not in panel
            y = []
            for point in line:
                y.append(point["score" if exact else "prefix"])
            error = None
            if exact:
                error = error_bars(line, "score", color=colour)
            legend = "legend"
            if number:
                legend = f"legend{number + 1}"
            fig.add_scatter(
                x=x,
                y=y,
                error_y=error,
                name=curve,
                mode="lines+markers",
                line={"color": colour, "width": width},
                marker_size=2 * width + 3,
                legend=legend,
                **at,
            )
            if panel == "alpha" and any(point["cells"] is not None for point in line):
                cells = []
                for point in line:
                    cells.append(1.0 if point["cells"] is None else point["cells"])
                fig.add_scatter(
                    x=x,
                    y=cells,
                    mode="lines",
                    showlegend=False,
                    line={"color": colour, "dash": "dot"},
                    **at,
                )
    fig.update_xaxes(type="category")
    fig.update_yaxes(range=[-0.03, 1.06], tickformat=".0%")
    every = []
    for p in points:
        if p["position"] == ALL:
            every.append(p)
    below = []
    for p in every:
        if p["figure"] == "alpha" and p["value"] < 1:
            below.append(p)
    mean: dict[str, float] = {}
    for curve in dict.fromkeys(p["curve"] for p in below):
        values = []
        for each in below:
            if each["curve"] == curve:
                values.append(each["score"])
        mean[curve] = fmean(values)
    best = max(mean, key=lambda curve: mean[curve])
    worst = min(mean, key=lambda curve: mean[curve])
    right = f"{mean[best]:.0%} of the answers are right ({best}) and {mean[worst]:.0%} ({worst})"
    title = f"Averaged over alphas below 1, {right}"
    return figure_of(fig, None, title, width=1700, height=950, font={"size": 12}, **legends(fig, len(TITLES)))


def legends(fig: Any, panels: int) -> Row:
    """A legend under each panel."""
    found: Row = {}
    for number in range(panels):
        name = ""
        if number:
            name = str(number + 1)
        x = fig.layout[f"xaxis{name}"].domain
        y = fig.layout[f"yaxis{name}"].domain
        found[f"legend{name}"] = {"x": x[0], "y": y[0] - 0.04, "orientation": "v", "xanchor": "left", "yanchor": "top"}
    return found


def main(*, work: Path = Path("runs"), out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        work: Folder of the answers.
    """
    started = time.perf_counter()
    points = list[Row]()
    full = list[Row]()
    seconds = 0.0
    for suite in (SWEPT_KEPT, SWEPT_CHAIN):
        methods = methods_of(suite)
        said = answers(suite, ["full", *dict.fromkeys(methods.values())], work)
        seconds += seconds_of(said)
        full += rows_of(suite, said, "full")
        for (panel, curve, value), method in methods.items():
            for row in rows_of(suite, said, method):
                points.append({"figure": panel, "curve": curve, "value": value, **row})
    for point in points:
        if point["position"] == ALL:
            print(
                f"{point['figure']:<18} {point['curve']:<30} {point['value']:>6} {point['score']:>5.0%} "
                f"({point['low']:.0%} to {point['high']:.0%}) {point['prefix']:>5.0%}"
            )
    result = {"points": points, "full": full}
    settings = settings_of([SWEPT_KEPT, SWEPT_CHAIN], seconds)
    save("loopserve_sweeps", record("loopserve-sweeps", result, settings, started=started), figure, out)


if __name__ == "__main__":
    run(main)
