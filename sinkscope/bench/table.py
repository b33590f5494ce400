"""Tables of benchmark records: one row per model, set and method, with scores beside costs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, ClassVar

from sinkscope.bench.methods import FULL, name_of, order_of
from sinkscope.bench.record import BenchRecord, Metrics, read_run
from sinkscope.bench.task import task_class
from sinkscope.files.options import Option
from sinkscope.files.provenance import ModelInfo, provenance
from sinkscope.files.rate import mean_known, wilson
from sinkscope.files.result import Number, Result
from sinkscope.files.tables import Grid, cell

CONTROLS = (FULL, "random", "sampling")
"""Methods that a conclusion does not name as the best."""
EXPONENTIAL = {"perplexity": "nll"}
"""Columns that are exp of the mean of a metric."""
MEDIAN = ("alarm", "collapse")
"""Columns that are medians, because the metric does not exist for every run."""
NUMBERS = frozenset(
    "read time cached_peak temperature answers ttr cr length interventions drawn alarm perplexity collapse kl".split()
)
"""Columns that are no shares."""
PERCENT = frozenset(
    "loop tail_loop loop_paper eos stopped early fresh chance prefix score agree kept same cells".split()
)


@dataclass(frozen=True)
class BenchGroup:
    """All answers of one method to one set by one model.

    Attributes:
        model: Name of the model.
        task: Name of the task.
        set: Name of the set.
        method: The method with its settings.
        temperature: Sampling temperature.
        answers: Number of answers.
        score: Mean of the task's main metric.
        low: Lower end of its 95 % interval: Wilson's for a share, otherwise from the standard error over prompts.
        high: Upper end of that interval.
        parts: Mean of the main metric for each part of the set.
        metrics: Mean of each further metric; None where no answer has it.
        same: Share of answers that equal those of the full cache token for token; None if it was not run.
        read: Cached tokens that a decoding step attends to, mean over layers and kv heads.
        cells: Share of a prompt's causal cells that attention covers; None if the method leaves prompts to the model.
        time: Seconds per new token, divided by those of the full cache; None if it was not run.
        cached_peak: Largest number of cached tokens, mean over answers.
    """

    model: str
    task: str
    set: str
    method: str
    temperature: float
    answers: int
    score: float
    low: float
    high: float
    parts: dict[str, float] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    same: float | None = None
    read: float | None = None
    cells: float | None = None
    time: float | None = None
    cached_peak: float | None = None


@dataclass(frozen=True, kw_only=True)
class BenchTable(Result):
    """Scores and costs of methods.

    Attributes:
        groups: Results by task, model, set and method.
    """

    kind: ClassVar[str] = "bench"
    drawing: ClassVar[Any] = "sinkscope.bench.draw:draw_bench"
    page: ClassVar[str] = "bench"

    groups: tuple[BenchGroup, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row per group."""
        rows: list[dict[str, Any]] = []
        for group in self.groups:
            main = task_class(group.task).main
            row = {"task": group.task, "model": group.model, "set": group.set, "method": group.method}
            row |= {main: group.score, "low": group.low, "high": group.high, **group.parts}
            row |= {"read": group.read, "cells": group.cells, "time": group.time, "cached_peak": group.cached_peak}
            row |= {"same": group.same, "answers": group.answers, "temperature": group.temperature, **group.metrics}
            rows.append(row)
        return rows

    def grids(self) -> list[Grid]:
        """A table for each task."""
        grids: list[Grid] = []
        for task in dict.fromkeys(group.task for group in self.groups):
            rows = [row for row in self.rows() if row["task"] == task]
            head = [name for name in rows[0] if any(row.get(name) is not None for row in rows)]
            share = task_class(task).main in PERCENT
            cells: list[list[str]] = []
            for row in rows:
                cells.append([_shown(name, row.get(name), share) for name in head])
            grids.append(Grid(head, cells, columns=("set", "method", *head[4:])))
        return grids

    def conclusion(self) -> str:
        """The best method on the first set, compared with the full cache."""
        if not self.groups:
            return "Nothing was answered."
        first = self.groups[0]
        alike = [group for group in self.groups if (group.set, group.model) == (first.set, first.model)]
        task = task_class(first.task)
        full = next((group for group in alike if group.method == FULL), None)
        compared = [group for group in alike if name_of(group.method) not in CONTROLS]
        others = sorted(compared, key=lambda group: group.score)
        control = f"{FULL}, the control, {task.said.format(full.score)}" if full else "the full cache was not run"
        if not others:
            return f"On {first.set} by {first.model}, {control}; no other method was run."
        best = others[0 if task.low_is_good else -1]
        return f"On {first.set} by {first.model}, {best.method} {task.said.format(best.score)}; {control}."

    def numbers(self) -> list[Number]:
        """The score of each method beside that of the full cache."""
        scores = {(group.model, group.set): group.score for group in self.groups if group.method == FULL}
        numbers: list[Number] = []
        for group in self.groups:
            label = f"{group.task} {group.set}, {group.method}: {task_class(group.task).main}"
            control = scores.get((group.model, group.set))
            numbers.append(Number(label, group.score, control, (group.high - group.low) / 2))
        return numbers


def _shown(name: str, value: Any, share: bool) -> str:
    """A cell; `share` says whether the main score is one, so that its interval and parts are in per cent too."""
    if isinstance(value, float) and (name in PERCENT or (share and name not in NUMBERS)):
        return f"{value:.1%}"
    return cell(value)


def bench_table(
    folders: Annotated[Sequence[Path], Option(argument=True, metavar="DIR...")],
    *,
    by: Annotated[str, Option(metavar="NAME")] = "part",
) -> BenchTable:
    """Show scores beside costs from finished or unfinished runs.

    Args:
        folders: Folders of `sinkscope bench`.
        by: What the columns after the score stand for: part (such as the position of a question), turn, or a field of
            the prompts such as depth, length or period.

    Raises:
        SinkscopeError: A folder is not of a run.

    Example:
        sinkscope bench table runs --by turn
    """
    runs: list[tuple[Sequence[BenchRecord], dict[str, Any]]] = []
    for folder in folders:
        run = read_run(folder)
        runs.append((run.records, run.settings))
    return tabulate_records(runs, by)


def tabulate_records(runs: Sequence[tuple[Sequence[BenchRecord], dict[str, Any]]], by: str = "part") -> BenchTable:
    """Group records by task, model, set and method.

    Args:
        runs: Records of each run, and its settings.
        by: As for `bench_table`.
    """
    started = time.perf_counter()
    names = {settings["model"]["fingerprint"]: settings["model"]["name"] for _, settings in runs}
    grouped: dict[tuple[Any, ...], list[BenchRecord]] = {}
    for records, _ in runs:
        for record in records:
            about = record.settings
            key = (record.task, names[record.model], about["set"], about["temperature"], record.method)
            grouped.setdefault(key, []).append(record)
    keys = sorted(grouped, key=lambda key: (*key[:4], order_of(key[4])))
    groups: list[BenchGroup] = []
    for key in keys:
        full = grouped.get((*key[:4], FULL), [])
        groups.append(_group(key, grouped[key], full, by))
    settings = [settings for _, settings in runs]
    first = settings[0]
    return BenchTable(
        model=ModelInfo(**first["model"]),
        settings={"runs": settings},
        provenance=provenance(
            started=started,
            device=first["device"],
            dtype=first["dtype"],
            attention=first["attention"],
            bos=None,
            seed=min((record.seed for records, _ in runs for record in records), default=0),
        ),
        groups=tuple(groups),
    )


def _group(key: tuple[Any, ...], records: Sequence[BenchRecord], full: Sequence[BenchRecord], by: str) -> BenchGroup:
    task_name, model, set_name, temperature, method = key
    task = task_class(task_name)
    scored = [record for record in records if record.metrics.get(task.main) is not None]
    values = [float(record.metrics[task.main] or 0.0) for record in scored]
    parts: dict[str, list[float]] = {}
    for record, value in zip(scored, values, strict=True):
        part = str(record.turn + 1 if by == "turn" else record.settings.get(by, ""))
        if part:
            parts.setdefault(part, []).append(value)
    group = BenchGroup(
        model=model,
        task=task_name,
        set=set_name,
        method=method,
        temperature=temperature,
        answers=len(records),
        score=fmean(values) if values else math.nan,
        low=math.nan,
        high=math.nan,
        parts={part: fmean(each) for part, each in parts.items()},
        metrics={column: _column(column, records) for column in task.columns},
        same=_same(records, full),
        read=_mean("read", records),
        cells=_mean("cells", records),
        time=_time(records, full),
        cached_peak=_mean("cached_peak", records),
    )
    if not values:
        return group
    if all(0 <= value <= 1 for value in values) and not task.together:
        rate = wilson(sum(values), len(values))
        return replace(group, low=rate.low, high=rate.high)
    half = 1.96 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return replace(group, low=group.score - half, high=group.score + half)


def _mean(metric: str, records: Sequence[BenchRecord]) -> float | None:
    return mean_known(record.metrics.get(metric) for record in records)


def _column(column: str, records: Sequence[BenchRecord]) -> float | None:
    """The value of a column: the mean of its metric, unless the column is a median or exp of a mean."""
    if column in EXPONENTIAL:
        mean = _mean(EXPONENTIAL[column], records)
        return None if mean is None else math.exp(mean)
    if column in MEDIAN:
        values = sorted(value for record in records if (value := record.metrics.get(column)) is not None)
        if not values:
            return None
        return (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
    return _mean(column, records)


def _same(records: Sequence[BenchRecord], full: Sequence[BenchRecord]) -> float | None:
    tokens = {(record.prompt, record.turn, record.seed): record.tokens for record in full}
    equal: list[bool] = []
    for record in records:
        other = tokens.get((record.prompt, record.turn, record.seed))
        if other is not None:
            equal.append(record.tokens == other)
    return mean_known(equal)


def _time(records: Sequence[BenchRecord], full: Sequence[BenchRecord]) -> float | None:
    ours = _seconds_per_token(records)
    whole = _seconds_per_token(full)
    return ours / whole if ours and whole else None


def _seconds_per_token(records: Sequence[BenchRecord]) -> float:
    seconds = sum(record.metrics.get("seconds") or 0.0 for record in records)
    tokens = sum(len(record.tokens) for record in records)
    return seconds / tokens if tokens else 0.0
