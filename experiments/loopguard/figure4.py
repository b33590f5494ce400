"""Figure 4 of the paper: how often LoopGuard intervenes in a run, and where.

    python -m experiments.loopguard.figure4 RUN ... [--out figures]

Each RUN is a folder of `sinkscope bench --task loops` with the methods `loopguard:paper` (as printed), `loopguard` (the
default) or both; interventions of several runs are added up. Grey areas show the paper's ranges. The controls are both
monitors on texts that repeat honestly (`experiments.loopguard.honest`) and on ordinary text, and pruning without any
signal (`loopguard:paper:variant=always`), if it was run.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.drawn import save
from experiments.loopguard.honest import alarms, honest_texts
from experiments.loopguard.paper import without_budget
from experiments.record import Row, record
from experiments.script import run
from sinkscope.bench.record import BenchRecord, read_run
from sinkscope.bench.tasks.loops import EARLY
from sinkscope.errors import SinkscopeError
from sinkscope.loops import Monitor, MonitorSettings
from sinkscope.models.text import typical_text
from sinkscope.opening.load import load
from sinkscope.results.style import BLUE, GREEN, GREY, ORANGE, RED, figure_of

PAPER: Row = {"counts": (3, 5), "mode": 5, "positions": (800, 1300), "early_below": 400}  # section 6.4
BIN = 100
DRAWN = {"loopguard:paper": "LoopGuard as printed", "loopguard": "LoopGuard by default"}
MONITORS = {"loopguard:paper": "full", "loopguard": "repeats"}  # variants of the monitor
NAMES = (*DRAWN, "loopguard:paper:variant=always")


def ordinary_alarms(length: int) -> Row:
    """Triggers of the monitors on pieces of ordinary text, as certain as it can be: a probability above 0.9 throughout.

    A text that is read has no probabilities of its own choice, so this is the worst case for the vote.
    """
    tokenizer = load(None, backend="hf").tokenizer
    ids: list[int] = tokenizer(typical_text(), add_special_tokens=False, verbose=False)["input_ids"]
    pieces = []
    for i in range(0, len(ids) - length + 1, length):
        pieces.append(ids[i : i + length])
    alarmed = dict.fromkeys(MONITORS, 0)
    for method, variant in MONITORS.items():
        for piece in pieces:
            monitor = Monitor(MonitorSettings.variant(variant))
            alarmed[method] += any(monitor.update(token, 0.99).trigger for token in piece)
    return {"texts": len(pieces), "tokens": length, "alarmed": alarmed}


def measure(folders: Sequence[Path]) -> Row:
    """Counts and positions of each guard, and the alarms on the controls."""
    rows: list[Row] = []
    runs = []
    for folder in folders:
        runs.append(read_run(folder))
    for name in NAMES:
        records = [record for run in runs for record in run if without_budget(record.method) == name]
        if records:
            values = []
            for run in runs:
                values.append(int(run.settings["max_new_tokens"]))
            new = max(values)
            model = runs[0].settings["model"]["name"]
            rows.append({"model": model, "method": name, **guard_row(records, new)})
    if not rows:
        raise SinkscopeError(f"there is no run of {' or '.join(NAMES)} in {', '.join(f.name for f in folders)}")
    texts = honest_texts()
    fired = alarms(load(None, backend="hf"), texts, list(MONITORS.values()))
    honest = {}
    for method, variant in MONITORS.items():
        honest[method] = fired[variant]
    control = {
        "honest_repetition": {"texts": len(texts), "alarmed": honest},
        "ordinary_text": ordinary_alarms(1500),
    }
    return {"guards": rows, "paper": PAPER, "control": control}


def guard_row(records: Sequence[BenchRecord], new: int) -> Row:
    """How often a guard intervened, and where; `new` is the maximum number of new tokens."""
    steps = []
    for each in records:
        steps.append([event["step"] for event in each.events if event["kind"] == "guard"])
    counts = []
    for each in steps:
        counts.append(len(each))
    positions = [step for each in steps for step in each]
    early = []
    for step in positions:
        early.append(step < EARLY * new)
    return {
        "runs": len(records),
        "counts": counts,
        "positions": positions,
        "mean": statistics.fmean(counts),
        "mode": Counter(counts).most_common(1)[0][0],
        "early": statistics.fmean(early) if early else None,
        "in_papers_range": sum(3 <= count <= 5 for count in counts) / len(counts),
        "first": statistics.median([min(each) for each in steps if each] or [0]),
    }


def figure(data: Row) -> Any:
    """Both distributions, the paper's ranges behind them."""
    values = []
    for about in data["settings"]["runs"]:
        values.append(int(about["max_new_tokens"]))
    result = data["result"]
    cap = max(values)
    from plotly.subplots import make_subplots

    fig: Any = make_subplots(
        rows=1,
        cols=2,
        horizontal_spacing=0.08,
        subplot_titles=["(a) interventions per run", "(b) where they were"],
    )
    drawn = []
    for r in result["guards"]:
        if r["method"] in DRAWN:
            drawn.append(r)
    for i, row in enumerate(drawn):
        colour = (BLUE, ORANGE, GREEN, RED)[i % 4]
        name = f"{DRAWN[row['method']]}, {row['model']}"
        counts = Counter(row["counts"])
        positions = row["positions"]
        xs = range(max(counts) + 1)
        y = []
        for each in xs:
            y.append(counts[each] / len(row["counts"]))
        fig.add_bar(
            x=list(xs),
            y=y,
            name=name,
            marker_color=colour,
            legendgroup=name,
            row=1,
            col=1,
        )
        bins = Counter(step // BIN for step in positions)
        xs = range(cap // BIN + 1)
        x = []
        for each in xs:
            x.append(BIN * (each + 0.5))
        y = []
        for each in xs:
            y.append(bins[each] / max(1, len(positions)))
        fig.add_bar(
            x=x,
            y=y,
            name=name,
            marker_color=colour,
            legendgroup=name,
            showlegend=False,
            row=1,
            col=2,
        )
    shade: Row = {"fillcolor": GREY, "opacity": 0.2, "line_width": 0, "layer": "below"}
    low, high = PAPER["counts"]
    fig.add_vrect(
        low - 0.5, high + 0.5, annotation_text="the paper's", annotation_position="top left", **shade, row=1, col=1
    )
    fig.add_vrect(
        *PAPER["positions"], annotation_text="the paper's", annotation_position="top left", **shade, row=1, col=2
    )
    fig.update_xaxes(title_text="interventions", row=1, col=1)
    fig.update_xaxes(title_text="new tokens", range=[0, cap], row=1, col=2)
    fig.update_yaxes(title_text="share of runs", tickformat=".0%", row=1, col=1)
    fig.update_yaxes(title_text="share of interventions", tickformat=".0%", row=1, col=2)
    times = " and ".join(f"{row['mean']:.1f} with {DRAWN[row['method']]}" for row in drawn)
    found = f"Interventions in a run of LoopBench's small set: {times} (the paper: {low} to {high})"
    return figure_of(fig, None, found, width=1400, height=540, barmode="group", bargap=0.1, legend=-0.2, bottom=110)


def main(runs: Sequence[Path], *, out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        runs: Folders of `sinkscope bench`.
    """
    started = time.perf_counter()
    result = measure(runs)
    made = []
    for folder in runs:
        made.append(read_run(folder).settings)
    settings = {"runs": [{**s, "folder": folder.name} for folder, s in zip(runs, made, strict=True)]}
    text = record("loopguard-fig4", result, settings, started=started)
    save("loopguard_fig4", text, figure, out)
    for row in result["guards"]:
        if row["early"] is None:
            early = "-"
        else:
            early = f"{row['early']:.1%}"
        print(
            f"{row['model']}, {row['method']}: {row['mean']:.1f} interventions a run (mode {row['mode']}), first at "
            f"{row['first']:g}, early {early}"
        )
    print(f"controls: {result['control']}")


if __name__ == "__main__":
    run(main)
