"""How diversity falls in two stages, and what share of runs survives (Fig. 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from plotly.subplots import make_subplots

from experiments.papers.loopguard.caches import WHOLE
from experiments.papers.loopguard.runs import COUNT, NEW, Source, mean, share
from sinkscope.bench.record import BenchRecord
from sinkscope.loops.text.signals import THETA_TTR, WINDOW, compression_ratio, end_loop, type_token_ratio
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, measurement, optional
from sinkscope.results.style import COLOURS, GREY, figure_of

EVERY, STAGE = 16, 64
SIGNALS = {"ttr": type_token_ratio, "cr": compression_ratio}
GREEDY, DRAWN = "greedy", "drawn, temperature 1"


@dataclass(frozen=True)
class Way:
    """How tokens are chosen."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class Runs(
    Row,
    table="ways",
    title="runs",
    note=f"collapsed: the type-token ratio of the last {WINDOW} tokens is below {THETA_TTR} from some step to the end. "
    f"TTR and CR: of the first and the last {STAGE} tokens of the runs that collapsed.",
):
    """The runs of one way."""

    key: Way
    collapsed: Mean = column("collapsed", "share", "Runs that collapsed.")
    loop: Mean = column("end in copies", "share", "Runs that end in three equal copies, 24 tokens or more.")
    ttr: Mean | None = optional("TTR first", "number", "Of the first tokens of runs that collapsed.")
    ttr_end: Mean | None = optional("last", "number", "Of their last tokens.")
    cr: Mean | None = optional("CR first", "number", "Of the first tokens of runs that collapsed.")
    cr_end: Mean | None = optional("last", "number", "Of their last tokens.")
    median: Mean | None = optional("collapse", "number", "Generated tokens at the collapse, median.")


@dataclass(frozen=True, kw_only=True)
class Collapse(Result):
    """Diversity over generated tokens, and the share of runs that have not collapsed.

    Attributes:
        ways: Greedy runs and, as a control, drawn ones.
        ttr: Type-token ratio of the last 256 tokens every 16 tokens, mean over greedy and over drawn runs.
        cr: The same of the compression ratio.
        survival: Share of greedy runs that have not collapsed every 16 tokens, by model.
    """

    ways: tuple[Runs, ...]
    ttr: Float[np.ndarray, "way step"]
    cr: Float[np.ndarray, "way step"]
    survival: dict[str, tuple[float, ...]]

    def conclusion(self) -> str:
        """Return how many runs collapse, from which diversity to which, beside drawn runs."""
        greedy, drawn = self.ways
        fall = ""
        if greedy.ttr is not None:
            fall = f", from a type-token ratio of {greedy.text('ttr')} at first to {greedy.text('ttr_end')} at last"
        others = ""
        if len(self.survival) > 1:
            named = ", ".join(f"{line[-1]:.0%} with {name}" for name, line in self.survival.items())
            others = f" At the end {named} have not."
        return (
            f"{greedy.text('collapsed')} of greedy runs collapse{fall}; as a control, "
            f"{drawn.text('collapsed')} of drawn ones.{others}"
        )

    def figure(self) -> Any:
        """Draw diversity over tokens and the runs that survive, as the paper's Fig. 2."""
        titles = ["(a) diversity of the last 256 tokens", "(b) runs that have not collapsed"]
        fig: Any = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.09)
        for number, (name, lines) in enumerate((("TTR", self.ttr), ("CR", self.cr))):
            for line, way, dash in zip(lines, ("greedy", "drawn"), ("solid", "dot"), strict=True):
                style: dict[str, Any] = {"line": {"color": COLOURS[number], "dash": dash}, "mode": "lines"}
                fig.add_scatter(y=line, x0=EVERY, dx=EVERY, name=f"{name}, {way}", **style, row=1, col=1)
        fig.add_hline(THETA_TTR, line={"color": GREY, "dash": "dot"}, row=1, col=1)
        for number, (name, line) in enumerate(self.survival.items(), 2):
            style = {"line": {"color": COLOURS[number], "shape": "hv"}, "mode": "lines"}
            fig.add_scatter(y=line, x0=EVERY, dx=EVERY, name=name, **style, row=1, col=2)
        fig.update_xaxes(title_text="generated tokens")
        fig.update_yaxes(range=[0, 1.02]).update_yaxes(tickformat=".0%", row=1, col=2)
        return figure_of(fig, self, width=1200, height=520, legend=-0.18)


def collapse_point(ids: Sequence[int]) -> int | None:
    """Return the first step from which the ratio of the last 256 tokens stays below 0.2; None: there is none."""
    step = len(ids)
    while step >= WINDOW and type_token_ratio(ids[step - WINDOW : step]) < THETA_TTR:
        step -= 1
    return None if step == len(ids) else max(step + 1, WINDOW)


def curve(records: Sequence[BenchRecord], signal: Any) -> list[float]:
    """Return the mean of a signal of the last 256 tokens every 16 tokens, over the runs that are as long."""
    lines: list[list[float]] = []
    for record in records:
        ends = range(EVERY, len(record.tokens) + 1, EVERY)
        lines.append([signal(record.tokens[max(0, end - WINDOW) : end]) for end in ends])
    columns = [[value for value in step if value is not None] for step in zip_longest(*lines)]
    return [round(float(np.mean(column)), 4) for column in columns]


def row_of(way: str, records: Sequence[BenchRecord]) -> Runs:
    """Return the row of some runs."""
    points = [collapse_point(record.tokens) for record in records]
    fallen = [record.tokens for record, point in zip(records, points, strict=True) if point is not None]
    means: dict[str, Mean | None] = {}
    for name, signal in SIGNALS.items():
        if fallen:
            means[name] = mean(signal(tokens[:STAGE]) for tokens in fallen)
            means[f"{name}_end"] = mean(signal(tokens[-STAGE:]) for tokens in fallen)
    if fallen:
        means["median"] = Mean(float(np.median([point for point in points if point is not None])))
    loop = share(record.ended == "cap" and end_loop(record.tokens) is not None for record in records)
    return Runs(key=Way(way), collapsed=share(point is not None for point in points), loop=loop, **means)


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
    made = {GREEDY: source.outputs([WHOLE])[WHOLE], DRAWN: source.outputs([WHOLE], temperature=1.0)[WHOLE]}
    points = np.array([collapse_point(record.tokens) or np.inf for record in made[GREEDY]])
    steps = range(EVERY, new + 1, EVERY)
    survival = {setup.info().name: tuple(float((points > step).mean()) for step in steps)}
    for file in beside:
        other = Collapse.load(file)
        survival |= {other.model.name: other.survival[other.model.name]}
    arrays: dict[str, Any] = {}
    for name, signal in SIGNALS.items():
        lines = [curve(records, signal) for records in made.values()]
        arrays[name] = np.array([*zip_longest(*lines, fillvalue=np.nan)]).T
    return Collapse(ways=tuple(row_of(way, records) for way, records in made.items()), survival=survival, **arrays)
