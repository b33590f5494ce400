"""Tables of benchmark records: one row per model, set and method, with scores beside costs."""

from __future__ import annotations

import html
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar

from sinkscope.bench.finding import BenchGroup, control_of, difference, finding, kept_words, mean_score, ranked
from sinkscope.bench.methods import FULL, Method
from sinkscope.bench.record import BenchRecord, BenchRun, Metrics, read_run
from sinkscope.bench.scores import PERCENT
from sinkscope.bench.task import task_class
from sinkscope.errors import SinkscopeError
from sinkscope.files.output import PathName
from sinkscope.files.provenance import UNKNOWN_MODEL, ModelInfo, provenance
from sinkscope.measure.margin import Interval, known_numbers, mean_known
from sinkscope.results.result import Result
from sinkscope.results.row import Kind, Mean, Row, row_beside
from sinkscope.results.tables import MOST_ROWS, Grid, Table, strings


def draw_bench(result: Any) -> Any:
    """Draw the score of each method with 95 % intervals, and on each bar the tokens that a decoding step reads.

    Args:
        result: The `BenchTable`.
    """
    import plotly.express as px

    from sinkscope.results.style import COLOURS, figure_of  # with plotly, which a printed table does not need

    main = task_class(result.groups[0].task).main
    frame = result.to_frame()
    frame["set"] = (frame["set"] + ", " + frame["model"]).map(html.escape)
    frame["method"] = frame["method"].map(html.escape)
    frame["above"], frame["below"] = frame["high"] - frame[main], frame[main] - frame["low"]
    fig = px.bar(
        frame,
        x="method",
        y=main,
        color="set",
        text="read",
        error_y="above",
        error_y_minus="below",
        color_discrete_sequence=[*COLOURS],
    )
    fig.update_traces(texttemplate="reads %{text:,.0f}", textposition="inside", insidetextanchor="start")
    fig.update_xaxes(tickangle=-35, title_text="")
    if main in PERCENT:
        fig.update_yaxes(tickformat=".0%", range=[0, 1.05])
    return figure_of(fig, result, width=1000, height=560, legend=-0.4, bottom=170, barmode="group")


@dataclass(frozen=True, kw_only=True)
class BenchTable(Result):
    """Scores and costs of methods.

    Attributes:
        groups: Results by task, model, set and method.
        beside: The method with which all others are compared, prompt by prompt. None: the best one of each set.
    """

    kind = "bench"
    drawing = draw_bench
    page = "bench"
    brief_rows = MOST_ROWS  # every method that the conclusion compares

    glossary: ClassVar = {
        "difference": "Score minus that of the method with which all are compared, mean over the same prompts",
        "from": "Lower end of the 95 % interval of that difference",
        "to": "Upper end of it",
        "read": "Cached tokens that a decoding step attends to, mean over layers and kv heads",
        "cells": "Share of a prompt's causal cells that attention covers; a dash if the model reads it",
        "time": "Seconds per new token, divided by those of the full cache; a dash if that was not run",
        "cached_peak": "Largest number of cached tokens after a decoding step, mean over answers",
    }

    groups: tuple[BenchGroup, ...]
    beside: str | None = None

    def rows(self) -> Table:
        """Return one row per group."""
        rows: Table = []
        for group in self.groups:
            lead = self.lead(group)
            row = {
                "task": group.task,
                "model": group.model,
                "set": group.set,
                "method": str(group.method),
                task_class(group.task).main: group.score,
                "low": group.low,
                "high": group.high,
                "difference": None if lead is None else lead.mean,
                "from": None if lead is None else lead.low,
                "to": None if lead is None else lead.high,
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
            main = task_class(task).main
            scores, percent = [main, "low", "high", "difference", "from", "to"], [*PERCENT]
            if main in PERCENT:
                percent += [*scores, *chain(*(group.parts for group in self.groups))]
            columns = strings(rows, percent)
            sets = ["set"] if len({*columns["set"]}) > 1 else []
            grids.append(Grid(columns, important=(*sets, "method", *scores)))
        return grids

    def lead(self, group: BenchGroup) -> Interval | None:
        """Return how far a score is above that of the method with which all are compared; None if it is not known."""
        others = [other for other in self.groups if other.place == group.place]
        references = ranked(others)
        if self.beside is not None:
            references = [other for other in others if str(other.method) == self.beside]
        if not references or references[0] is group:
            return None
        return difference(group, references[0])

    def places(self) -> list[list[BenchGroup]]:
        """Return the groups of each task, set and model."""
        places: dict[tuple[str, ...], list[BenchGroup]] = {}
        for group in self.groups:
            places.setdefault(group.place, []).append(group)
        return list(places.values())

    def conclusion(self) -> str:
        """Return what the first set says of its best method, with its cost."""
        if not self.groups:
            return "Nothing was answered."
        return finding(self.places()[0])

    def details(self) -> list[str]:
        """Return what the other sets say, and which methods keep generated tokens."""
        lines = [finding(groups) for groups in self.places()[1:]]
        lines += [line for groups in self.places() for line in kept_words(groups)]
        return lines

    def findings(self) -> list[Row]:
        """Return the score of each method beside that of the control, the best one of each set first."""
        rows: list[Row] = []
        for groups in self.places():
            control, best = control_of(groups), ranked(groups)[:1]
            for group in sorted(groups, key=lambda group: group not in best):
                task = task_class(group.task)
                kind: Kind = "share" if task.main in PERCENT else "number"
                score = Mean(group.score, group.margin, tuple(group.scores.values()), kind)
                contrast = task.control if control is None else str(control.method)
                label = f"{group.title}, {group.method}: {task.unit}"
                beside = None if control is None else control.score
                rows.append(row_beside(label, score, beside, contrast, texts=tuple(group.scores)))
        return rows


def bench_table(folders: Sequence[PathName], *, beside: str | None = None) -> BenchTable:
    """Show scores beside costs from finished or unfinished runs.

    Args:
        folders: Folders of `sinkscope bench`.
        beside: The method with which all others are compared, prompt by prompt. None: the best one of each set.

    Raises:
        SinkscopeError: A folder is not of a run, or no run has that method.
    """
    return tabulate_records([read_run(Path(folder)) for folder in folders], beside=beside)


def tabulate_records(runs: Sequence[BenchRun], beside: str | None = None) -> BenchTable:
    """Group the records of runs by task, model, set and method. A record that several runs have counts once.

    Args:
        runs: The runs.
        beside: As for `bench_table`.

    Raises:
        SinkscopeError: No method has that name, or runs of one task and model were measured under other settings.
    """
    started = time.perf_counter()
    settings = [run.settings for run in runs]
    for first, other in combinations(settings, 2):
        check_conditions(first, other)
    places: dict[tuple[Any, ...], dict[Method, dict[Hashable, BenchRecord]]] = {}
    for run in runs:
        for record in run:
            about = record.settings
            place = (record.task, run.settings["model"]["name"], about["set"], about["temperature"])
            places.setdefault(place, {}).setdefault(record.method, {}).setdefault(record.key, record)
    groups: list[BenchGroup] = []
    for place, methods in sorted(places.items(), key=itemgetter(0)):  # methods stay in the order of their answers
        full = [*methods.get(Method(FULL), {}).values()]
        for method, records in methods.items():
            groups.append(_group(place, method, [*records.values()], full))
    known = dict.fromkeys(str(group.method) for group in groups)
    if beside is not None and beside not in known:
        raise SinkscopeError(f"--beside {beside}: expected {', '.join(known)}")
    origin = provenance(
        started=started,
        device=_each(settings, "device"),
        dtype=_each(settings, "dtype"),
        attention=_each(settings, "attention"),
        seed=min((record.seed for run in runs for record in run), default=0),
    )
    models = [setting["model"] for setting in settings]
    model = ModelInfo(**models[0])
    if any(model_info != models[0] for model_info in models):
        model = replace(UNKNOWN_MODEL, name=_each(models, "name"), family=_each(models, "family"))
    return BenchTable(model=model, settings={"runs": settings}, provenance=origin, groups=tuple(groups), beside=beside)


def check_conditions(first: dict[str, Any], other: dict[str, Any]) -> None:
    """Refuse runs of one task and one name of a model whose answers were made under other conditions.

    Raises:
        SinkscopeError: Settings differ by which answers may.
    """
    if (first.get("task"), first["model"]["name"]) != (other.get("task"), other["model"]["name"]):
        return
    one_run, other_run = (run | {"model": run["model"]["fingerprint"]} for run in (first, other))
    for name in sorted({*first, *other} - {"command", "temperature"}):
        one, another = one_run.get(name), other_run.get(name)
        if one != another:
            raise SinkscopeError(
                f"{first['model']['name']}: measured under other settings ({name} is {one!r:.60} and {another!r:.60}): "
                "show them in a table each"
            )


def _each(settings: Sequence[Mapping[str, Any]], name: str) -> str:
    """The different values of a setting, after one another."""
    return ", ".join(dict.fromkeys(str(setting[name]) for setting in settings))


def _group(
    place: tuple[Any, ...], method: Method, records: Sequence[BenchRecord], full: Sequence[BenchRecord]
) -> BenchGroup:
    """The row of a method, beside the records of the full cache."""
    name, model, of_set, temperature = place
    task = task_class(name)
    by_prompt: dict[str, list[float]] = {}
    by_part: dict[str, list[float]] = {}
    for record in records:
        for value in known_numbers([record.metrics.get(task.main)]):
            by_prompt.setdefault(record.prompt, []).append(value)
            by_part.setdefault(str(record.settings.get("part", "")), []).append(value)
    scores = {prompt: fmean(values) for prompt, values in by_prompt.items()}
    mean = mean_score(name, [*scores.values()])
    metrics: Metrics = {}
    for metric in ("read", "cells", "time", "cached_peak", *task.columns):
        metrics[metric] = mean_known(record.metrics.get(metric) for record in records)
    whole = _seconds_per_token(full)
    if whole:
        metrics["time"] = _seconds_per_token(records) / whole
    alarms = known_numbers(record.metrics.get("alarm") for record in records)
    if alarms:
        metrics["alarm"] = median(alarms)  # not every run has one
    parts = {part: fmean(values) for part, values in by_part.items() if part}
    return BenchGroup(
        name,
        model,
        of_set,
        temperature,
        method,
        len(records),
        mean.mean,
        mean.low,
        mean.high,
        scores,
        parts,
        metrics,
    )


def _seconds_per_token(records: Sequence[BenchRecord]) -> float:
    seconds = sum(record.metrics["seconds"] or 0.0 for record in records)
    return seconds / max(1, sum(len(record.tokens) for record in records))
