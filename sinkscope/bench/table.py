"""Tables of benchmark records: one row per model, set and method, with scores beside costs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median, stdev
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
    "read time cached_peak temperature answers ttr cr length interventions alarm perplexity collapse kl".split()
)
"""Columns that are no shares."""
PERCENT = frozenset("loop tail_loop loop_paper eos early fresh chance prefix score agree same cells".split())


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
    window: float | None = None
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
            row["window"] = group.window
            row |= {"same": group.same, "answers": group.answers, "temperature": group.temperature, **group.metrics}
            rows.append(row)
        return rows

    def grids(self) -> list[Grid]:
        """A table for each task."""
        grids: list[Grid] = []
        rows_by_task: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows():
            rows_by_task.setdefault(row["task"], []).append(row)
        for task, rows in rows_by_task.items():
            columns: dict[str, list[str]] = {}
            for name in rows[0]:
                values = [row.get(name) for row in rows]
                if values.count(None) < len(values):
                    share = name in PERCENT or (task_class(task).main in PERCENT and name not in NUMBERS)
                    columns[name] = [cell(value, percent=share) for value in values]
            head = list(columns)
            cells = [list(row) for row in zip(*columns.values(), strict=True)]
            grids.append(Grid(head, cells, columns=("set", "method", *head[4:])))
        return grids

    def conclusion(self) -> str:
        """The best method on the first set, compared with the full cache."""
        if not self.groups:
            return "Nothing was answered."
        first = self.groups[0]
        task = task_class(first.task)
        control = f"{task.control} was not run"
        compared: list[BenchGroup] = []
        for group in self.groups:
            if (group.task, group.set, group.model) != (first.task, first.set, first.model):
                continue
            name = name_of(group.method)
            if name == task.control:
                control = f"{group.method}, the control, {task.said.format(group.score)}"
            elif name not in CONTROLS:
                compared.append(group)
        where = f"Task {_place(first)}:"
        if any(group.model != first.model for group in self.groups):
            where = f"Task {_place(first)}, model {first.model}:"
        if not compared:
            return f"{where} {control}; no other method was run."
        compared.sort(key=lambda group: group.score, reverse=not task.low_is_good)
        best = compared[0].method
        if len(compared) > 1:
            best += f", the best of {len(compared)},"
        return f"{where} {best} {task.said.format(compared[0].score)}; {control}."

    def numbers(self) -> list[Number]:
        """The score of each method beside that of the full cache."""
        scores: dict[tuple[str, str, str], float] = {}
        for group in self.groups:
            if group.method == FULL:
                scores[group.model, group.task, group.set] = group.score
        numbers: list[Number] = []
        for group in self.groups:
            label = f"{_place(group)}, {group.method}: {task_class(group.task).main}"
            control = scores.get((group.model, group.task, group.set))
            margin = (group.high - group.low) / 2 or None  # of a single sample there is no error
            numbers.append(Number(label, group.score, control, margin))
        return numbers


def _place(group: BenchGroup) -> str:
    """The task of a group, and its set of prompts if that has a name of its own."""
    if group.set.startswith(group.task):
        return group.set
    return f"{group.task} {group.set}"


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
    names: dict[str, str] = {}
    for _, settings in runs:
        names[settings["model"]["fingerprint"]] = settings["model"]["name"]
    grouped: dict[tuple[Any, ...], list[BenchRecord]] = {}
    seeds: set[int] = set()
    for records, _ in runs:
        for record in records:
            about = record.settings
            key = (record.task, names[record.model], about["set"], about["temperature"], record.method)
            grouped.setdefault(key, []).append(record)
            seeds.add(record.seed)
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
            seed=min(seeds, default=0),
        ),
        groups=tuple(groups),
    )


def _group(key: tuple[Any, ...], records: Sequence[BenchRecord], full: Sequence[BenchRecord], by: str) -> BenchGroup:
    task_name, model, set_name, temperature, method = key
    task = task_class(task_name)
    values: list[float] = []
    values_by_part: dict[str, list[float]] = {}
    for record in records:
        value = record.metrics.get(task.main)
        if value is None:
            continue
        values.append(float(value))
        part = str(record.settings.get(by, ""))
        if by == "turn":
            part = str(record.turn + 1)
        if part:
            values_by_part.setdefault(part, []).append(float(value))
    parts: dict[str, float] = {}
    for part, part_values in values_by_part.items():
        parts[part] = fmean(part_values)
    metrics: Metrics = {}
    for column in task.columns:
        metrics[column] = _column(column, records)
    group = BenchGroup(
        model=model,
        task=task_name,
        set=set_name,
        method=method,
        temperature=temperature,
        answers=len(records),
        score=math.nan,
        low=math.nan,
        high=math.nan,
        parts=parts,
        metrics=metrics,
        same=_same(records, full),
        read=_mean("read", records),
        cells=_mean("cells", records),
        window=_window(records),
        time=_time(records, full),
        cached_peak=_mean("cached_peak", records),
    )
    if not values:
        return group
    score = fmean(values)
    if min(values) >= 0 and max(values) <= 1 and not task.together:
        rate = wilson(sum(values), len(values))
        return replace(group, score=score, low=rate.low, high=rate.high)
    half = 0.0
    if len(values) > 1:
        half = 1.96 * stdev(values) / math.sqrt(len(values))
    return replace(group, score=score, low=score - half, high=score + half)


def _window(records: Sequence[BenchRecord]) -> float | None:
    """Mean window of answers whose budget had no room for the usual one."""
    windows: list[float] = []
    for record in records:
        for event in record.events:
            if event["kind"] == "window":
                windows.append(float(event["data"]["window"]))
    return mean_known(windows)


def _mean(metric: str, records: Sequence[BenchRecord]) -> float | None:
    return mean_known(record.metrics.get(metric) for record in records)


def _column(column: str, records: Sequence[BenchRecord]) -> float | None:
    """The value of a column: the mean of its metric, unless the column is a median or exp of a mean."""
    if column in EXPONENTIAL:
        mean = _mean(EXPONENTIAL[column], records)
        if mean is None:
            return None
        return math.exp(mean)
    if column not in MEDIAN:
        return _mean(column, records)
    values: list[float] = []
    for record in records:
        value = record.metrics.get(column)
        if value is not None:
            values.append(float(value))
    if not values:
        return None
    return median(values)


def _same(records: Sequence[BenchRecord], full: Sequence[BenchRecord]) -> float | None:
    tokens: dict[tuple[str, int, int], tuple[int, ...]] = {}
    for record in full:
        tokens[record.prompt, record.turn, record.seed] = record.tokens
    equal: list[bool] = []
    for record in records:
        other = tokens.get((record.prompt, record.turn, record.seed))
        if other is not None:
            equal.append(record.tokens == other)
    return mean_known(equal)


def _time(records: Sequence[BenchRecord], full: Sequence[BenchRecord]) -> float | None:
    ours = _seconds_per_token(records)
    whole = _seconds_per_token(full)
    if not ours or not whole:
        return None
    return ours / whole


def _seconds_per_token(records: Sequence[BenchRecord]) -> float:
    seconds = 0.0
    tokens = 0
    for record in records:
        seconds += record.metrics.get("seconds") or 0.0
        tokens += len(record.tokens)
    if not tokens:
        return 0.0
    return seconds / tokens
