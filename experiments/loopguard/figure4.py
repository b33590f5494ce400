"""Figure 4 of the paper: how often LoopGuard intervenes in a run, and where.

    python -m experiments.loopguard.figure4 RUN ... [--out figures]

Each RUN is a folder of `sinkscope loopbench run` with the methods `loopguard:paper` (as printed), `loopguard` (the
default) or both; interventions of several runs are added up. Grey areas show the paper's ranges. The controls are both
monitors on texts that repeat honestly (records of `--bench honest`, which have no method) and on ordinary text, and
pruning without any signal (`loopguard-always`), if it was run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.drawn import save
from experiments.record import record
from sinkscope.bench.loopbench.metrics import TEXT, Continued, read_run
from sinkscope.bench.loopbench.tables import tabulate
from sinkscope.errors import SinkscopeError
from sinkscope.loops import Monitor, MonitorSettings
from sinkscope.measure.style import BLUE, GREEN, GREY, ORANGE, RED, finished
from sinkscope.models.load import load
from sinkscope.models.text import typical_text

PAPER: dict[str, Any] = {"counts": (3, 5), "mode": 5, "positions": (800, 1300), "early_below": 400}  # section 6.4
BIN = 100
DRAWN = {"loopguard:paper": "LoopGuard as printed", "loopguard": "LoopGuard by default"}
MONITORS = {"loopguard:paper": "full", "loopguard": "repeats"}  # variants of the monitor
NAMES = (*DRAWN, "loopguard-always")


def ordinary_alarms(length: int) -> dict[str, Any]:
    """Triggers of the monitors on pieces of ordinary text, as certain as it can be: a probability above 0.9 throughout.

    A text that is read has no probabilities of its own choice, so this is the worst case for the vote.
    """
    tokenizer = load(None, backend="hf").tokenizer
    ids: list[int] = tokenizer(typical_text(), add_special_tokens=False, verbose=False)["input_ids"]
    pieces = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    alarmed = dict.fromkeys(MONITORS, 0)
    for method, variant in MONITORS.items():
        for piece in pieces:
            monitor = Monitor(MonitorSettings.variant(variant))
            alarmed[method] += any(monitor.update(token, 0.99).trigger for token in piece)
    return {"texts": len(pieces), "tokens": length, "alarmed": alarmed}


def gaps(record_: Continued) -> list[int]:
    """Tokens between one intervention and the next."""
    steps = [e["step"] for e in record_.events if e["kind"] == "guard"]
    return [b - a for a, b in pairwise(steps)]


def measure(folders: Sequence[Path]) -> dict[str, Any]:
    """Counts and positions of each guard, and what the controls say."""
    table = tabulate(folders)
    rows: list[dict[str, Any]] = []
    records = [r for folder in folders for r in read_run(folder).records]
    for g in table.ablation:
        if g.method not in NAMES:
            continue
        between = [gap for r in records if r.method == g.method for gap in gaps(r)]
        rows.append(
            {
                "model": g.model,
                "method": g.method,
                "runs": g.runs,
                "counts": g.counts,
                "positions": g.positions,
                "mean": g.interventions,
                "mode": Counter(g.counts).most_common(1)[0][0],
                "early": g.early,
                "in_papers_range": sum(3 <= c <= 5 for c in g.counts) / len(g.counts),
                "first": statistics.median([min(p) for p in _by_run(records, g.method) if p] or [0]),
                "median_gap": statistics.median(between) if between else None,
            }
        )
    if not rows:
        raise SinkscopeError(f"there is no run of {' or '.join(NAMES)} in {', '.join(f.name for f in folders)}")
    honest = [r for r in records if r.method == TEXT]
    return {
        "guards": rows,
        "paper": PAPER,
        "control": {
            "honest_repetition": {
                "texts": len(honest),
                "alarmed": {
                    method: [r.prompt for r in honest if r.detected.get(variant) is not None]
                    for method, variant in MONITORS.items()
                },
            },
            "ordinary_text": ordinary_alarms(1500),
        },
    }


def _by_run(records: Sequence[Continued], method: str) -> list[list[int]]:
    return [[e["step"] for e in r.events if e["kind"] == "guard"] for r in records if r.method == method]


def figure(data: dict[str, Any]) -> Any:
    """Both distributions, the paper's ranges behind them."""
    result, cap = data["result"], max(int(run["max_new_tokens"]) for run in data["settings"]["runs"])
    from plotly.subplots import make_subplots

    fig: Any = make_subplots(
        rows=1,
        cols=2,
        horizontal_spacing=0.08,
        subplot_titles=["(a) interventions per run", "(b) where they were"],
    )
    drawn = [r for r in result["guards"] if r["method"] in DRAWN]
    for i, row in enumerate(drawn):
        colour, name = (BLUE, ORANGE, GREEN, RED)[i % 4], f"{DRAWN[row['method']]}, {row['model']}"
        counts, positions = Counter(row["counts"]), row["positions"]
        xs = range(max(counts) + 1)
        fig.add_bar(
            x=list(xs),
            y=[counts[i] / len(row["counts"]) for i in xs],
            name=name,
            marker_color=colour,
            legendgroup=name,
            row=1,
            col=1,
        )
        bins = Counter(step // BIN for step in positions)
        xs = range(cap // BIN + 1)
        fig.add_bar(
            x=[BIN * (i + 0.5) for i in xs],
            y=[bins[i] / max(1, len(positions)) for i in xs],
            name=name,
            marker_color=colour,
            legendgroup=name,
            showlegend=False,
            row=1,
            col=2,
        )
    shade: dict[str, Any] = {"fillcolor": GREY, "opacity": 0.2, "line_width": 0, "layer": "below"}
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
    times = " and ".join(f"{row['mean']:.1f} times with {DRAWN[row['method']]}" for row in drawn)
    honest, text = result["control"]["honest_repetition"], result["control"]["ordinary_text"]
    alarms = max(len(honest["alarmed"][method]) + text["alarmed"][method] for method in DRAWN)
    found = (
        f"A run of LoopBench's small set has interventions {times} (the paper: {low} to {high}); {alarms or 'no'} "
        f"alarms on {honest['texts']} texts of honest repetition and {text['texts']} pieces of ordinary text"
    )
    return finished(fig, None, found, width=1400, height=540, barmode="group", bargap=0.1, legend=-0.2, bottom=110)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.loopguard.figure4", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders of `sinkscope loopbench run`")
    parser.add_argument("--out", type=Path, default=Path("figures"))
    args = parser.parse_args(argv)
    started = time.perf_counter()
    result = measure(args.runs)
    made = [read_run(folder).settings for folder in args.runs]
    settings = {"runs": [{**s, "folder": folder.name} for folder, s in zip(args.runs, made, strict=True)]}
    text = record("loopguard-fig4", result, settings, started=started)
    save("loopguard_fig4", text, figure, args.out)
    for row in result["guards"]:
        early = "-" if row["early"] is None else f"{row['early']:.1%}"
        print(
            f"{row['model']}, {row['method']}: {row['mean']:.1f} interventions a run (mode {row['mode']}), first at "
            f"{row['first']:g}, early {early}, median gap {row['median_gap']}"
        )
    print(f"controls: {result['control']}")


if __name__ == "__main__":
    main()
