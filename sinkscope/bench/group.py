"""A row of a benchmark's table: all answers of one method to one set."""

from __future__ import annotations

from dataclasses import dataclass, field

from sinkscope.bench.record import Metrics


@dataclass(frozen=True)
class BenchGroup:
    """All answers of one method to one set by one model.

    Attributes:
        task: Name of the task.
        model: Name of the model.
        set: Name of the set.
        temperature: Sampling temperature.
        method: The method with its settings.
        answers: Number of answers.
        score: Mean of the task's main metric.
        low: Lower end of its 95 % interval: Wilson's for a share, otherwise from the standard error over prompts.
        high: Upper end of that interval.
        parts: Mean of the main metric for each part of the set.
        metrics: What it cost, and the task's further metrics; None where no answer has it, or the full cache, with
            which `time` compares, was not run.
    """

    task: str
    model: str
    set: str
    temperature: float
    method: str
    answers: int
    score: float
    low: float
    high: float
    parts: dict[str, float] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The task, and its set of prompts if that has a name of its own."""
        if self.set.startswith(self.task):
            return self.set
        return f"{self.task} {self.set}"
