"""Tables of benchmark records: one row per model, set and method, with scores beside costs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Annotated, Any, ClassVar

from sinkscope.bench.draw import draw_bench
from sinkscope.bench.finding import control_of, finding, ranked
from sinkscope.bench.group import BenchGroup
from sinkscope.bench.methods import FULL
from sinkscope.bench.record import BenchRecord, BenchRun, Metrics, read_run
from sinkscope.bench.scores import PERCENT
from sinkscope.bench.task import Task, task_class
from sinkscope.files.provenance import ModelInfo, provenance
from sinkscope.measure.rate import known_numbers, mean_known, wilson
from sinkscope.results.options import Option, command
from sinkscope.results.result import Number, Result
from sinkscope.results.tables import MOST_ROWS, Grid, Table, strings

HEADS = {"read": "tokens_read", "cells": "attention_computed"}
"""Heads of columns whose names in records are shorter."""


@dataclass(frozen=True, kw_only=True)
class BenchTable(Result):
    """Scores and costs of methods.

    Attributes:
        groups: Results by task, model, set and method.
    """

    kind = "bench"
    drawing = draw_bench
    page = "bench"
    brief_rows = MOST_ROWS  # every method that the conclusion compares

    glossary: ClassVar = {
        "tokens_read": "Cached tokens that a decoding step attends to, mean over layers and kv heads",
        "attention_computed": "Share of a prompt's causal cells that attention covers; a dash if the model reads it",
        "time": "Seconds per new token, divided by those of the full cache",
        "cached_peak": "Largest number of cached tokens after a decoding step, mean over answers",
    }

    groups: tuple[BenchGroup, ...]

    def rows(self) -> Table:
        """Return one row per group."""
        rows: Table = []
        for group in self.groups:
            row = {
                "task": group.task,
                "model": group.model,
                "set": group.set,
                "method": group.method,
                task_class(group.task).main: group.score,
                "low": group.low,
                "high": group.high,
                **group.parts,
                **group.metrics,
                "answers": group.answers,
                "temperature": group.temperature,
            }
            rows.append(row)
        return rows

    def grids(self) -> list[Grid]:
        """Return a table for each task."""
        grids: list[Grid] = []
        for task in dict.fromkeys(group.task for group in self.groups):
            rows = [row for row in self.rows() if row["task"] == task]
            main, percent = task_class(task).main, [*PERCENT]
            if main in PERCENT:
                percent += ["low", "high", *chain(*(group.parts for group in self.groups))]
            columns = {HEADS.get(name, name): cells for name, cells in strings(rows, percent).items()}
            grids.append(Grid(columns, important=("set", "method", main, "low", "high")))
        return grids

    def places(self) -> list[list[BenchGroup]]:
        """Return the groups of each task, set and model."""
        places: dict[tuple[str, str, str], list[BenchGroup]] = {}
        for group in self.groups:
            places.setdefault((group.task, group.set, group.model), []).append(group)
        return list(places.values())

    def conclusion(self) -> str:
        """Return what the first set says of its best method, with its cost."""
        if not self.groups:
            return "Nothing was answered."
        return finding(self.places()[0])

    def details(self) -> list[str]:
        """Return what the other sets say."""
        return [finding(groups) for groups in self.places()[1:]]

    def numbers(self) -> list[Number]:
        """Return the score of each method beside that of the control, the best one of each set first."""
        numbers: list[Number] = []
        for groups in self.places():
            control, best = control_of(groups), ranked(groups)[:1]
            for group in sorted(groups, key=lambda group: group not in best):
                task = task_class(group.task)
                number = Number(
                    f"{group.set}.{group.method}.{task.main}",
                    f"{group.title}, {group.method}: {task.unit}",
                    group.score,
                    control=None if control is None else control.score,
                    margin=None if math.isnan(group.low) else (group.high - group.low) / 2,
                    share=task.main in PERCENT,
                    contrast=task.control if control is None else control.method,
                )
                numbers.append(number)
        return numbers


@command(
    words="bench table",
    group="Benchmark",
    help="Show the tables of finished runs.",
)
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
    return tabulate_records([read_run(folder) for folder in folders], by)


def tabulate_records(runs: Sequence[BenchRun], by: str = "part") -> BenchTable:
    """Group the records of runs by task, model, set and method.

    Args:
        runs: The runs.
        by: As for `bench_table`.
    """
    started = time.perf_counter()
    grouped: dict[tuple[Any, ...], list[BenchRecord]] = {}
    for run in runs:
        for record in run:
            about = record.settings
            key = (record.task, run.settings["model"]["name"], about["set"], about["temperature"], record.method)
            grouped.setdefault(key, []).append(record)
    groups: list[BenchGroup] = []
    for key in sorted(grouped, key=lambda key: key[:4]):  # methods stay in the order in which they answered
        full = grouped.get((*key[:4], FULL), [])
        groups.append(_group(key, grouped[key], full, by))
    first = runs[0].settings
    origin = provenance(
        started=started,
        device=first["device"],
        dtype=first["dtype"],
        attention=first["attention"],
        seed=min((record.seed for run in runs for record in run), default=0),
    )
    return BenchTable(
        model=ModelInfo(**first["model"]),
        settings={"runs": [run.settings for run in runs]},
        provenance=origin,
        groups=tuple(groups),
    )


def _group(key: tuple[Any, ...], records: Sequence[BenchRecord], full: Sequence[BenchRecord], by: str) -> BenchGroup:
    """The row of a method, beside the records of the full cache."""
    task = task_class(key[0])
    values: list[float] = []
    by_part: dict[str, list[float]] = {}
    for record in records:
        for value in known_numbers([record.metrics.get(task.main)]):
            values.append(value)
            part = {"turn": record.turn + 1, **record.settings}.get(by, "")
            by_part.setdefault(str(part), []).append(value)
    parts = {part: fmean(scores) for part, scores in by_part.items() if part}
    metrics: Metrics = {}
    for name in ("read", "cells", "time", "cached_peak", *task.columns):
        metrics[name] = mean_known(record.metrics.get(name) for record in records)
    if full and _seconds_per_token(full):
        metrics["time"] = _seconds_per_token(records) / _seconds_per_token(full)
    alarms = known_numbers(record.metrics.get("alarm") for record in records)
    if alarms:
        metrics["alarm"] = median(alarms)  # not every run has one
    score, low, high = _interval(task, values)
    return BenchGroup(*key, answers=len(records), score=score, low=low, high=high, parts=parts, metrics=metrics)


def _interval(task: type[Task], values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of the scores and its 95 % interval; NaN where there are too few."""
    if not values:
        return math.nan, math.nan, math.nan
    score = fmean(values)
    if min(values) >= 0 and max(values) <= 1 and not task.together:
        rate = wilson(sum(values), len(values))
        return score, rate.low, rate.high
    half = math.nan
    if len(values) > 1:
        half = 1.96 * stdev(values) / math.sqrt(len(values))
    return score, score - half, score + half


def _seconds_per_token(records: Sequence[BenchRecord]) -> float:
    seconds = sum(record.metrics["seconds"] or 0.0 for record in records)
    return seconds / max(1, sum(len(record.tokens) for record in records))
