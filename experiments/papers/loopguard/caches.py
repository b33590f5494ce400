"""Loop rate, diversity and length of outputs under caches and guards (Table 1, Fig. 1 b)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.express as px

from experiments.papers.loopguard.runs import COUNT, NEW, Source, mean, share
from sinkscope.bench.record import BenchRecord
from sinkscope.loops.text.signals import end_loop
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, measurement
from sinkscope.results.style import figure_of

WHOLE, H2O, RANDOM, PRINTED, DEFAULT = "whole cache", "H2O", "random", "as printed", "default"
SHOWN = (WHOLE, "StreamingLLM", H2O, RANDOM, PRINTED, DEFAULT)


@dataclass(frozen=True)
class Method:
    """A cache or a guard."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class Outputs(
    Row,
    table="methods",
    title="outputs",
    note="random: random slots, the control of H2O. The default guard cuts and steers here, and takes nothing back.",
):
    """What a method's outputs are."""

    key: Method
    loop: Mean = column("loop", "share", "Outputs that end in three equal copies, 24 tokens or more.")
    printed: Mean = column("loop by Eq. 7", "share", "Outputs that are loops by the paper's rule, length included.")
    cr: Mean = column("CR", "number", "Compression ratio, mean over outputs.")
    ttr: Mean = column("TTR", "number", "Type-token ratio, mean over outputs.")
    length: Mean = column("tokens", "number", "Tokens of an output, mean.")


@dataclass(frozen=True, kw_only=True)
class Caches(Result):
    """Loops, diversity and length of outputs under caches and guards, on the same openings."""

    methods: tuple[Outputs, ...]

    def row(self, name: str) -> Outputs:
        """Return the row of a method."""
        return next(row for row in self.methods if row.key.name == name)

    def conclusion(self) -> str:
        """Return how often outputs loop, and whether H2O's are less varied than those of random slots."""
        whole, h2o, random = self.row(WHOLE), self.row(H2O), self.row(RANDOM)
        guards = (
            f"{self.row(PRINTED).text('loop')} under the printed guard, {self.row(DEFAULT).text('loop')} under ours"
        )
        said = "more" if h2o.loop.value > max(whole.loop.value, random.loop.value) else "not more"
        return (
            f"With the whole cache {whole.text('loop')} of outputs end in copies, {guards}. H2O has "
            f"{said} loops ({h2o.text('loop')}, CR {h2o.text('cr')}) than the whole cache (CR {whole.text('cr')}) and, "
            f"as a control, random slots ({random.text('loop')}, CR {random.text('cr')})."
        )

    def figure(self) -> Any:
        """Draw every number by method."""
        values, names, kinds, margins = [], [], [], []
        for row in self.methods:
            for kind, number in (("loop", row.loop), ("loop by Eq. 7", row.printed), ("CR", row.cr), ("TTR", row.ttr)):
                values.append(number.value)
                margins.append(number.margin or 0.0)
                names.append(row.key.name)
                kinds.append(kind)
        fig = px.bar(x=names, y=values, color=kinds, error_y=margins, barmode="group")
        fig.update_layout(xaxis_title="", yaxis_title="share or ratio", legend_title="")
        return figure_of(fig, self, width=1000, height=520)


def row_of(name: str, records: Sequence[BenchRecord]) -> Outputs:
    """Return the row of a method."""
    means: dict[str, Mean] = {}
    for number in ("cr", "ttr", "length"):
        means[number] = mean(float(record.metrics[number] or 0.0) for record in records)
    loop = share(record.ended == "cap" and end_loop(record.tokens) is not None for record in records)
    printed = share(bool(record.metrics["loop_paper"]) for record in records)
    return Outputs(key=Method(name), loop=loop, printed=printed, **means)


@measurement(loading="whole")
def caches(setup: Setup, *, count: Natural = COUNT, new: Natural = NEW, runs: Path | None = None) -> Caches:
    """Continue openings of four kinds of text under caches and guards, in one batch each.

    Args:
        count: Number of openings, a multiple of four.
        new: New tokens.
        runs: Folder in which outputs stay for this paper's other artefacts.
    """
    outputs = Source(setup, count, new, runs).outputs(SHOWN)
    return Caches(methods=tuple(row_of(name, records) for name, records in outputs.items()))
