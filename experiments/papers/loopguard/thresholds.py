"""Whether the printed thresholds part real loops from honest answers, and what others would do (App. B)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.express as px

from experiments.papers.loopguard.caches import WHOLE
from experiments.papers.loopguard.runs import COUNT, NEW, Half, Source, share
from experiments.papers.loopguard.verdicts import honest_texts
from sinkscope.errors import SinkscopeError
from sinkscope.loops import Monitor, MonitorSettings
from sinkscope.loops.text.monitor import PaperSettings, Settings
from sinkscope.loops.text.signals import end_loop
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, measurement, optional
from sinkscope.results.style import figure_of

PRINTED, COPIES = "as printed", "copies alone"
CHANGED: Mapping[str, tuple[float, float]] = {
    "votes": (1, 3),
    "theta_ttr": (0.1, 0.4),
    "theta_cr": (0.06, 0.24),
    "theta_conf": (0.8, 0.95),
    "streak": (3, 12),
    "theta_nov": (0.01, 0.04),
    "stall": (2, 8),
    "warmup": (32, 128),
}
"""Thresholds of Appendix B, halved or doubled one at a time."""
Read = tuple[Sequence[int], Sequence[float]]
"""The tokens of a text, and the largest probability behind each."""


@dataclass(frozen=True)
class Rule:
    """A rule of detection."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class Alarms(
    Row,
    table="rules",
    title="alarms",
    most=8,
    note="Loops: outputs that end in three equal copies. Honest answers repeat because they were asked to.",
):
    """What a rule finds, on the half for reporting."""

    key: Rule
    found: Mean = column("loops", "share", "Loops in which it raises an alarm.")
    honest: Mean = column("honest answers", "share", "Honest answers in which it raises an alarm.")
    healthy: Mean | None = optional(
        "other outputs", "share", "Outputs that end in no loop in which it raises an alarm."
    )
    chosen: Mean = column("gain, choosing", "points", "Loops minus honest answers on the half for choosing.")

    @property
    def is_control(self) -> bool:
        """Whether it is the rule of copies, without votes."""
        return self.key.name == COPIES


@dataclass(frozen=True, kw_only=True)
class Thresholds(Result):
    """Alarms of the printed rule and of others on real loops, honest answers and other outputs.

    Attributes:
        loops: Number of loops on the half for reporting.
    """

    rules: tuple[Alarms, ...]
    loops: int

    def conclusion(self) -> str:
        """Return what the printed rule finds, beside the rule that the other half chooses and that of copies."""
        rows = {row.key.name: row for row in self.rules}
        printed, copies = rows[PRINTED], rows[COPIES]
        best = max((row for row in self.rules if not row.is_control), key=lambda row: row.chosen.value)
        other = "no change of one threshold does better on the half for choosing"
        if best is not printed:
            other = f"with {best.label}, chosen on the other half, {best.text('found')} and {best.text('honest')}"
        return (
            f"The printed rule finds {printed.text('found')} of {self.loops} loops and raises an alarm in "
            f"{printed.text('honest')} of honest answers; {other}. As a control, the rule of copies finds "
            f"{copies.text('found')} and takes {copies.text('honest')} of honest answers for loops."
        )

    def figure(self) -> Any:
        """Draw loops that are found over honest answers with an alarm."""
        honest = [row.honest.value for row in self.rules]
        found = [row.found.value for row in self.rules]
        names = [row.key.name for row in self.rules]
        fig = px.scatter(x=honest, y=found, color=names, symbol=names)
        fig.update_traces(marker_size=11)
        fig.update_layout(xaxis_title="honest answers with an alarm", yaxis_title="loops that are found")
        fig.update_xaxes(tickformat=".0%").update_yaxes(tickformat=".0%")
        return figure_of(fig, self, width=1000, height=560, bottom=150)


def rules() -> dict[str, Settings]:
    """Return the printed rule, that with one threshold halved or doubled, and the rule of copies."""
    made: dict[str, Settings] = {PRINTED: PaperSettings()}
    for name, values in CHANGED.items():
        for value in values:
            made[f"{name} {value:g}"] = PaperSettings(**{name: value})
    return made | {COPIES: MonitorSettings()}


def has_alarm(settings: Settings, text: Read) -> bool:
    """Return whether a rule raises an alarm in a text; tokens alone are read, and no words."""
    monitor = Monitor(settings)
    return any(monitor.update(token, largest).trigger for token, largest in zip(*text, strict=True))


def read(source: Source, half: Half) -> dict[str, list[Read]]:
    """Return loops, other outputs and honest answers of a half, with the largest probabilities."""
    texts: dict[str, list[Read]] = {"found": [], "healthy": [], "honest": []}
    for record in source.outputs([WHOLE], half)[WHOLE]:
        loops = record.ended == "cap" and end_loop(record.tokens) is not None
        largest = source.largest(source.ids_of(record), record.tokens)
        texts["found" if loops else "healthy"].append((record.tokens, largest))
    honest = honest_texts(half)
    encode = source.setup.tokenizer
    for number, text in enumerate(honest):
        source.setup.progress("honest answers", number, len(honest))
        ids = encode(text["answer"], add_special_tokens=False, verbose=False)["input_ids"]
        before = encode(text["prompt"], verbose=False)["input_ids"]
        texts["honest"].append((ids, source.largest(before, ids)))
    return texts


@measurement(loading="whole")
def thresholds(setup: Setup, *, count: Natural = COUNT, new: Natural = NEW, runs: Path | None = None) -> Thresholds:
    """Look for alarms of the printed rule, with thresholds halved and doubled, in outputs and honest answers.

    Args:
        count: Number of openings of a half, a multiple of four.
        new: New tokens.
        runs: Folder in which outputs stay for this paper's other artefacts.
    """
    source = Source(setup, count, new, runs)
    choose, report = read(source, "choose"), read(source, "report")
    if not choose["found"] or not report["found"]:
        raise SinkscopeError(f"none of {count} outputs of {new} tokens of a half loops: give more --count or --new")
    rows: list[Alarms] = []
    for name, settings in rules().items():
        means = {kind: share(has_alarm(settings, text) for text in texts) for kind, texts in report.items() if texts}
        chosen = {kind: share(has_alarm(settings, text) for text in choose[kind]) for kind in ("found", "honest")}
        gain = Mean(chosen["found"].value - chosen["honest"].value)
        rows.append(Alarms(key=Rule(name), chosen=gain, **means))
    return Thresholds(rules=tuple(rows), loops=len(report["found"]))
