"""Figure 2 of the paper: how diversity collapses, and when runs collapse.

    python -m experiments.loopguard.figure2 RUN [--out figures]

RUN is a folder of `sinkscope bench --task loops` whose methods include `full`.

(a) Type-token ratio of the last W = 256 tokens (of all tokens before step 256) over the first 1,000 steps, with the
collapse point, which is the first step from which the ratio stays below 0.2. The control is ordinary text in the same
tokens. (b) Share of runs that have not collapsed by a step, for W = 256 and for W = 64. Only whole windows count, so
no run can collapse before step W.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.drawn import powers, save
from experiments.record import Row, record
from experiments.script import run
from sinkscope.bench.record import BenchRecord, read_run
from sinkscope.errors import SinkscopeError
from sinkscope.loops.text.signals import THETA_TTR, WINDOW
from sinkscope.models.text import typical_text
from sinkscope.opening.load import load
from sinkscope.results.style import BLUE, GREEN, GREY, ORANGE, RED, figure_of

WINDOWS = (WINDOW, 64)
CURVES, FIRST, SHOWN = 8, 16, 1000  # (a): runs, first and last step that are drawn


def diversity(ids: Sequence[int], window: int = WINDOW) -> list[float]:
    """Type-token ratio of the last `window` tokens at every step; shorter windows at first."""
    rows = []
    for step in range(1, len(ids) + 1):
        rows.append(len(set(ids[max(0, step - window) : step])) / min(step, window))
    return rows


def collapse_point(ids: Sequence[int], window: int = WINDOW, theta: float = THETA_TTR) -> int | None:
    """First step from which that ratio stays below `theta` to the end; None if there is none.

    Only full windows count, so it is at least `window`; the repetition itself began up to `window` tokens earlier.
    """
    values = diversity(ids, window)
    step = len(values)
    while step >= window and values[step - 1] < theta:
        step -= 1
    first_low = max(step + 1, window)
    if first_low > len(values):
        return None
    return first_low


def full_runs(folder: Path) -> list[BenchRecord]:
    """Records of method "full"."""
    found = []
    for r in read_run(folder):
        if r.method == "full":
            found.append(r)
    if not found:
        raise SinkscopeError(f"{folder.name} has no runs of the method full")
    return found


def survived(runs: Sequence[BenchRecord], window: int, cap: int) -> Row:
    """Collapse points and the share of runs without one by each step."""
    points = []
    for r in runs:
        points.append(collapse_point(r.tokens, window))
    steps = sorted({*range(0, min(cap, 640), 16), *range(0, cap + 1, 50), cap})
    known = []
    for p in points:
        if p is not None:
            known.append(p)
    median = None
    if known:
        median = statistics.median(known)
    survival = []
    for step in steps:
        count = 0
        for each in points:
            count += each is None or each > step
        survival.append(round(count / len(points), 4))
    return {
        "window": window,
        "points": points,
        "collapsed": len(known) / len(points),
        "median": median,
        "steps": steps,
        "survival": survival,
    }


def curve(ids: Sequence[int]) -> Row:
    """Diversity at every fourth step; windows are shorter before step W."""
    values = diversity(ids)
    steps = list(range(FIRST, min(len(values), SHOWN) + 1, 4))
    ttr = []
    for s in steps:
        ttr.append(round(values[s - 1], 4))
    return {"steps": steps, "ttr": ttr, "collapse": collapse_point(ids)}


def measure(runs: Sequence[BenchRecord], ordinary: list[int]) -> Row:
    """Everything that is drawn."""
    cap = max(len(one.tokens) for one in runs)
    curves = []
    for one in runs[:: max(1, len(runs) // CURVES)][:CURVES]:
        curves.append({"prompt": one.prompt, **curve(one.tokens)})
    survival = []
    for window in WINDOWS:
        survival.append(survived(runs, window, cap))
    return {"curves": curves, "control": curve(ordinary[:cap]), "runs": len(runs), "survival": survival}


def figure(data: Row) -> Any:
    """Both panels."""
    result = data["result"]
    from plotly.subplots import make_subplots

    fig: Any = make_subplots(
        rows=1,
        cols=2,
        horizontal_spacing=0.09,
        subplot_titles=["(a) type-token ratio of the last 256 tokens", "(b) runs that have not collapsed"],
    )
    for i, one in enumerate(result["curves"]):
        fig.add_scatter(
            x=one["steps"],
            y=one["ttr"],
            mode="lines",
            line={"color": BLUE, "width": 1 + len(result["curves"]) - i},
            opacity=0.5,
            name="generated",
            legendgroup="generated",
            showlegend=i == 0,
            hovertext=one["prompt"],
            row=1,
            col=1,
        )
        if one["collapse"] is not None:
            at = min(range(len(one["steps"])), key=lambda k: abs(one["steps"][k] - one["collapse"]))
            fig.add_scatter(
                x=[one["collapse"]],
                y=[one["ttr"][at]],
                mode="markers",
                name="collapse point",
                legendgroup="collapse",
                showlegend=i == 0,
                marker={"color": RED, "size": 9, "symbol": "circle-open", "line": {"width": 2}},
                row=1,
                col=1,
            )
    control = result["control"]
    fig.add_scatter(
        x=control["steps"],
        y=control["ttr"],
        mode="lines",
        name="ordinary text (control)",
        line={"color": GREEN, "width": 2},
        row=1,
        col=1,
    )
    fig.add_hline(THETA_TTR, line={"color": GREY, "dash": "dot", "width": 1}, row=1, col=1)
    for one, dash in zip(result["survival"], ("solid", "dot"), strict=True):
        fig.add_scatter(
            x=one["steps"],
            y=one["survival"],
            mode="lines",
            name=f"W = {one['window']}",
            line={"color": ORANGE, "dash": dash, "shape": "hv"},
            row=1,
            col=2,
        )
    fig.update_xaxes(title_text="new tokens")
    fig.update_xaxes(range=[0, SHOWN], row=1, col=1)
    fig.update_xaxes(range=[0, 640], row=1, col=2)
    fig.update_yaxes(**powers(), range=[-2, 0.02], row=1, col=1)
    fig.update_yaxes(range=[-0.02, 1.03], tickformat=".0%", row=1, col=2)
    told = []
    for one in result["survival"]:
        told.append(f"{one['collapsed']:.0%} with W = {one['window']} (median step {one['median']})")
    found = f"Of {result['runs']} runs, diversity collapses in {', in '.join(told)}"
    if control["collapse"] is None:
        found = f"{found}; in ordinary text it does not"
    return figure_of(fig, None, found, width=1500, height=560)


def main(folder: Path, *, out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        folder: A run of `sinkscope bench --task loops` with method full.
    """
    started = time.perf_counter()
    tokenizer = load(None, backend="hf").tokenizer
    ordinary = tokenizer(typical_text(), add_special_tokens=False, verbose=False)["input_ids"]
    result = measure(full_runs(folder), ordinary)
    settings = {"theta_ttr": THETA_TTR, "windows": WINDOWS, "bench": read_run(folder).settings}
    save("loopguard_fig2", record("loopguard-fig2", result, settings, started=started), figure, out)
    for one in result["survival"]:
        print(f"W = {one['window']}: {one['collapsed']:.0%} of {result['runs']} runs, median step {one['median']}")


if __name__ == "__main__":
    run(main)
