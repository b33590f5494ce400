"""An attention map whose halves have lines of their own (Fig. 2 a of the LoopServe paper).

    python -m experiments.loopserve.halves [--length 96] [--eta 0.05] [--out figures]

The text model reads a piece of the text that ships, and the heaviest lines of each half are those of the half's own
attention (observation 3). Two heads are shown: the one whose halves share the fewest lines, and the one whose halves
share the most.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from plotly.subplots import make_subplots

from experiments.drawn import save
from experiments.record import Row, record, value_of_each
from experiments.script import run
from sinkscope.lines.attention import Scores, attention_of
from sinkscope.lines.head_lines import HeadLines
from sinkscope.lines.lines import shared_by_second
from sinkscope.lines.sums import line_sums, scores_of
from sinkscope.lines.votes import top_lines
from sinkscope.measure import Setup
from sinkscope.measure.attention_texts import texts_of
from sinkscope.opening.load import load
from sinkscope.results.style import BLUE, ORANGE, figure_of


def heads_of(layer: int, scores: Scores, eta: float) -> list[Row]:
    """Every head of a layer: its attention, the lines of each half, and how many of the second's are the first's."""
    keys = scores.keys
    half = keys // 2
    first = top_lines(line_sums(scores.part(0, half)), [eta])
    second = top_lines(line_sums(scores.part(half, keys), since=half), [eta])
    shared = shared_by_second(first, second)[0]
    attention = attention_of(scores, torch.arange(keys))
    rows: list[Row] = []
    for head in range(len(shared)):
        lines = [lines_of(first, head, 0), lines_of(second, head, half)]
        rows.append(
            {
                "layer": layer,
                "head": head,
                "shared": float(shared[head]),
                "lines": lines,
                "attention": [row[: at + 1] for at, row in enumerate(attention[head].mul(1000).round().int().tolist())],
            }
        )
    return rows


def lines_of(lines: HeadLines, head: int, start: int) -> Row:
    """A head's lines: keys of the text, and offsets."""
    vertical = (lines.vertical[0, head].nonzero()[:, 0] + start).tolist()
    return {"start": start, "vertical": vertical, "slash": lines.slash[0, head].nonzero()[:, 0].tolist()}


def figure(data: Row) -> Any:
    """The two attention maps, with the lines of the first half in one colour and of the second in another."""
    heads = data["result"]["heads"]
    keys = len(heads[0]["attention"])
    titles = []
    for head in heads:
        name = f"L{head['layer']}.H{head['head']}"
        titles.append(f"{name}: {head['shared']:.0%} of the second half's lines are the first's")
    fig: Any = make_subplots(rows=1, cols=2, subplot_titles=titles, horizontal_spacing=0.06)
    for column, head in enumerate(heads, 1):
        shown = []
        for row in head["attention"]:
            shown.append([(value / 1000) ** 0.5 for value in row] + [None] * (keys - len(row)))
        fig.add_heatmap(z=shown, colorscale="Greys", showscale=False, row=1, col=column)
        for lines, end, colour in zip(head["lines"], (keys // 2, keys), (BLUE, ORANGE), strict=True):
            x, y = strokes(lines, end - 1)
            name = "heaviest lines of the first half" if lines["start"] == 0 else "of the second half"
            at = {"row": 1, "col": column, "showlegend": column == 1}
            fig.add_scatter(x=x, y=y, name=name, mode="lines", line={"color": colour, "width": 1.5}, opacity=0.6, **at)
    fig.update_xaxes(title_text="key", range=[-0.5, keys - 0.5])
    fig.update_yaxes(title_text="query", range=[keys - 0.5, -0.5])
    least, most, mean = heads[0]["shared"], heads[1]["shared"], data["result"]["mean"]
    found = (
        f"The halves of a text share {least:.0%} to {most:.0%} of their heaviest lines, by head; the mean is {mean:.0%}"
    )
    return figure_of(fig, None, found, width=1300, height=760, legend=-0.12)


def strokes(lines: Row, last: int) -> tuple[list[float | None], list[float | None]]:
    """The ends of all lines within a half, with a gap after each."""
    x: list[float | None] = []
    y: list[float | None] = []
    for key in lines["vertical"]:
        x += [key, key, None]
        y += [key, last, None]
    for offset in lines["slash"]:
        x += [lines["start"], last - offset, None]
        y += [lines["start"] + offset, last, None]
    return x, y


def main(*, length: int = 96, eta: float = 0.05, out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        length: Tokens of the text.
        eta: Share of a half's lines that are chosen.
    """
    started = time.perf_counter()
    setup = Setup.open(load(), loading="whole")
    (ids,) = texts_of(setup, None, None, 1, length)
    rows: list[Row] = []

    def see(layer: int, scores: Scores) -> None:
        rows.extend(heads_of(layer, scores, eta))

    with scores_of(setup.target, see, [*range(setup.target.n_layers)]):
        setup.target.forward(ids[None])
    rows.sort(key=lambda row: row["shared"])
    settings = {"length": length, "eta": eta, "heads": len(rows)}
    result = {"heads": [rows[0], rows[-1]], "mean": fmean(value_of_each(rows, "shared"))}
    save("loopserve_fig2a", record("loopserve-fig2a", result, settings, started=started), figure, out)


if __name__ == "__main__":
    run(main)
