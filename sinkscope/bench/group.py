"""A row of a benchmark's table: all answers of one method to one set; and the difference between two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import hypot, isnan, nan

import numpy as np

from sinkscope.bench.methods import Method
from sinkscope.bench.record import Metrics
from sinkscope.bench.scores import PERCENT
from sinkscope.bench.task import task_class
from sinkscope.measure.margin import DIFFERENCES, SCORES, Interval, difference_of, interval_of


@dataclass(frozen=True)
class BenchGroup:
    """All answers of one method to one set by one model, under the same conditions.

    Attributes:
        task: Name of the task.
        model: Name of the model.
        set: Name of the set.
        temperature: Sampling temperature.
        method: The method with its settings.
        answers: Number of answers.
        score: Mean of the task's main metric over prompts.
        low: Lower end of its 95 % interval over prompts; NaN of fewer than three.
        high: Upper end of that interval.
        differs: Conditions in which this run differs from others of the table, such as the dtype.
        scores: The score of each prompt, mean over its turns and seeds.
        parts: Mean of the main metric for each part of the set.
        metrics: What it cost, and the task's further metrics; None where no answer has it, or the full cache, with
            which `time` compares, was not run.
    """

    task: str
    model: str
    set: str
    temperature: float
    method: Method
    answers: int
    score: float
    low: float
    high: float
    differs: dict[str, str] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)

    @property
    def place(self) -> tuple[str, ...]:
        """What groups have in common whose methods are compared."""
        return self.task, self.set, self.model, *map("=".join, self.differs.items())

    @property
    def title(self) -> str:
        """The task, its set of prompts if that has a name of its own, and in what its run differs from others."""
        named = [f"{self.task} {self.set}"]
        if self.set.startswith(self.task):
            named = [self.set]
        return " ".join([*named, *map("=".join, self.differs.items())])

    @property
    def margin(self) -> float | None:
        """The distance from the score to the farther end of its interval."""
        if isnan(self.low):
            return None
        return max(self.high - self.score, self.score - self.low)


def mean_score(task: str, scores: Sequence[float]) -> Interval:
    """Return the mean of the scores of a task's prompts with its interval; NaN of fewer than three."""
    if not scores:
        return Interval(nan, nan, nan)
    interval = interval_of(np.array(scores), SCORES if are_shares(task, scores) else None)
    return interval or Interval(float(np.mean(scores)), nan, nan)


def are_shares(task: str, scores: Sequence[float]) -> bool:
    """Return whether scores lie between 0 and 1 by what they are."""
    return task_class(task).main in PERCENT and min(scores) >= 0 and max(scores) <= 1


def difference(one: BenchGroup, other: BenchGroup) -> Interval | None:
    """Return by how much the score of a group is larger than that of another one.

    It is the mean of paired differences where both answered the same prompts. Otherwise their own intervals make that
    of the difference.

    Returns:
        None where a margin is unknown: a difference is then not judged.
    """
    shares = are_shares(one.task, [one.score, other.score, *one.scores.values(), *other.scores.values()])
    paired = difference_of(one.scores, other.scores, DIFFERENCES if shares else None)
    if paired is not None:
        return paired
    if one.margin is None or other.margin is None:
        return None
    mean, margin = one.score - other.score, hypot(one.margin, other.margin)
    return Interval(mean, mean - margin, mean + margin)
