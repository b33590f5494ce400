"""LoopServe's settings one by one on ordinary text: divergence of the next token from that of full attention.

    python -m experiments.loopserve.fidelity [--count 4] [--work runs] [--out figures]

The model in the package reads 1,024 tokens of the text that ships and then the 96 that follow, token by token, under
every setting (`sinkscope bench --task text`). It answers nothing, but its attention is a trained model's,
so settings differ by degrees and not by right or wrong, as on the recall model. KL is of the whole vocabulary, in nats.
Controls: the whole cache, which is at 0, and a random part of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from experiments.drawn import powers, save
from experiments.loopserve import paper
from experiments.loopserve.runs import LONGBENCH, seconds_of, specs
from experiments.loopserve.sweeps import ALPHAS, DEFAULT, DENSE, DRAWN, FIXED, INTERVALS, PRINTED, SAMPLES, legends
from experiments.record import Row, record
from experiments.script import run
from sinkscope.bench.record import BenchRecord
from sinkscope.bench.run import run_bench
from sinkscope.bench.tasks.text import TextFidelity
from sinkscope.measure.rate import mean_known
from sinkscope.opening.load import load
from sinkscope.results.console import ProgressBar
from sinkscope.results.style import BLUE, GREY, ORANGE, RED, figure_of

PROMPT, ANSWER = 1024, 96
BUDGETS = (64, 128, 256, 512, 1024)

# (panel, curve, text of the method with {} for the value, values); without a budget, an eighth of the context
CURVES: tuple[tuple[str, str, str, tuple[float, ...]], ...] = (
    ("alpha", PRINTED, "loopserve-p:paper:alpha={}", ALPHAS),
    ("alpha", DRAWN, "loopserve-p:paper:variant=exact:alpha={}", ALPHAS),
    ("alpha", DENSE, "loopserve-p:alpha={}", ALPHAS),
    ("sample", f"{PRINTED}, 0.955", "loopserve-p:paper:sample={}", SAMPLES),
    ("sample", f"{DRAWN}, 0.955", "loopserve-p:paper:variant=exact:sample={}", SAMPLES),
    ("sample", f"{DENSE}, {DEFAULT.alpha}", "loopserve-p:sample={}", SAMPLES),
    ("budget", "LoopServe-D, first=0", "loopserve-d:first=0:budget={}", BUDGETS),
    ("budget", "SnapKV", f"snapkv:{LONGBENCH}:budget={{}}", BUDGETS),
    ("budget", "random part, anew", "random-progressive:budget={}", BUDGETS),
    ("budget", "last 32 and a random part", "random:window=32:budget={}", BUDGETS),
    ("interval", "LoopServe-D, first=0", "loopserve-d:first=0:interval={}", INTERVALS),
    ("interval", "random part, anew", "random-progressive:every={}", INTERVALS),
    ("window", "LoopServe-D, first=0", f"loopserve-d:first=0:budget={FIXED}:interval={{}}", paper.WINDOWS),
    ("window", "SnapKV", f"snapkv:budget={FIXED}:kernel=7:pooling=max:window={{}}", paper.WINDOWS),
    ("first", "chosen from everything", "loopserve-d:first={}", (0, 16)),
    ("first", "chosen from what is left", "progressive:mode=evict:after={}", (0, 16)),
)
TITLES = {
    "alpha": "alpha of the prompt's half",
    "sample": "queries in the sample",
    "budget": "budget",
    "interval": "interval (12.5 %)",
    "window": f"observation window (budget {FIXED})",
    "first": "first steps that read all (12.5 %)",
}
LEAST = 1e-6  # nats: smaller ones are drawn there, on a logarithmic axis
ALONE = ("loopserve", "loopserve-p", "loopserve:paper", "loopserve-p:paper", "loopserve-d")


def row_of(records: Sequence[BenchRecord], method: str) -> Row:
    """Means over the tokens of all answers; `late` is the KL of the answer's second half."""
    mine = []
    for each in records:
        if each.method == method:
            mine.append(each)
    kl = [value for each in mine for value in each.steps["kl"]]
    late = [value for each in mine for value in each.steps["kl"][len(each.tokens) // 2 :]]
    agree = [value for each in mine for value in each.steps["agree"]]
    kl_by_answer = []
    for one in mine:
        kl_by_answer.append(fmean(one.steps["kl"]))
    return {
        "method": method,
        "answers": len(mine),
        "tokens": len(kl),
        "kl": fmean(kl),
        "late": fmean(late),
        "kl_by_answer": kl_by_answer,
        "agree": fmean(agree),
        "cells": mean_known(each.metrics["cells"] for each in mine),
    }


def _said(row: Row) -> str:
    if row["cells"] is None:
        cells = ""
    else:
        cells = f", cells {row['cells']:.0%}"
    return f"KL {row['kl']:.5f} (late {row['late']:.5f}), agree {row['agree']:.1%}{cells}"


def figure(data: Row) -> Any:
    """A panel per setting: mean KL, a dot per text."""
    points = data["result"]["points"]
    from plotly.subplots import make_subplots

    fig: Any = make_subplots(
        rows=2, cols=3, subplot_titles=list(TITLES.values()), horizontal_spacing=0.05, vertical_spacing=0.22
    )
    for number, panel in enumerate(TITLES):
        mine = [p for p in points if p["figure"] == panel]
        at = {"row": number // 3 + 1, "col": number % 3 + 1}
        for curve, colour in zip(dict.fromkeys(p["curve"] for p in mine), (BLUE, ORANGE, GREY, RED), strict=False):
            line = []
            for point in mine:
                if point["curve"] == curve:
                    line.append(point)
            x = [str(point["value"]) for point in line]
            legend = f"legend{number + 1}" if number else "legend"
            y = []
            for p in line:
                y.append(max(p["kl"], LEAST))
            fig.add_scatter(
                x=x,
                y=y,
                name=curve,
                mode="lines+markers",
                line_color=colour,
                legend=legend,
                **at,
            )
            dots = [(a, value) for a, point in zip(x, line, strict=True) for value in point["kl_by_answer"]]
            y = []
            for _, b in dots:
                y.append(max(b, LEAST))
            fig.add_scatter(
                x=[a for a, _ in dots],
                y=y,
                mode="markers",
                showlegend=False,
                marker={"color": colour, "size": 4, "opacity": 0.35},
                **at,
            )
    fig.update_xaxes(type="category")
    fig.update_yaxes(**powers(), range=[math.log10(LEAST) - 0.2, 0.2])
    fig.update_yaxes(title=f"KL to full attention, nats<br>(less than {LEAST:g} is drawn there)", col=1)
    spread = {panel: [p["kl"] for p in points if p["figure"] == panel] for panel in TITLES}
    most = max(spread, key=lambda panel: max(spread[panel]) - min(spread[panel]))
    found = (
        f"On ordinary text the {TITLES[most]} matters most: the KL to full attention goes from {min(spread[most]):.2g} "
        f"to {max(spread[most]):.2g} nats ({PROMPT} tokens and {ANSWER} more; dots: texts)"
    )
    return figure_of(fig, None, found, width=1500, height=950, font={"size": 12}, **legends(fig, len(TITLES)))


def main(*, work: Path = Path("runs"), out: Path = Path("figures"), count: int = 4) -> None:
    """Make what the module describes.

    Args:
        work: Folder of the answers.
        count: Texts.
    """
    started = time.perf_counter()
    torch.set_num_threads(1)
    model = load(None, backend="hf")
    task = TextFidelity(count=count, prompt=PROMPT, answer=ANSWER)
    methods = {
        (panel, curve, value): specs([text.format(value)])[0]
        for panel, curve, text, values in CURVES
        for value in values
    }
    alone = specs(ALONE)
    with ProgressBar() as progress:
        every = list(dict.fromkeys([*alone, *methods.values()]))
        records = run_bench(model, task, every, out=work / "fidelity", progress=progress)
    points = []
    for (panel, curve, value), method in methods.items():
        points.append({"figure": panel, "curve": curve, "value": value, **row_of(records, method)})
    halves = []
    for method in alone:
        halves.append(row_of(records, method))
    for point in points:
        print(f"{point['figure']:<9} {point['curve']:<26} {point['value']:>6}", _said(point))
    for row in halves:
        print(f"{row['method']:<40}", _said(row))
    settings = {
        "prompt_tokens": PROMPT,
        "answer_tokens": ANSWER,
        "texts": count,
        "model": "bundled",
        "threads": 1,
        "answering_seconds": round(seconds_of(records)),
    }
    text = record("loopserve-fidelity", {"points": points, "halves": halves}, settings, started=started)
    save("loopserve_fidelity", text, figure, out)


if __name__ == "__main__":
    run(main)
