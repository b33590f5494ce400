"""Figure 2 of the paper: how diversity collapses, and how long runs of models of several sizes survive.

    python -m experiments.loopguard.figure2 RUN ... [--out figures]

Each RUN is a folder of `sinkscope bench --task loops` whose methods include `full`. Runs at a temperature are the
control of the greedy ones. (a) Type-token ratio of the last W = 256 tokens (of all tokens before step 256) in the first
folder, with the collapse point, which is the first step from which the ratio stays below 0.2. Only whole windows count,
so no run collapses before step 256. (b) Share of runs that have not collapsed by a step. (c) Share of runs that have no
repetition by a step, that is, no alarm of the default monitor: a measure that does not depend on the vocabulary.
"""

from __future__ import annotations

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
from sinkscope.results.style import BLUE, COLOURS, GREEN, GREY, RED, figure_of, panels

CURVES, FIRST, SHOWN = 4, 16, 1000  # (a): runs of a folder, first and last step that are drawn
MEASURES = {"collapse": "(b) runs that have not collapsed", "alarm": "(c) runs without a repetition"}


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


def survived(points: Sequence[int | None], cap: int) -> Row:
    """The share of runs without a point by each step."""
    known = [point for point in points if point is not None]
    steps = sorted({0, *known, cap})
    shares = []
    for step in steps:
        shares.append(1 - sum(point <= step for point in known) / len(points))
    return {"points": list(points), "failed": len(known) / len(points), "steps": steps, "survival": shares}


def measure(folder: Path) -> Row:
    """Everything that is drawn of a folder."""
    found = read_run(folder)
    runs: list[BenchRecord] = [one for one in found if one.method == "full"]
    if not runs:
        raise SinkscopeError(f"{folder.name} has no runs of the method full")
    curves = []
    for one in runs[:: max(1, len(runs) // CURVES)][:CURVES]:
        curves.append([round(each, 4) for each in diversity(one.tokens[:SHOWN])[FIRST - 1 :]])
    cap = found.settings["max_new_tokens"]
    points = [collapse_point(one.tokens) for one in runs]
    return {
        "model": found.settings["model"]["name"],
        "set": runs[0].settings["set"],
        "temperature": runs[0].settings["temperature"],
        "runs": len(runs),
        "curves": curves,
        "collapse": survived(points, cap),
        "alarm": survived([one.metrics.get("alarm") for one in runs], cap),
    }


def name_of(row: Row) -> str:
    """A folder in words."""
    return f"{row['model']}, {row['set']}, temperature {row['temperature']:g}"


def figure(data: Row) -> Any:
    """The curves of diversity, and survival by folder: solid is greedy, dotted is the control."""
    rows = data["result"]["folders"]
    fig = panels(["(a) type-token ratio of the last 256 tokens", *MEASURES.values()], spacing=0.06)
    shown = [(rows[0], BLUE), *[(row, GREEN) for row in rows if row["temperature"]][:1]]
    for row, colour in shown:
        for number, curve in enumerate(row["curves"]):
            style = {"line_color": colour, "opacity": 0.6, "name": name_of(row), "showlegend": False}
            fig.add_scatter(x0=FIRST, y=curve, mode="lines", **style, row=1, col=1)
            point = row["collapse"]["points"][:: max(1, row["runs"] // CURVES)][number]
            if point is not None and point <= SHOWN:
                mark = {"marker_color": RED, "mode": "markers", "showlegend": False}
                fig.add_scatter(x=[point], y=[curve[point - FIRST]], **mark, row=1, col=1)
    fig.add_hline(THETA_TTR, line={"color": GREY, "dash": "dot", "width": 1}, row=1, col=1)
    models = list(dict.fromkeys((row["model"], row["set"]) for row in rows))
    said = []
    for row in rows:
        line = {"color": COLOURS[models.index((row["model"], row["set"]))], "shape": "hv"}
        line["dash"] = "dot" if row["temperature"] else "solid"
        for column, measure in enumerate(MEASURES, 2):
            found = row[measure]
            style = {"line": line, "name": name_of(row), "showlegend": column == 2, "legendgroup": name_of(row)}
            fig.add_scatter(x=found["steps"], y=found["survival"], mode="lines", **style, row=1, col=column)
        said.append(f"{row['alarm']['failed']:.0%} ({name_of(row)})")
    fig.update_xaxes(title_text="new tokens")
    fig.update_yaxes(**powers(), range=[-2, 0.02], row=1, col=1)
    for column in (2, 3):
        fig.update_yaxes(range=[-0.02, 1.03], tickformat=".0%", row=1, col=column)
    return figure_of(fig, None, f"Runs that repeat: {', '.join(said)}", width=1500, height=600, bottom=150)


def main(runs: Sequence[Path], *, out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        runs: Folders of runs of `sinkscope bench --task loops` with method full.
    """
    started = time.perf_counter()
    folders = [measure(folder) for folder in runs]
    settings = {"theta_ttr": THETA_TTR, "window": WINDOW}
    save("loopguard_fig2", record("loopguard-fig2", {"folders": folders}, settings, started=started), figure, out)


if __name__ == "__main__":
    run(main)
