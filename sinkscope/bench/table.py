"""Tables of benchmark records: one row per set and method, scores beside costs, and what they say in 30 words.

1. Answers are grouped by set and method; the score of a prompt is the mean over its turns and seeds.
2. The methods of a set are ranked by score; controls are not.
3. The best one is compared with the next one, or with the control if there is none, prompt by prompt. If the interval
   of the difference reaches zero, the two are too close to rank.
4. If the interval of its score reaches zero, and the control's score is above it, nothing can be told of any method.
"""

from __future__ import annotations

import html
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import isnan, nan
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from sinkscope.bench.methods import FULL, uneven_budgets
from sinkscope.bench.record import BenchRecord, BenchRun, read_run
from sinkscope.bench.scored import NOT_RANKED, RANDOM, MethodKey, Scored, difference_text, score_text
from sinkscope.bench.task import Task, task_class
from sinkscope.errors import SinkscopeError
from sinkscope.files.envelope import ModelInfo, provenance
from sinkscope.files.output import PathName
from sinkscope.files.store import differing
from sinkscope.measure.margin import DIFFERENCES, SCORES, Interval, interval_of
from sinkscope.results.headline import Headline, Verdict, verdict_of
from sinkscope.results.mean import Mean
from sinkscope.results.notation import count_of
from sinkscope.results.result import Result
from sinkscope.results.table import Subject, whole

COSTS = ("read", "time")
"""The metrics that stand beside the score."""


@dataclass(frozen=True)
class BenchGroup:
    """All answers to a set of prompts under one method.

    Attributes:
        set: Name of the set.
        method: The method with its settings.
        answers: Number of answers.
        score: Mean of the task's main metric over prompts.
        low: Lower end of its 95 % interval over prompts; NaN of fewer than three.
        high: Upper end of that interval.
        scores: The score of each prompt, mean over its turns and seeds.
        metrics: What it cost, and the task's further metrics; NaN where no answer has it, or the full cache, with which
            `time` compares, was not run.
    """

    set: str
    method: str
    answers: int
    score: float
    low: float
    high: float
    scores: dict[str, float]
    metrics: dict[str, float]

    @property
    def name(self) -> str:
        """The method without its settings."""
        return self.method.partition(":")[0]

    def mean(self) -> Mean:
        """Return the score with its margin and the scores of prompts."""
        margin = None if isnan(self.low) else Interval(self.score, self.low, self.high).margin
        return Mean(self.score, margin, tuple(self.scores.values()))


def reference_words(group: BenchGroup) -> str:
    """Return what a control is called in a sentence."""
    if group.name == FULL:
        return f"the reference, {group.method} (all tokens stay cached)"
    if group.name == RANDOM:
        return f"the control, {group.method}"
    return f"the other control, {group.method}"


@dataclass(frozen=True, kw_only=True)
class BenchTable(Result):
    """Scores and costs of methods that answered a task with one model.

    Attributes:
        task: Name of the task.
        groups: Results by set and method.
        beside: The method with which all others are compared, prompt by prompt. None: the best one of each set.
    """

    kind = "bench"

    task: str
    groups: tuple[BenchGroup, ...]
    beside: str | None = None

    def sets(self) -> list[list[BenchGroup]]:
        """Return the groups of each set: those that are ranked, the best first, and then controls."""
        return [[*groups] for _, groups in groupby(self.groups, attrgetter("set"))]

    def difference(self, group: BenchGroup, other: BenchGroup) -> Interval | None:
        """Return by how much the score of a group is larger than that of another one, prompt by prompt.

        Returns:
            None where both answered fewer than three prompts, or are the same: it is then not judged.
        """
        if group is other:
            return None
        pairs = [(score, other.scores[prompt]) for prompt, score in group.scores.items() if prompt in other.scores]
        leads = np.array([score - other_score for score, other_score in pairs])
        return interval_of(leads, DIFFERENCES if task_class(self.task).share else None)

    def subjects(self) -> list[Subject]:
        """Return the table of each set: the methods, the best first, then controls."""
        task = task_class(self.task)
        better = "lower is better" if task.low_is_good else "higher is better"
        subjects: list[Subject] = []
        for groups in self.sets():
            rows: list[Scored] = []
            reference = self.beside or groups[0].method
            beside = next((group for group in groups if group.method == reference), None)
            for group in groups:
                rows.append(self.scored(group, beside))
            name = groups[0].set
            prompts = max((len(group.scores) for group in groups), default=0)
            title = f"{name}: {task.unit} ({better}), {count_of(prompts, 'prompt')}"
            if beside is not None:
                title += f"; differences are to {reference}"
            texts = tuple(dict.fromkeys(prompt for group in groups for prompt in group.scores))
            subjects.append(Subject(title, tuple(rows), name, texts))
        return subjects

    def compared(self) -> list[Subject]:
        """Return the scores alone: costs have no margin."""
        subjects: list[Subject] = []
        for subject, groups in zip(self.subjects(), self.sets(), strict=True):
            rows: list[Scored] = []
            for group in groups:
                scored = self.scored(group, None)
                rows.append(replace(scored, read=None, time=None, low=None, high=None, metrics={}))
            subjects.append(replace(subject, rows=tuple(rows)))
        return subjects

    def scored(self, group: BenchGroup, beside: BenchGroup | None) -> Scored:
        """Return the row of a group, compared with another one; not judged of fewer than three prompts."""
        lead = None if beside is None else self.difference(group, beside)
        metrics: dict[str, float] = {}
        for name, value in group.metrics.items():
            if name not in COSTS and not isnan(value):
                metrics[name] = value
        costs = {name: Mean(value) for name, value in group.metrics.items() if name in COSTS and not isnan(value)}
        interval = None if isnan(group.low) else Interval(group.score, group.low, group.high)
        return Scored(
            key=MethodKey(group.set, group.method),
            is_share=task_class(self.task).share,
            score_interval=interval,
            difference_interval=lead,
            metrics=metrics,
            score=group.mean(),
            difference=None if lead is None else Mean(lead.mean),
            prompts=whole(len(group.scores)),
            answers=whole(group.answers),
            low=None if interval is None else Mean(interval.low),
            high=None if interval is None else Mean(interval.high),
            difference_low=None if lead is None else Mean(lead.low),
            difference_high=None if lead is None else Mean(lead.high),
            **costs,
        )

    def conclusion(self) -> str:
        """Return what the first set says: the best method, how far it is from the next or the control, and that."""
        if not self.groups:
            return "Nothing was answered."
        task = task_class(self.task)
        best, *other_groups = self.sets()[0]
        controls = [group for group in (best, *other_groups) if group.name == task.control]
        control_has = f"{task.control} was not run"
        for control in controls[:1]:
            control_has = f"{reference_words(control)}: {score_text(control.score, task.share)}"
        best_has = f"{best.method} has {score_text(best.score, task.share)}"
        if not isnan(best.low):
            best_has += f" ({score_text(best.low, task.share)} to {score_text(best.high, task.share)})"
        better = "lower is better" if task.low_is_good else "higher is better"
        prompts = count_of(len(best.scores), "prompt")
        about = f"{best.set} ({task.unit}, {better}, {prompts})"
        is_floor = bool(controls) and task.share and not task.low_is_good and best.low <= 0
        if is_floor and controls[0].score > best.high:
            return (
                f"Nothing can be told of the methods in {about}: the best, {best_has}; {control_has}. Give larger "
                "budgets or easier prompts."
            )
        rivals = [group for group in other_groups if group.name not in NOT_RANKED]
        lead = ""
        for rival in [*rivals, *controls][:1]:
            lead = self.lead_words(best, rival)
        return f"{best_has} in {about}{lead}. {control_has[0].upper()}{control_has[1:]}."

    def lead_words(self, best: BenchGroup, rival: BenchGroup) -> str:
        """Return how far the best method is ahead of another one; nothing where it is not judged."""
        lead = self.difference(best, rival)
        if lead is None:
            return ""
        is_share = task_class(self.task).share
        mean, low, high = (difference_text(end, is_share) for end in (lead.mean, lead.low, lead.high))
        unit = " points" if is_share else ""
        words = f", {mean}{unit} (95%: {low} to {high}) against {rival.method}"
        if lead.low <= 0 <= lead.high:
            return f"{words}: too close to rank"
        task = task_class(self.task)
        has_to_lose = rival.name == task.control and task.low_is_good  # the full cache of other tasks is their limit
        return f"{words}: the control is better" if has_to_lose and lead.low > 0 else words

    def headlines(self) -> list[Headline]:
        """Return the best method of the first set beside the task's control."""
        if not self.groups:
            return []
        task = task_class(self.task)
        best, *other_groups = self.sets()[0]
        better = "lower" if task.low_is_good else "higher"
        found = f"{score_text(best.score, task.share)} ({best.name})"
        control, verdict = "not run", Verdict.NO_CONTROL
        for group in (best, *other_groups):
            if group.name == task.control and group is not best:
                control = f"{score_text(group.score, task.share)} ({group.name})"
                sign = -1 if task.low_is_good else 1
                lead = self.difference(best, group)
                margin = 0.0 if lead is None else lead.margin
                verdict = verdict_of(sign * best.score, sign * group.score, margin)
                break
        return [Headline(f"{task.unit} ({better} better)", found, control, verdict)]

    def details(self) -> list[str]:
        """Return what budgets mean where they mean two things."""
        about_budgets = uneven_budgets([group.method for group in self.groups])
        return [about_budgets] if about_budgets else []

    def figure(self) -> Any:
        """Draw the score of each method with its interval, a colour for each set."""
        import plotly.graph_objects as go

        from sinkscope.results.style import COLOURS, figure_of  # with plotly, which a printed table does not need

        fig = go.Figure()
        for number, groups in enumerate(self.sets()):
            up = [group.high - group.score for group in groups]
            down = [group.score - group.low for group in groups]
            fig.add_bar(
                x=[html.escape(group.method) for group in groups],
                y=[group.score for group in groups],
                error_y={"type": "data", "symmetric": False, "array": up, "arrayminus": down},
                marker_color=COLOURS[number % len(COLOURS)],
                name=html.escape(groups[0].set),
                showlegend=True,
            )
        fig.update_xaxes(tickangle=-35)
        if task_class(self.task).share:
            fig.update_yaxes(tickformat=".0%", range=[0, 1.05])
        return figure_of(fig, self, width=1000, height=560, legend=-0.4, bottom=170)


def bench_table(folders: Sequence[PathName], *, beside: str | None = None) -> BenchTable:
    """Show scores beside costs from finished or unfinished runs of one task and model.

    Args:
        folders: Folders of `sinkscope bench`.
        beside: The method with which all others are compared, prompt by prompt. None: the best one of each set.

    Raises:
        SinkscopeError: A folder is not of a run, no run has that method, or runs were measured under other settings.
    """
    return tabulate_records([read_run(Path(folder)) for folder in folders], beside=beside)


def check_beside(beside: str | None, methods: Sequence[str]) -> None:
    """Refuse to compare with a method that is not among those of a table.

    Raises:
        SinkscopeError: It is not.
    """
    if beside is not None and beside not in methods:
        raise SinkscopeError(f"--beside {beside}: expected {', '.join(methods)}")


def tabulate_records(runs: Sequence[BenchRun], beside: str | None = None) -> BenchTable:
    """Group the records of runs by set and method.

    A record that several runs have counts once, as the first of them has it: so a folder keeps the record that it has,
    and a table does not change by a run that is added to those of before.

    Args:
        runs: The runs, at least one.
        beside: As for `bench_table`.

    Raises:
        SinkscopeError: No method has that name, or runs were measured under other settings.
    """
    started = time.perf_counter()
    settings = settings_of_all(runs)
    task = task_class(settings["task"])
    records: dict[Hashable, BenchRecord] = {}
    for run in runs:
        for record in run:
            records.setdefault(record.key, record)
    groups = groups_of(list(records.values()), task)
    check_beside(beside, [*dict.fromkeys(group.method for group in groups)])
    sign = 1 if task.low_is_good else -1
    groups.sort(key=lambda group: (group.set, group.name in NOT_RANKED, sign * group.score))
    seed = min((record.seed for record in records.values()), default=0)
    machine = {name: settings[name] for name in ("device", "dtype", "attention")}
    return BenchTable(
        model=ModelInfo(**settings["model"]),
        settings=settings,
        provenance=provenance(started, seed=seed, **machine),
        task=task.name,
        groups=tuple(groups),
        beside=beside,
    )


def settings_of_all(runs: Sequence[BenchRun]) -> dict[str, Any]:
    """Return the settings of runs.

    Raises:
        SinkscopeError: They differ.
    """
    settings = runs[0].settings
    for run in runs[1:]:
        names = differing(settings, run.settings)
        if names:
            raise SinkscopeError(f"runs were measured under other settings ({names}): show them in a table each")
    return settings


def groups_of(records: Sequence[BenchRecord], task: type[Task]) -> list[BenchGroup]:
    """Group records by set and method: the mean score with its interval, and the means of metrics.

    Args:
        records: The records.
        task: The task, which says what its score is.
    """
    names = [task.main, "seconds", "read", "cells", "cached_peak", *task.columns]
    by_method = frame_of(records, names).groupby(["set", "method"], sort=False)
    sums = by_method[["seconds", "tokens"]].sum()
    speeds = sums["seconds"] / sums["tokens"]
    groups: list[BenchGroup] = []
    for (set_name, method), of_method in by_method:
        scores = of_method.groupby("prompt", sort=False)[task.main].mean().dropna()
        metrics = of_method[names].mean().drop([task.main, "seconds"])
        metrics["time"] = speeds[set_name, method] / speeds.get((set_name, FULL), nan)
        if "alarm" in metrics:
            metrics["alarm"] = of_method["alarm"].median()  # not every run has one
        interval = interval_of(scores.to_numpy(), SCORES if task.share else None)
        if interval is None:
            interval = Interval(scores.mean(), nan, nan)
        numbers = (len(of_method), interval.mean, interval.low, interval.high)
        groups.append(BenchGroup(set_name, method, *numbers, scores.to_dict(), metrics.to_dict()))
    return groups


def frame_of(records: Sequence[BenchRecord], names: Sequence[str]) -> Any:
    """Return a row of metrics for each record, NaN where it has none."""
    import pandas as pd  # slow to load

    answers: list[dict[str, Any]] = []
    for record in records:
        about = {"set": record.set, "method": record.method, "prompt": record.prompt, "tokens": len(record.tokens)}
        answers.append(record.metrics | about)
    frame = pd.DataFrame(answers, columns=["set", "method", "prompt", "tokens", *names])
    return frame.astype(dict.fromkeys(names, float))
