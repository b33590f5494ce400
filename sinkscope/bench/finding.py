"""A row of a benchmark's table, and what a benchmark says in at most 30 words.

1. The methods that one run compares on a set and a model are ranked by score; controls are not ranked.
2. The best one is compared with each other method, or with the control if there is none, prompt by prompt.
3. It is ahead if the interval of every difference leaves zero out.
4. If its score is that of chance, and the control's is not, nothing can be told of any method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import hypot, isnan, nan

import numpy as np

from sinkscope.bench.methods import FULL, Method, method_classes
from sinkscope.bench.record import Metrics
from sinkscope.bench.scores import PERCENT
from sinkscope.bench.task import task_class
from sinkscope.measure.margin import DIFFERENCES, SCORES, Interval, difference_of, interval_of
from sinkscope.results.notation import word_form, word_list

PREFILL, SELECT = "prefill", "select"
"""What a policy's `every` says that evicts nothing after the prompt, and the `mode` of one that never evicts."""
FEWEST = 6
"""Prompts of a ranking: a sign test of five pairs cannot reach 5 %, even if all agree."""
NOT_RANKED = (FULL, "random", "sampling")
"""Methods that a conclusion does not name as the best."""


@dataclass(frozen=True)
class BenchGroup:
    """All answers of a model to a set of prompts under one method and the same conditions.

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
    scores: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)

    @property
    def place(self) -> tuple[str, ...]:
        """What groups have in common whose methods are compared."""
        return self.task, self.set, self.model

    @property
    def title(self) -> str:
        """The set of prompts, after its task if its name does not begin with that."""
        return self.set if self.set.startswith(self.task) else f"{self.task} {self.set}"

    @property
    def margin(self) -> float | None:
        """The distance from the score to the farther end of its interval."""
        if isnan(self.low):
            return None
        return Interval(self.score, self.low, self.high).margin


def mean_score(task: str, scores: Sequence[float]) -> Interval:
    """Return the mean of the scores of a task's prompts with its interval; NaN of fewer than three."""
    if not scores:
        return Interval(nan, nan, nan)
    interval = interval_of(np.array(scores), SCORES if are_shares(task, scores) else None)
    return interval or Interval(float(np.mean(scores)), nan, nan)


def are_shares(task: str, scores: Sequence[float]) -> bool:
    """Return whether scores lie between 0 and 1 by what they are."""
    return task_class(task).main in PERCENT and min(scores) >= 0 and max(scores) <= 1


def difference(group: BenchGroup, other: BenchGroup) -> Interval | None:
    """Return by how much the score of a group is larger than that of another one.

    It is the mean of paired differences where both answered the same prompts. Otherwise their own intervals make that
    of the difference.

    Returns:
        None where a margin is unknown: a difference is then not judged.
    """
    shares = are_shares(group.task, [group.score, other.score, *group.scores.values(), *other.scores.values()])
    paired = difference_of(group.scores, other.scores, DIFFERENCES if shares else None)
    if paired is not None:
        return paired
    if group.margin is None or other.margin is None:
        return None
    mean, margin = group.score - other.score, hypot(group.margin, other.margin)
    return Interval(mean, mean - margin, mean + margin)


def ranked(groups: Sequence[BenchGroup]) -> list[BenchGroup]:
    """Return the groups of one place without controls, the best first."""
    return [group for group in best_first(groups) if group.method.name not in NOT_RANKED]


def best_first(groups: Sequence[BenchGroup]) -> list[BenchGroup]:
    """Return the groups of one place in the order of their scores, the best first."""
    return sorted(groups, key=lambda group: group.score, reverse=not task_class(groups[0].task).low_is_good)


def control_of(groups: Sequence[BenchGroup]) -> BenchGroup | None:
    """Return the control among such groups; of several, the one with the budget of the best method."""
    task, best = task_class(groups[0].task), ranked(groups)
    controls = [group for group in groups if group.method.name == task.control]
    for group in controls:
        if best and best[0].method.budget == group.method.budget:
            return group
    return next(iter(controls), None)


def finding(groups: Sequence[BenchGroup]) -> str:
    """Return a sentence on the groups of one place: the best method, its lead with the margin, and the control."""
    task, compared, control = task_class(groups[0].task), ranked(groups), control_of(groups)
    control_score = f"{task.control} was not run"
    if control is not None:
        control_score = f"control {control.method} has {task.value_in_words(control.score)}"
    if not compared:
        return f"In {groups[0].title}, {control_score}; no other method was run."
    best, *others = compared
    if at_floor(best, control):
        shown = f"{task.value_in_words(best.score)} ({range_of(best)})"
        return (
            f"Nothing can be told of methods in {best.title} ({task.unit}): the best, {best.method}, has {shown}, like "
            f"chance; {control_score}; give larger budgets or easier prompts."
        )
    notes = cost_words(best, groups)
    if best.margin is not None:
        notes.insert(0, range_of(best) if task.main in PERCENT else f"±{task.shown.format(best.margin)}")
    shown = f" ({', '.join(notes)})" if notes else ""
    best_score = f"{best.method} has {task.value_in_words(best.score)}{shown} in {best.title} ({task.unit})"
    rivals = others or ([] if control is None else [control])
    if not rivals:
        return f"{best_score}; {control_score}."
    rival, end = rivals[0], ""
    for other in rivals:
        lead = lead_of(best, other)
        if lead is None or lead.low <= 0 <= lead.high:
            rival, end = other, ": too close to rank"
            break
    if end and len(best.scores) < FEWEST:
        return too_few(groups)
    return f"{best_score}, {lead_in_words(best, rival, bool(end))}{end}; {control_score}."


def range_of(group: BenchGroup) -> str:
    """Return the interval of a score, as in "78%-100%"."""
    shown = task_class(group.task).shown
    return f"{shown.format(group.low)}-{shown.format(group.high)}"


def too_few(groups: Sequence[BenchGroup]) -> str:
    """Return the counts of methods that answered too few prompts to be ranked, or their scores; the best come first.

    All are counts, where each prompt is answered right or wrong, or none is.
    """
    task = task_class(groups[0].task)
    order = best_first(groups)
    scores: list[str] = []
    counted = task.main in PERCENT and all({*group.scores.values()} <= {0.0, 1.0} for group in order)
    for group in order:
        value = f"{sum(group.scores.values()):.0f}" if counted else task.value_in_words(group.score)
        scores.append(f"{group.method} {value}")
    some = f"{word_list(scores, 4)} in {groups[0].title} ({task.unit})"
    return f"{len(order[0].scores)} prompts are too few to rank methods: {some}."


def at_floor(best: BenchGroup, control: BenchGroup | None) -> bool:
    """Return whether the best method scores no more than by chance, and the control more: prompts are too hard.

    Chance is the score against the answers of another prompt, and 0 where that is not known.
    """
    task = task_class(best.task)
    if control is None or task.main not in PERCENT or task.low_is_good or best.margin is None:
        return False
    return best.low <= (best.metrics.get("chance") or 0.0) and control.score > best.high


def cost_words(group: BenchGroup, groups: Sequence[BenchGroup]) -> list[str]:
    """Return what a method reads in a step and computes of prompts, in words, as shares of the full cache."""
    parts: list[str] = []
    read, cells = group.metrics.get("read"), group.metrics.get("cells")
    for full in groups:
        whole = full.metrics.get("read")
        if full.method.name == FULL and read is not None and whole:
            parts.append(f"reads {read / whole:.0%}")
    if cells is not None:
        parts.append(f"computes {cells:.0%}")
    return parts


def lead_of(best: BenchGroup, other: BenchGroup) -> Interval | None:
    """Return how far the best method is ahead of another one; None if that is not known."""
    if task_class(best.task).low_is_good:
        best, other = other, best
    return difference(best, other)


def lead_in_words(best: BenchGroup, other: BenchGroup, close: bool) -> str:
    """Return how far the best method is ahead, such as "5±3 points ahead of h2o:4"."""
    task, lead = task_class(best.task), lead_of(best, other)
    if lead is None:
        return f"beside {other.method}"
    side = "from" if close else "behind" if lead.mean < 0 else "ahead of"
    size, margin = abs(lead.mean), lead.margin
    if task.main in PERCENT:
        return f"{100 * size:.0f}±{100 * margin:.0f} points {side} {other.method}"
    return f"{task.shown.format(size)}±{task.shown.format(margin)} {side} {other.method}"


def kept_words(groups: Sequence[BenchGroup]) -> list[str]:
    """Return which of the methods of one place keep every generated token, beside those that evict them, with sizes.

    At the same budget they hold different numbers of tokens. There is nothing to say where all do the same.
    """
    held: dict[bool, list[str]] = {True: [], False: []}
    classes = method_classes()
    for group in groups:
        peak, settings = group.metrics.get("cached_peak"), dict(group.method.settings)
        policy = classes.get(group.method.name)
        every, mode = (settings.get(name, getattr(policy, name, None)) for name in ("every", "mode"))
        if every is not None and mode != SELECT and peak is not None:
            held[every == PREFILL].append(f"{group.method} ({peak:,.0f} cached at most)")
    if not held[True] or not held[False]:
        return []
    keeps = word_form(len(held[True]), "keeps", "keep")
    evicts = word_form(len(held[False]), "evicts", "evict")
    keepers, others = word_list(held[True]), word_list(held[False])
    title = groups[0].title
    return [
        f"{title}: {keepers} {keeps} every generated token, {others} {evicts} them, too; every=1 makes all evict them."
    ]
