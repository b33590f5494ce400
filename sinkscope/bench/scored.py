"""The table of a benchmark: a row for each set and method, scores beside costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

from sinkscope.bench.methods import FULL
from sinkscope.measure.margin import Interval
from sinkscope.results.mean import Mean
from sinkscope.results.table import Cell, Column, Kind, Row, column, detail, optional

RANDOM, SAMPLING = "random", "sampling"
NOT_RANKED = (FULL, RANDOM, SAMPLING)
"""Methods that a conclusion does not name as the best."""
ScoreText = Callable[[float, bool], str]


def metric(key: str, header: str, kind: Kind, meaning: str) -> Column:
    """Return the column of a further metric, which files and whole tables have."""
    return Column(key, header, kind, meaning, is_minor=True)


METRICS = (
    metric("cells", "cells\nread", "share", "Share of a prompt's causal cells that attention covers."),
    metric("cached_peak", "most\ncached", "count", "Largest number of cached tokens after a decoding step."),
    metric("agree", "same top\ntoken", "share", "Share of tokens whose top prediction is that of the full cache."),
    metric("first", "KL, first\ntoken", "nats", "KL divergence to the full cache at the first token of the answer."),
    metric(
        "prefix", "right until\nthe first error", "share", "Share of the right answer before the first wrong token."
    ),
    metric("loop_paper", "loop by the\npaper's rule", "share", "Answers that loop by the rule of LoopGuard's paper."),
    metric("eos", "ended", "share", "Answers that end by themselves."),
    metric("ttr", "type-token\nratio", "number", "Different tokens of an answer over all of them."),
    metric("cr", "compression\nratio", "number", "Size of an answer over its size compressed by zlib."),
    metric("length", "new\ntokens", "count", "Tokens of an answer."),
    metric("interventions", "acts of\nthe guard", "number", "Interventions of a guard in an answer."),
    metric("alarm", "first\nalarm", "count", "Median step of the first intervention, or of the monitor's first alarm."),
)
"""What costs and tasks measure beside the score."""


@dataclass(frozen=True)
class MethodKey:
    """A method on a set of prompts.

    Attributes:
        set: Name of the set.
        method: The method with its settings.
    """

    set: str
    method: str

    @property
    def name(self) -> str:
        """The method without its settings."""
        return self.method.partition(":")[0]

    def __str__(self) -> str:
        return self.method


def score_text(value: float, is_share: bool) -> str:
    """Return a score as text: a share in per cent, another one with two digits."""
    return f"{value:.0%}" if is_share else f"{value:.2g}"


def difference_text(value: float, is_share: bool) -> str:
    """Return a difference of scores as text, with its sign: that of shares in points."""
    return f"{100 * value:+.1f}" if is_share else f"{value:+.3g}"


@dataclass(frozen=True, kw_only=True)
class Scored(
    Row,
    table="methods",
    title="method",
    note="In brackets: 95% interval over prompts. Difference: prompt by prompt; with zero in its interval, too close "
    "to rank. Tokens read: cached tokens that a step attends to, mean over layers and heads. Time: seconds of a new "
    "token, its prompt included; answers of other lengths share the prompt's time otherwise.",
):
    """The score of a method on a set of prompts, and what it costs.

    Attributes:
        is_share: Whether the score is a share.
        score_interval: The 95 % interval of the score; None of fewer than three prompts.
        difference_interval: That of the difference.
        metrics: What was measured beside it, by the keys of `METRICS` or those of a task of another package.
    """

    key: MethodKey
    is_share: bool
    score_interval: Interval | None = None
    difference_interval: Interval | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    score: Mean = column("score", "number", "The task's main metric, mean over prompts, turns and seeds.")
    difference: Mean | None = optional(
        "difference\nto the first",
        "number",
        "Mean difference of the score to that of another method, prompt by prompt.",
    )
    read: Mean | None = optional(
        "tokens\nread", "count", "Cached tokens that a decoding step attends to, mean over layers and kv heads."
    )
    time: Mean | None = optional(
        "time,\nfull = 1", "number", "Seconds for an answer's token, its prompt included, over those of the full cache."
    )
    prompts: Mean = detail("prompts", "count", "Prompts that were answered.")
    answers: Mean = detail("answers", "count", "Answers that were scored: prompts times turns times seeds.")
    low: Mean | None = detail("score,\nlow end", "number", "Lower end of the 95 % interval of the score.")
    high: Mean | None = detail("score,\nhigh end", "number", "Upper end of that interval.")
    difference_low: Mean | None = detail("difference,\nlow end", "number", "Lower end of that of the difference.")
    difference_high: Mean | None = detail("difference,\nhigh end", "number", "Upper end of it.")

    @property
    def is_control(self) -> bool:
        """Whether it is no method that is ranked."""
        return self.key.name in NOT_RANKED

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        match self.key.name:
            case name if name == FULL:
                return "reference: the full cache"
            case name if name == RANDOM:
                return "control: random tokens are kept"
            case name if name == SAMPLING:
                return "control: sampling at temperature 1"
            case _:
                return ""

    @classmethod
    @cache
    def columns(cls) -> tuple[Column, ...]:
        """Return what was declared, with the further metrics."""
        return (*super().columns(), *METRICS)

    def values(self) -> dict[str, Mean | str]:
        """Return what was measured, with the further metrics."""
        values: dict[str, Mean | str] = {}
        for declared in super().columns():
            value = getattr(self, declared.key)
            if value is not None:
                values[declared.key] = value
        for name, value in self.metrics.items():
            values[name] = Mean(value)
        return values

    def column(self, key: str) -> Column:
        """Return the column of a key; that of a task of another package has its name as a header."""
        for declared in self.columns():
            if declared.key != key:
                continue
            if self.is_share and key == "score":
                return replace(declared, kind="share")
            return declared
        return metric(key, key.replace("_", " "), "number", "A metric of a task of another package.")

    def cell(self, column: Column) -> Cell:
        """Return a score and a difference with their intervals."""
        if column.key == "score":
            return self._with_interval(self.score, self.score_interval, score_text)
        if column.key == "difference" and self.difference is not None:
            return self._with_interval(self.difference, self.difference_interval, difference_text)
        value = self.values().get(column.key)
        return column.cell(value)

    def _with_interval(self, mean: Mean, interval: Interval | None, words: ScoreText) -> Cell:
        value = words(mean.value, self.is_share)
        if interval is None:
            return Cell(value)
        return Cell(value, f"({words(interval.low, self.is_share)} to {words(interval.high, self.is_share)})")
