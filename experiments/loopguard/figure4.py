"""Figure 4 of the paper: how often LoopGuard intervenes in a run, and where.

    python -m experiments.loopguard.figure4 RUN ... [--out figures]

Each RUN is a folder of `sinkscope bench --task loops` with the methods `loopguard:paper` (as printed), `loopguard` (the
default) or both; interventions of several runs are added up. Grey areas show the paper's ranges. The controls are both
monitors on texts that repeat honestly (`experiments.loopguard.honest`), and pruning without any signal
(`loopguard:paper:variant=always`), if it was run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, mode
from typing import Any

from experiments.drawn import save
from experiments.loopguard.honest import alarms, honest_texts
from experiments.record import Row, record
from experiments.script import run
from sinkscope.bench.record import BenchRecord, read_run
from sinkscope.errors import SinkscopeError
from sinkscope.opening.load import load
from sinkscope.results.style import COLOURS, GREY, figure_of, panels

PAPER: Row = {"counts": (3, 5), "mode": 5, "positions": (800, 1300), "early_below": 400}  # section 6.4
EARLY = PAPER["early_below"] / 2500  # of the new tokens
BIN = 100
DRAWN = {
    "loopguard:paper": "LoopGuard as printed",
    "loopguard": "LoopGuard by default",
    "loopguard:paper:variant=always": "always on",
}
MONITORS = {"loopguard:paper": "full", "loopguard": "repeats"}  # variants of the monitor


def measure(folders: Sequence[Path]) -> Row:
    """Counts and positions of each guard, and the alarms on the controls."""
    runs = [read_run(folder) for folder in folders]
    new = max(int(run.settings["max_new_tokens"]) for run in runs)
    rows: list[Row] = []
    for name in DRAWN:
        records = [record for run in runs for record in run if without_budget(record.method) == name]
        if records:
            rows.append({"model": runs[0].settings["model"]["name"], "method": name, **guard_row(records, new)})
    if not rows:
        raise SinkscopeError(f"there is no run of {' or '.join(DRAWN)} in {', '.join(f.name for f in folders)}")
    texts = honest_texts()
    fired = alarms(load(), texts, list(MONITORS.values()))
    control = {"texts": len(texts), "alarmed": {method: fired[variant] for method, variant in MONITORS.items()}}
    return {"guards": rows, "paper": PAPER, "new": new, "control": control}


def without_budget(method: str) -> str:
    """A method without its budget."""
    return re.sub(r":[\d.]+", "", method)


def guard_row(records: Sequence[BenchRecord], new: int) -> Row:
    """How often a guard intervened, and where; `new` is the maximum number of new tokens."""
    counts: list[int] = []
    positions: list[int] = []
    for each in records:
        steps = [event["step"] for event in each.events if event["kind"] == "guard"]
        counts.append(len(steps))
        positions += steps
    return {
        "runs": len(records),
        "counts": counts,
        "positions": positions,
        "mean": fmean(counts),
        "mode": mode(counts),
        "early": fmean(step < EARLY * new for step in positions) if positions else None,
    }


def figure(data: Row) -> Any:
    """Both distributions, the paper's ranges after them."""
    result = data["result"]
    fig = panels(["(a) interventions per run", "(b) where they were"], spacing=0.08)
    times = []
    for number, row in enumerate(result["guards"]):
        name = f"{DRAWN[row['method']]}, {row['model']}"
        style = {"marker_color": COLOURS[number], "legendgroup": name, "name": name, "histnorm": "probability"}
        fig.add_histogram(x=row["counts"], xbins={"size": 1}, **style, row=1, col=1)
        bins = {"start": 0, "size": BIN}
        fig.add_histogram(x=row["positions"], xbins=bins, **style, showlegend=False, row=1, col=2)
        times.append(f"{row['mean']:.1f} with {DRAWN[row['method']]}")
    shade: Row = {"fillcolor": GREY, "opacity": 0.2, "line_width": 0, "layer": "below"}
    shade |= {"annotation_text": "the paper's", "annotation_position": "top left"}
    low, high = PAPER["counts"]
    fig.add_vrect(low - 0.5, high + 0.5, **shade, row=1, col=1)
    fig.add_vrect(*PAPER["positions"], **shade, row=1, col=2)
    fig.update_xaxes(title_text="interventions", row=1, col=1)
    fig.update_xaxes(title_text="new tokens", range=[0, result["new"]], row=1, col=2)
    fig.update_yaxes(title_text="share of runs", tickformat=".0%", row=1, col=1)
    fig.update_yaxes(title_text="share of interventions", tickformat=".0%", row=1, col=2)
    found = f"Interventions in a run: {', '.join(times)} (the paper: {low} to {high})"
    return figure_of(fig, None, found, width=1300, height=520)


def main(runs: Sequence[Path], *, out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        runs: Folders of runs of `sinkscope bench --task loops` with LoopGuard.
    """
    started = time.perf_counter()
    result = measure(runs)
    settings = {"runs": [read_run(folder).settings for folder in runs]}
    save("loopguard_fig4", record("loopguard-fig4", result, settings, started=started), figure, out)


if __name__ == "__main__":
    run(main)
