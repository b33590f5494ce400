"""What a benchmark says in at most 30 words: the best method if intervals do not overlap, its cost and its control."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sinkscope.bench.group import BenchGroup
from sinkscope.bench.methods import FULL, method_name
from sinkscope.bench.task import task_class

NOT_RANKED = (FULL, "random", "sampling")
"""Methods that a conclusion does not name as the best."""


def ranked(groups: Sequence[BenchGroup]) -> list[BenchGroup]:
    """Return the groups of one set and one model without controls, the best first."""
    compared = [group for group in groups if method_name(group.method) not in NOT_RANKED]
    if not compared:
        return []
    return sorted(compared, key=lambda group: group.score, reverse=not task_class(groups[0].task).low_is_good)


def control_of(groups: Sequence[BenchGroup]) -> BenchGroup | None:
    """Return the control among such groups; of several, the one with the budget of the best method."""
    task, best = task_class(groups[0].task), ranked(groups)
    controls = [group for group in groups if method_name(group.method) == task.control]
    for group in controls:
        if best and best[0].method.endswith(group.method.removeprefix(task.control)):
            return group
    return next(iter(controls), None)


def costs(group: BenchGroup, groups: Sequence[BenchGroup]) -> list[str]:
    """Return what a method reads in a step and computes of prompts, in words, as shares of the full cache."""
    found: list[str] = []
    if group.method == FULL:
        return found
    for full in groups:
        read, whole = group.metrics.get("read"), full.metrics.get("read")
        if full.method == FULL and read is not None and whole:
            found.append(f"reads {read / whole:.0%}")
    cells = group.metrics.get("cells")
    if cells is not None:
        found.append(f"computes {cells:.0%}")
    return found


def finding(groups: Sequence[BenchGroup]) -> str:
    """Return a sentence on one set and one model: the best method, if intervals do not overlap, beside the control.

    Args:
        groups: All groups of one set and one model.
    """
    task, compared, control = task_class(groups[0].task), ranked(groups), control_of(groups)
    said = f"{task.control} was not run"
    if control is not None:
        said = f"control {control.method} has {task.value_in_words(control.score)}"
    if not compared:
        return f"In {groups[0].title}, {said}; no other method was run."
    best, *others = compared
    notes = costs(best, groups)
    if not math.isnan(best.low):
        notes.insert(0, f"{task.shown.format(best.low)}-{task.shown.format(best.high)}")
    score, where = task.value_in_words(best.score), f"in {best.title} ({task.unit})"
    if notes:
        score = f"{score} ({', '.join(notes)})"
    found = f"{best.method} has {score} {where}"
    rival = next(iter(others), control)
    if rival is not None and not (best.low > rival.high or best.high < rival.low):  # their intervals overlap
        of_rival = ", ".join(costs(rival, groups))
        found = f"{found}, too close to {rival.method}{of_rival and f' ({of_rival})'} to rank"
    elif others:
        found = f"{best.method} is the best of {len(compared)} {where} with {score}"
    return f"{found}; {said}."
