"""How often guards act, when, and what is left of the loops (Table 3, Fig. 4)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plotly.subplots import make_subplots

from experiments.papers.loopguard.caches import DEFAULT, PRINTED, WHOLE, Method
from experiments.papers.loopguard.runs import COUNT, NEW, Source, acts_of, mean, share
from sinkscope.loops.text.signals import end_loop
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, measurement, optional
from sinkscope.results.style import COLOURS, GREY, figure_of

ALWAYS, P1 = "always on", "p1 alone"
SHOWN = (WHOLE, ALWAYS, P1, PRINTED, DEFAULT)
EARLY, BIN = 400, 50
OFTEN, TYPICAL = (3, 5), (800, 1300)
"""Interventions of most outputs, and where they come, in the paper (section 6.4)."""


@dataclass(frozen=True, kw_only=True)
class Acts(Row, table="guards", title="guards", note=f"early: before {EARLY} generated tokens."):
    """What a guard did."""

    key: Method
    loop: Mean = column("loop", "share", "Outputs that end in three equal copies, 24 tokens or more.")
    acts: Mean = column("interventions", "number", "Interventions of an output, mean; counted from events.")
    early: Mean | None = optional("early", "share", f"Interventions before {EARLY} generated tokens.")
    acted: Mean = column("outputs with one", "share", "Outputs with an intervention.")


@dataclass(frozen=True, kw_only=True)
class Interventions(Result):
    """Interventions of guards: how many in an output, when, and loops that are left.

    Attributes:
        counts: Interventions of each output, by guard.
        steps: Generated tokens at each intervention, by guard.
    """

    guards: tuple[Acts, ...]
    counts: dict[str, tuple[int, ...]]
    steps: dict[str, tuple[int, ...]]

    def conclusion(self) -> str:
        """Return what the printed guard leaves and how often it acts, beside a clock."""
        rows = {row.key.name: row for row in self.guards}
        printed, clock = rows[PRINTED], rows[ALWAYS]
        early = f", {printed.text('early')} of them early" if printed.early else ""
        least = min((row for row in self.guards if row.key.name != WHOLE), key=lambda row: row.loop.value)
        return (
            f"The printed guard acts {printed.text('acts')} times in an output{early}, and leaves "
            f"{printed.text('loop')} loops of {rows[WHOLE].text('loop')}; a clock, the control, leaves "
            f"{clock.text('loop')} with {clock.text('acts')} acts. The fewest loops are left by {least.label} "
            f"({least.text('loop')})."
        )

    def figure(self) -> Any:
        """Draw both distributions, as the paper's Fig. 4, with its ranges in grey."""
        titles = ["(a) interventions of an output", "(b) when they come"]
        fig: Any = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.09)
        for number, name in enumerate(self.counts):
            style: dict[str, Any] = {"marker_color": COLOURS[number], "legendgroup": name, "name": name}
            style["histnorm"] = "probability"
            fig.add_histogram(x=self.counts[name], xbins={"size": 1}, **style, row=1, col=1)
            bins = {"start": 0, "size": BIN}
            fig.add_histogram(x=self.steps[name], xbins=bins, **style, showlegend=False, row=1, col=2)
        shade: dict[str, Any] = {"fillcolor": GREY, "opacity": 0.2, "line_width": 0, "layer": "below"}
        shade |= {"annotation_text": "most in the paper", "annotation_position": "top left"}
        fig.add_vrect(OFTEN[0] - 0.5, OFTEN[1] + 0.5, **shade, row=1, col=1)
        fig.add_vrect(*TYPICAL, **shade, row=1, col=2)
        fig.update_xaxes(title_text="interventions", row=1, col=1)
        fig.update_xaxes(title_text="generated tokens", row=1, col=2)
        fig.update_yaxes(tickformat=".0%").update_yaxes(title_text="outputs", row=1, col=1)
        fig.update_yaxes(title_text="interventions", row=1, col=2)
        return figure_of(fig, self, width=1200, height=520)


@measurement(loading="whole")
def interventions(
    setup: Setup, *, count: Natural = COUNT, new: Natural = NEW, runs: Path | None = None
) -> Interventions:
    """Count what guards do on openings of four kinds of text, from the events of their runs.

    Args:
        count: Number of openings, a multiple of four.
        new: New tokens.
        runs: Folder in which outputs stay for this paper's other artefacts.
    """
    rows: list[Acts] = []
    counts: dict[str, tuple[int, ...]] = {}
    steps: dict[str, tuple[int, ...]] = {}
    for name, records in Source(setup, count, new, runs).outputs(SHOWN).items():
        acts = [acts_of(record) for record in records]
        each = [step for own in acts for step in own]
        loop = share(record.ended == "cap" and end_loop(record.tokens) is not None for record in records)
        early = Mean(sum(step < EARLY for step in each) / len(each)) if each else None
        rows.append(
            Acts(
                key=Method(name),
                loop=loop,
                acts=mean(map(len, acts)),
                early=early,
                acted=share(bool(own) for own in acts),
            )
        )
        if name != WHOLE:
            counts[name], steps[name] = tuple(map(len, acts)), tuple(each)
    return Interventions(guards=tuple(rows), counts=counts, steps=steps)
