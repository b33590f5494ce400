"""What a benchmark says in one sentence: the best method where intervals part, with the cost of every score."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sinkscope.bench.group import BenchGroup, pooled
from sinkscope.bench.methods import FULL, name_of
from sinkscope.bench.task import Task, task_class

CONTROLS = (FULL, "random", "sampling")
"""Methods that a conclusion does not name as the best."""


def ranked(groups: Sequence[BenchGroup]) -> list[BenchGroup]:
    """The groups of one task without controls, the best first."""
    compared = [group for group in groups if name_of(group.method) not in CONTROLS]
    if not compared:
        return []
    return sorted(compared, key=lambda group: group.score, reverse=not task_class(groups[0].task).low_is_good)


def control_of(groups: Sequence[BenchGroup]) -> BenchGroup | None:
    """The control of the task among its groups; of several, the one with the budget of the best method."""
    task, best = task_class(groups[0].task), ranked(groups)
    controls = [group for group in groups if name_of(group.method) == task.control]
    for group in controls:
        if best and best[0].method.endswith(group.method.removeprefix(task.control)):
            return group
    return next(iter(controls), None)


def finding(groups: Sequence[BenchGroup]) -> str:
    """The best method of a task over all its sets, or that no difference is shown, beside the control.

    Args:
        groups: All groups of one task and one model.
    """
    task = task_class(groups[0].task)
    sets = {group.set for group in groups}
    by_method: dict[str, list[BenchGroup]] = {}
    for group in groups:
        by_method.setdefault(group.method, []).append(group)
    methods = [pooled(some) for some in by_method.values() if len(some) == len(sets)]
    where = groups[0].title
    if len(sets) > 1:
        where = f"{groups[0].task}, {len(sets)} sets"
    compared, control = ranked(methods), control_of(methods)
    said = f"{task.control} was not run"
    if control is not None:
        said = f"{control.method}, the control, has {task.shown.format(control.score)}"
    if not compared:
        return f"In {where}, {said}; no other method was run."
    best, count = compared[0], len(compared)
    full_read = next((group.metrics.get("read") for group in methods if group.method == FULL), None)
    score = _score(task, best, full_read)
    if count == 1:
        found = f"{best.method} has {score} in {where} ({task.unit})"
        if control is not None and not best.differs(control):
            found = f"{found}, no difference shown"
    elif best.differs(compared[1]):
        found = f"{best.method} is the best of {count} in {where} ({task.unit}) with {score}"
    else:
        other = f"{compared[1].method} with {_score(task, compared[1], full_read)}"
        found = f"{best.method} with {score} and {other} are too close to rank in {where} ({task.unit})"
    return f"{found}; {said}."


def _score(task: type[Task], group: BenchGroup, full_read: float | None) -> str:
    """The score of a method, with its interval and its cost."""
    notes: list[str] = []
    if not math.isnan(group.low):
        shown = task.shown.partition(" ")[0]
        notes.append(f"{shown.format(group.low)}-{shown.format(group.high)}")
    cells, read = group.metrics.get("cells"), group.metrics.get("read")
    if cells is not None:
        notes.append(f"cells {cells:.0%}")
    if read is not None and full_read:
        notes.append(f"reads {read / full_read:.0%}")
    elif read is not None:
        notes.append(f"reads {read:,.0f} tokens")
    score = task.shown.format(group.score)
    if notes:
        score = f"{score} ({', '.join(notes)})"
    return score
