"""How diversity falls in two stages, and what share of runs survives (Fig. 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from plotly.subplots import make_subplots

from experiments.papers.loopguard.runs import COUNT, NEW, Source, mean, share
from sinkscope.bench.record import BenchRecord
from sinkscope.loops.text.signals import THETA_TTR, WINDOW, compression_ratio, type_token_ratio
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, measurement, optional
from sinkscope.results.style import COLOURS, GREY, figure_of

EVERY, STAGE = 16, 64
GREEDY, DRAWN = "greedy", "drawn"
SIGNALS = {"ttr": type_token_ratio, "cr": compression_ratio}


@dataclass(frozen=True, kw_only=True)
class Runs(
    Row,
    table="ways",
    title="runs",
    note=f"collapsed: the type-token ratio of the last {WINDOW} tokens is below {THETA_TTR} from some step to the end. "
    f"The others are of the first and the last {STAGE} tokens of the runs that collapsed.",
):
    """The runs of one way."""

    key: str
    collapsed: Mean = column("collapsed", "share", "Runs that collapsed.")
    ttr: Mean | None = optional("TTR first", "number", "Of the first tokens of runs that collapsed.")
    ttr_end: Mean | None = optional("TTR last", "number", "Of their last tokens.")
    cr: Mean | None = optional("CR first", "number", "Of the first tokens of runs that collapsed.")
    cr_end: Mean | None = optional("CR last", "number", "Of their last tokens.")


@dataclass(frozen=True, kw_only=True)
class Collapse(Result):
    """Diversity over generated tokens, and the share of runs that have not collapsed.

    Attributes:
        ways: Greedy runs and, as a control, runs drawn at a temperature of 1.
        curves: TTR and CR of the last 256 tokens every 16 tokens, mean over runs, by way.
        survival: Share of greedy runs that have not collapsed every 16 tokens, by model.
    """

    ways: tuple[Runs, ...]
    curves: dict[str, tuple[float, ...]]
    survival: dict[str, tuple[float, ...]]

    def conclusion(self) -> str:
        """Return how many runs collapse, from which diversity to which, beside drawn runs."""
        greedy, drawn = self.ways
        fall = ""
        if greedy.ttr is not None:
            fall = f", from a type-token ratio of {greedy.text('ttr')} at first to {greedy.text('ttr_end')} at last"
        left = ", ".join(f"{line[-1]:.0%} of {name}" for name, line in self.survival.items())
        return (
            f"{greedy.text('collapsed')} of greedy runs collapse{fall}; as a control, {drawn.text('collapsed')} of "
            f"drawn ones. Greedy runs that survive: {left}."
        )

    def figure(self) -> Any:
        """Draw diversity over tokens and the runs that survive, as the paper's Fig. 2."""
        titles = ["(a) diversity of the last 256 tokens", "(b) runs that have not collapsed"]
        fig: Any = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.09)
        lines = [*((name, line, 1) for name, line in self.curves.items())]
        lines += ((name, line, 2) for name, line in self.survival.items())
        for colour, (name, line, col) in zip(COLOURS, lines, strict=False):
            line_style = {"color": colour, "shape": "hv" if col == 2 else "linear"}
            style: dict[str, Any] = {"mode": "lines", "line": line_style, "name": name}
            fig.add_scatter(y=line, x0=EVERY, dx=EVERY, **style, row=1, col=col)
        fig.add_hline(THETA_TTR, line={"color": GREY, "dash": "dot"}, row=1, col=1)
        fig.update_xaxes(title_text="generated tokens").update_yaxes(range=[0, 1.02])
        fig.update_yaxes(tickformat=".0%", row=1, col=2)
        return figure_of(fig, self, width=1200, height=520, legend=-0.18)


def collapse_point(ids: Sequence[int]) -> int | None:
    """Return the first step from which the ratio of the last 256 tokens stays below 0.2; None: there is none."""
    step = len(ids)
    while step >= WINDOW and type_token_ratio(ids[step - WINDOW : step]) < THETA_TTR:
        step -= 1
    return None if step == len(ids) else max(step + 1, WINDOW)


def curve(records: Sequence[BenchRecord], signal: Any) -> tuple[float, ...]:
    """Return the mean of a signal of the last 256 tokens every 16 tokens, over the runs that are as long."""
    lines: list[list[float]] = []
    for record in records:
        ends = range(EVERY, len(record.tokens) + 1, EVERY)
        lines.append([signal(record.tokens[max(0, end - WINDOW) : end]) for end in ends])
    return tuple(round(float(np.nanmean(step)), 4) for step in zip_longest(*lines, fillvalue=np.nan))


def row_of(way: str, records: Sequence[BenchRecord]) -> Runs:
    """Return the row of some runs."""
    fallen = [record.tokens for record in records if collapse_point(record.tokens) is not None]
    means: dict[str, Mean] = {}
    for name, signal in SIGNALS.items() if fallen else ():
        means[name] = mean(signal(tokens[:STAGE]) for tokens in fallen)
        means[f"{name}_end"] = mean(signal(tokens[-STAGE:]) for tokens in fallen)
    return Runs(key=way, collapsed=share(record.tokens in fallen for record in records), **means)


@measurement(loading="whole")
def collapse(
    setup: Setup,
    *,
    count: Natural = COUNT,
    new: Natural = NEW,
    runs: Path | None = None,
    beside: Sequence[Path] = (),
) -> Collapse:
    """Follow diversity while openings of four kinds of text are continued greedily, and, as a control, drawn.

    Args:
        count: Number of openings, a multiple of four.
        new: New tokens.
        runs: Folder in which outputs stay for this paper's other artefacts.
        beside: Results of this measurement with other models, whose survival is drawn beside.
    """
    source = Source(setup, count, new, runs)
    made = {GREEDY: source.outputs(["whole"])["whole"], DRAWN: source.outputs(["whole"], heat=1.0)["whole"]}
    points = np.array([collapse_point(record.tokens) or np.inf for record in made[GREEDY]])
    survival = {setup.info().name: tuple(float((points > step).mean()) for step in range(EVERY, new + 1, EVERY))}
    for other in map(Collapse.load, beside):
        survival |= {other.model.name: other.survival[other.model.name]}
    curves: dict[str, tuple[float, ...]] = {}
    for name, signal in SIGNALS.items():
        curves |= {f"{name.upper()}, {way}": curve(records, signal) for way, records in made.items()}
    return Collapse(ways=tuple(row_of(*way) for way in made.items()), curves=curves, survival=survival)
