"""Loops, diversity and interventions of outputs under caches and guards (Tables 1 and 3, Fig. 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plotly.subplots import make_subplots

from experiments.papers.loopguard.runs import COUNT, EARLY, METHODS, NEW, Source, acts_of, loops, mean, share
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, measurement, optional
from sinkscope.results.style import COLOURS, figure_of

CLAIMS = (("printed", "always", "fewer"), ("h2o", "random", "more"))
"""What the paper says of the loops of a method beside its control: a clock, and random slots."""


@dataclass(frozen=True, kw_only=True)
class Outputs(Row, table="methods", title="outputs", note=f"early: before {EARLY} generated tokens."):
    """What a method's outputs are, and how often it acted."""

    key: str
    loop: Mean = column("loop", "share", "Outputs that end in three equal copies, 24 tokens or more.")
    printed: Mean = column("Eq. 7", "share", "Outputs that are loops by the paper's rule, length included.")
    cr: Mean = column("CR", "number", "Compression ratio, mean over outputs.")
    ttr: Mean = column("TTR", "number", "Type-token ratio, mean over outputs.")
    length: Mean = column("tokens", "number", "Tokens of an output, mean.")
    acts: Mean = column("acts", "number", "Interventions of an output, mean; counted from events.")
    early: Mean | None = optional("early", "share", f"Interventions before {EARLY} generated tokens.")


@dataclass(frozen=True, kw_only=True)
class Methods(Result):
    """Outputs of the same openings under caches and guards.

    Attributes:
        counts: Interventions of each output, by guard.
        steps: Generated tokens at each intervention, by guard.
    """

    methods: tuple[Outputs, ...]
    counts: dict[str, tuple[int, ...]]
    steps: dict[str, tuple[int, ...]]

    def conclusion(self) -> str:
        """Return who leaves the fewest loops, and whether the paper's claims hold beside their controls."""
        rows = {row.key: row for row in self.methods}
        least = min(self.methods, key=lambda row: row.loop.value)
        said: list[str] = []
        for name, control, wanted in CLAIMS:
            if name in rows and control in rows:
                gap = rows[name].loop.value - rows[control].loop.value
                holds = gap < 0 if wanted == "fewer" else gap > 0
                words = f"{'' if holds else 'no '}{wanted} loops ({rows[name].text('loop')})"
                said.append(f"{name} leaves {words} than its control, {control} ({rows[control].text('loop')})")
        if "printed" in rows:
            said.append(f"printed acts {rows['printed'].text('acts')} times in an output")
        return (
            f"{self.methods[0].text('loop')} of outputs end in copies under {self.methods[0].key}, the fewest under "
            f"{least.key} ({least.text('loop')}). Beside controls, {'; '.join(said) or 'nothing was asked for'}."
        )

    def figure(self) -> Any:
        """Draw how many interventions outputs have and when they come, as the paper's Fig. 4."""
        titles = ["(a) interventions of an output", "(b) when they come"]
        fig: Any = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.09)
        for colour, name in zip(COLOURS, self.counts, strict=False):
            style: dict[str, Any] = {"marker_color": colour, "legendgroup": name, "name": name}
            for col, (values, size) in enumerate(((self.counts, 1), (self.steps, 50)), 1):
                bins = {"start": 0, "size": size}
                fig.add_histogram(
                    x=values[name], xbins=bins, histnorm="probability", showlegend=col == 1, **style, row=1, col=col
                )
        fig.update_xaxes(title_text="interventions (the paper: mostly 3 to 5)", row=1, col=1)
        fig.update_xaxes(title_text="generated tokens (the paper: mostly 800 to 1,300 of 2,500)", row=1, col=2)
        fig.update_yaxes(tickformat=".0%")
        return figure_of(fig, self, width=1200, height=520)


@measurement(loading="whole")
def methods(
    setup: Setup,
    *,
    methods: Sequence[Literal[*METHODS]] = tuple(METHODS),
    count: Natural = COUNT,
    new: Natural = NEW,
    runs: Path | None = None,
) -> Methods:
    """Continue openings of four kinds of text under caches and guards, in one batch each.

    Args:
        methods: Caches and guards; random slots are the control of h2o, acts by the clock that of the printed guard.
        count: Number of openings, a multiple of four.
        new: New tokens.
        runs: Folder in which outputs stay for this paper's other artefacts.
    """
    rows: list[Outputs] = []
    counts: dict[str, tuple[int, ...]] = {}
    steps: dict[str, tuple[int, ...]] = {}
    for name, records in Source(setup, count, new, runs).outputs(methods).items():
        acts = [acts_of(record) for record in records]
        each = [step for own in acts for step in own]
        if each:
            counts[name], steps[name] = tuple(map(len, acts)), tuple(each)
        means = {key: mean(float(record.metrics[key] or 0) for record in records) for key in ("cr", "ttr", "length")}
        means |= {"loop": share(map(loops, records)), "acts": mean(map(len, acts))}
        means["printed"] = share(bool(record.metrics["loop_paper"]) for record in records)
        early = Mean(sum(step < EARLY for step in each) / len(each)) if each else None
        rows.append(Outputs(key=name, early=early, **means))
    return Methods(methods=tuple(rows), counts=counts, steps=steps)
