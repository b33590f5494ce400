"""What a benchmark says in one sentence: the best method where intervals part, with the cost of every score."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sinkscope.bench.group import BenchGroup, pooled
from sinkscope.bench.methods import FULL, GUARD, name_of
from sinkscope.bench.task import Task, task_class
from sinkscope.results.notation import short_sentence

CONTROLS = (FULL, "random", "sampling")
"""Methods that a conclusion does not name as the best."""
SAVING = 0.05
"""A method that saves less than this share of what the full cache reads and computes saves nothing worth naming."""


def ranked(groups: Sequence[BenchGroup]) -> list[BenchGroup]:
    """The groups of one task without controls, the best first."""
    compared = [group for group in groups if name_of(group.method) not in CONTROLS]
    if not compared:
        return []
    return sorted(compared, key=lambda group: group.score, reverse=not task_class(groups[0].task).low_is_good)


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
    full = next((group for group in methods if group.method == FULL), None)
    compared = ranked(methods)
    control: BenchGroup | None = None
    for group in methods:
        alike = bool(compared) and compared[0].method.endswith(group.method.removeprefix(task.control))
        if name_of(group.method) == task.control and (control is None or alike):  # with the best one's budget
            control = group
    said = f"{task.control} was not run"
    if control is not None:
        said = f"{control.method}, the control: {_value(task, control, brief=True)}"
    if not compared:
        return f"In {where}, {said}; no other method was run."
    full_read = None if full is None else full.metrics.get("read")
    sentences: list[str] = []
    for interval in (True, False):
        place = where
        if interval and not task.counted:
            place = f"{where} ({task.unit})"
        sentences.append(f"{_found(task, place, compared, control, full_read, interval)}; {said}.")
    return short_sentence(sentences)


def _found(
    task: type[Task],
    where: str,
    compared: Sequence[BenchGroup],
    control: BenchGroup | None,
    full_read: float | None,
    interval: bool,
) -> str:
    """The best of the methods, the first, where its interval parts from that of the next one."""
    best, count = compared[0], len(compared)
    score, saved = _score(task, best, full_read, interval)
    if count > 1 and not best.differs(compared[1]):
        other, _ = _score(task, compared[1], full_read, interval)
        names = f"{_name(best)} and {_name(compared[1])}"
        if count > 2:
            names = f"{names}, the best of {count},"
        if control is not None and best.differs(control) and compared[1].differs(control):
            better = (best.score < control.score) == task.low_is_good
            beyond = "do better" if better else "do worse"
            return f"{names} {beyond} than {control.method} in {where}, too close to rank: {score} and {other}"
        return f"{names} are too close to rank in {where}: {score} and {other}"
    if count > 1:
        found = f"{_name(best)} is the best of {count} in {where}: {score}"
    else:
        found = f"{_name(best)} in {where}: {score}"
        if control is not None and not best.differs(control):
            found = f"{found}, no difference shown"
    if not task.counted and saved < SAVING:
        return f"{found}, saving less than {SAVING:.0%}"
    return found


def _name(group: BenchGroup) -> str:
    return "LoopGuard" if name_of(group.method) == GUARD else group.method


def _value(task: type[Task], group: BenchGroup, *, brief: bool = False) -> str:
    """7 of 12 answers loop, of a metric that is a share of the answers; otherwise the mean."""
    if task.counted:
        counted = f"{round(group.score * group.answers)} of {group.answers}"
        return counted if brief else f"{counted} answers {task.counted}"
    return task.shown.format(group.score)


def _score(task: type[Task], group: BenchGroup, full_read: float | None, interval: bool) -> tuple[str, float]:
    """The score of a method, its interval and the cost; and the largest share that it saves."""
    notes: list[str] = []
    shares: list[float] = []
    if interval and not math.isnan(group.low):
        shown = task.shown.partition(" ")[0]
        notes.append(f"{shown.format(group.low)}-{shown.format(group.high)}")
    cells, read = group.metrics.get("cells"), group.metrics.get("read")
    if cells is not None:
        notes.append(f"cells {100 * cells:.3g}%")
        shares.append(cells)
    if read is not None and full_read:
        notes.append(f"reads {read / full_read:.0%}")
        shares.append(read / full_read)
    elif read is not None:
        notes.append(f"reads {read:,.0f} tokens")
    score = _value(task, group)
    if notes:
        score = f"{score} ({', '.join(notes)})"
    return score, 1 - min(shares, default=0.0)
