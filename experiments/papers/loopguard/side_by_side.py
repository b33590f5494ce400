"""A loop's text under every cache and guard, with the values of the printed detector beside it (App. D)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from plotly.subplots import make_subplots

from experiments.papers.loopguard.caches import DEFAULT, PRINTED, SHOWN, WHOLE, Method
from experiments.papers.loopguard.runs import COUNT, NEW, Source, acts_of
from sinkscope.errors import SinkscopeError
from sinkscope.loops.text.monitor import Monitor
from sinkscope.loops.text.signals import THETA_CR, THETA_TTR, end_loop
from sinkscope.loops.text.votes import PaperSettings, VoteRule
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, measurement, optional
from sinkscope.results.style import COLOURS, GREY, figure_of

EXCERPT = 160  # characters
EVERY = 8
SIGNALS = ("ttr", "cr", "sure", "stalled", "copies")


class SeenRule(VoteRule):
    """The printed rule, which shows the values of its signals."""

    def values(self, ttr: float) -> list[float]:
        """Return what the last token's signals are."""
        return [ttr, self._cr, float(self._confident_steps), float(self._stalled_steps), float(self._tail_steps)]


@dataclass(frozen=True, kw_only=True)
class Side(
    Row,
    table="sides",
    title="the same opening",
    note=f"The detector votes at TTR below {THETA_TTR}, CR below {THETA_CR} and six steps above 0.9; values of the "
    "last token, read with the whole cache.",
):
    """What one method wrote, and what the printed detector says of it."""

    key: Method
    loops: str = column("ends", "word", "Whether it ends in three equal copies, by itself, or goes on.")
    acts: Mean = column("acts", "count", "Interventions.")
    alarm: Mean | None = optional("alarm", "count", "Generated tokens at the detector's first alarm.")
    ttr: Mean = column("TTR", "number", "Type-token ratio of the last 256 tokens.")
    cr: Mean = column("CR", "number", "Compression ratio of the last 256 tokens.")
    sure: Mean = column("above 0.9", "count", "Consecutive steps whose largest probability is above 0.9.")
    stalled: Mean = column("stalled", "count", "Consecutive steps without new 4-grams.")
    copies: Mean = column("in copies", "count", "Consecutive steps at the end of a repetition.")
    words: str = column("last words", "word", "The end of the text.")


@dataclass(frozen=True, kw_only=True)
class SideBySide(Result):
    """The outputs of one opening whose text loops with the whole cache, under every method.

    Attributes:
        opening: The opening.
        signals: TTR and CR of the last 256 tokens at every eighth token, by method.
    """

    sides: tuple[Side, ...]
    opening: str
    signals: Float[np.ndarray, "side signal step"]

    def conclusion(self) -> str:
        """Return who still loops, and when the detector sees the loop of the whole cache."""
        rows = {row.key.name: row for row in self.sides}
        loops = [name for name, row in rows.items() if row.loops == "copies"]
        whole = rows[WHOLE]
        seen = "raises no alarm" if whole.alarm is None else f"raises its alarm after {whole.text('alarm')} tokens"
        return (
            f"Of one opening that loops with the whole cache (TTR {whole.text('ttr')}, CR {whole.text('cr')} at the "
            f"end; the detector {seen}), these end in copies: {', '.join(loops)}. The printed guard acts "
            f"{rows[PRINTED].text('acts')} times, the default {rows[DEFAULT].text('acts')}."
        )

    def figure(self) -> Any:
        """Draw both ratios of the detector over tokens, a line for each method."""
        fig: Any = make_subplots(1, 2, subplot_titles=["TTR", "CR"], horizontal_spacing=0.07)
        for number, (row, lines) in enumerate(zip(self.sides, self.signals, strict=True)):
            for col, line in enumerate(lines, 1):
                style = {"mode": "lines", "line_color": COLOURS[number], "name": row.label, "showlegend": col == 1}
                fig.add_scatter(y=line, dx=EVERY, x0=EVERY, legendgroup=row.label, **style, row=1, col=col)
        for col, theta in enumerate((THETA_TTR, THETA_CR), 1):
            fig.add_hline(theta, line={"color": GREY, "dash": "dot"}, row=1, col=col)
        fig.update_xaxes(title_text="generated tokens")
        return figure_of(fig, self, width=1200, height=520, legend=-0.18)


def watched(tokens: Sequence[int], largest: Sequence[float]) -> tuple[list[list[float]], int | None]:
    """Return the values of the printed detector's signals at every token, and the step of its first alarm."""
    monitor = Monitor(PaperSettings())
    rule = monitor.rule = SeenRule(PaperSettings())
    values: list[list[float]] = []
    alarm: int | None = None
    for token, sure in zip(tokens, largest, strict=True):
        step = monitor.update(token, sure)
        values.append(rule.values(step.ttr))
        if step.trigger and alarm is None:
            alarm = step.step
    return values, alarm


@measurement(loading="whole")
def side_by_side(setup: Setup, *, count: Natural = COUNT, new: Natural = NEW, runs: Path | None = None) -> SideBySide:
    """Show the outputs of the first opening that loops with the whole cache, and the detector's values at their ends.

    Args:
        count: Number of openings, a multiple of four.
        new: New tokens.
        runs: Folder in which outputs stay for this paper's other artefacts.
    """
    source = Source(setup, count, new, runs)
    outputs = source.outputs(SHOWN)
    looping = [record.ended == "cap" and end_loop(record.tokens) is not None for record in outputs[WHOLE]]
    if True not in looping:
        raise SinkscopeError(f"none of {count} outputs of {new} tokens ends in a loop: give more --new or --count")
    at = looping.index(True)
    before = source.ids_of(outputs[WHOLE][at])
    rows: list[Side] = []
    lines: list[Float[np.ndarray, "signal step"]] = []
    for name, records in outputs.items():
        record = records[at]
        values, alarm = watched(record.tokens, source.largest(before, record.tokens))
        ends = "copies" if end_loop(record.tokens) is not None else "goes on"
        means = {key: Mean(value) for key, value in zip(SIGNALS, values[-1], strict=True)}
        row = {"loops": "by itself" if record.ended == "eos" else ends, "acts": Mean(float(len(acts_of(record))))}
        words = " ".join(record.text.split())[-EXCERPT:]
        first = None if alarm is None else Mean(float(alarm))
        rows.append(Side(key=Method(name), alarm=first, words=words, **row, **means))
        line = np.full((2, new // EVERY), np.nan)
        seen = np.array(values)[EVERY - 1 :: EVERY, :2].T.round(4)
        line[:, : seen.shape[1]] = seen
        lines.append(line)
    opening = setup.tokenizer.decode(before, skip_special_tokens=True)
    return SideBySide(sides=tuple(rows), opening=opening, signals=np.array(lines))
