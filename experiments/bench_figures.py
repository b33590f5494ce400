"""Scores of methods on a set of prompts: bars by method.

    python -m experiments.bench_figures NAME [--work runs] [--out figures]

NAME is one of `RUNS`, which are runs of `sinkscope bench` that take minutes to hours; they resume in the folder --work.
The figure shows the measure of each method with its 95 % interval, a colour for each set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.express as px

from experiments.drawn import draw
from experiments.record import Row, write_record
from experiments.script import run
from sinkscope.bench.benchmark import bench
from sinkscope.bench.record import BenchRun, read_run
from sinkscope.bench.table import tabulate_records
from sinkscope.bench.task import task_class
from sinkscope.measure.margin import SCORES, interval_of
from sinkscope.results.console import ProgressBar
from sinkscope.results.style import figure_of

POLICIES = ("streaming", "h2o", "snapkv", "adakv", "tova", "random")
LOSSES = ["full", *(f"{name}:{budget}" for budget in (0.5, 0.25, 0.125) for name in POLICIES)]
RECALLED = "full,streaming:0.25,h2o:0.25,snapkv:0.25,adakv:0.25,pyramid:0.25,tova:0.25"
BY_PLACE = "full,streaming:96,snapkv:96,adakv:96,progressive:96,progressive-0:96"
GUARDS = "full,streaming:256,h2o:256,loopguard:256,loopguard:paper:256"


AXES = {"kl": "KL to full attention, nats a token", "loop_paper": "answers that loop", "score": "right answers"}


@dataclass(frozen=True)
class BenchFigure:
    """A run of `sinkscope bench`.

    Attributes:
        measure: Column that is drawn.
        task: As for `--task`.
        methods: As for `--methods`.
        model: As for `--model`.
        batch_size: As for `--batch-size`.
    """

    measure: str
    task: str
    methods: str
    model: str = "bundled"
    batch_size: int = 1


RUNS = {
    "loopbench_small": BenchFigure("loop_paper", "loops", GUARDS, batch_size=24),
    "recall_dialogues": BenchFigure("score", "recall", RECALLED, "recall"),
    "loopserve_fig2d": BenchFigure("score", "recall:samples=40:turns=1:lengths=400:hops=1", BY_PLACE, "recall", 10),
    "cache_loss": BenchFigure("kl", "text:prompt=767", ",".join(LOSSES)),
}


def figure(data: Row) -> Any:
    """Bars by method, a colour for each set."""
    measure, frame = data["settings"]["measure"], pd.DataFrame(data["result"]["rows"])
    frame = frame.assign(above=frame["high"] - frame[measure], below=frame[measure] - frame["low"])
    errors: Row = {"error_y": "above", "error_y_minus": "below"}
    fig = px.bar(frame, x="method", y=measure, color="set", barmode="group", **errors)
    fig.update_xaxes(tickangle=-35).update_yaxes(title_text=AXES[measure])
    if measure != "kl":  # which is in nats, and no share
        fig.update_yaxes(tickformat=".0%", range=[0, 1.05])
    title = f"{AXES[measure]}: {data['settings']['task']} with {data['settings']['model']}"
    return figure_of(fig, None, title, width=1100, height=620, bottom=270)


def main(name: Literal[*RUNS], *, work: Path = Path("runs"), out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        work: Folder of the runs.
    """
    chosen = RUNS[name]
    with ProgressBar() as progress:
        table = bench(
            task=chosen.task,
            methods=chosen.methods.split(","),
            model=chosen.model,
            out=work / name,
            batch_size=chosen.batch_size,
            progress=progress,
        )
    if chosen.measure == "score":  # a colour for each place of the question
        done = read_run(work / name)
        records = [replace(one, set=one.part) for one in done]
        table = tabulate_records([BenchRun(records, done.settings)])
    rows: list[Row] = []
    for group in table.groups:
        about = {"set": group.set, "method": group.method, "answers": group.answers}
        row = {**about, task_class(table.task).main: group.score, "low": group.low, "high": group.high, **group.metrics}
        if chosen.measure == "loop_paper":
            looped = round(group.metrics["loop_paper"] * group.answers)
            rate = interval_of(np.repeat([1.0, 0.0], [looped, group.answers - looped]), SCORES)
            assert rate is not None
            row |= {"low": rate.low, "high": rate.high}
        rows.append(row)
    settings = {"measure": chosen.measure, "task": chosen.task, "model": chosen.model}
    draw(write_record(out / f"{name}.json", "bench-figure", {"rows": rows}, settings), figure)


if __name__ == "__main__":
    run(main)
