"""What a benchmark says in at most 30 words: the best method, how far ahead it is, its cost and its control.

1. The methods of one set, one model and one run are ordered by score; controls are not.
2. The best one is compared with each other method, or with the control if there is none, prompt by prompt.
3. It is called the best if the interval of every difference leaves zero out.
"""

from __future__ import annotations

from collections.abc import Sequence

from sinkscope.bench.group import BenchGroup, difference
from sinkscope.bench.methods import FULL
from sinkscope.bench.scores import PERCENT
from sinkscope.bench.task import task_class
from sinkscope.measure.margin import Interval
from sinkscope.results.notation import short_sentence

NOT_RANKED = (FULL, "random", "sampling")
"""Methods that a conclusion does not name as the best."""


def ranked(groups: Sequence[BenchGroup]) -> list[BenchGroup]:
    """Return the groups of one place without controls, the best first."""
    compared = [group for group in groups if group.method.name not in NOT_RANKED]
    if not compared:
        return []
    return sorted(compared, key=lambda group: group.score, reverse=not task_class(groups[0].task).low_is_good)


def control_of(groups: Sequence[BenchGroup]) -> BenchGroup | None:
    """Return the control among such groups; of several, the one with the budget of the best method."""
    task, best = task_class(groups[0].task), ranked(groups)
    controls = [group for group in groups if group.method.name == task.control]
    for group in controls:
        if best and best[0].method.budget == group.method.budget:
            return group
    return next(iter(controls), None)


def costs(group: BenchGroup, groups: Sequence[BenchGroup]) -> list[str]:
    """Return what a method reads in a step and computes of prompts, in words, as shares of the full cache."""
    found: list[str] = []
    if group.method.name == FULL:
        return found
    full = next((one for one in groups if (one.method.name, one.set) == (FULL, group.set)), None)
    read, whole = group.metrics.get("read"), None if full is None else full.metrics.get("read")
    if read is not None and whole:
        found.append(f"reads {read / whole:.0%}")
    cells = group.metrics.get("cells")
    if cells is not None:
        found.append(f"computes {cells:.0%}")
    return found


def lead_of(best: BenchGroup, other: BenchGroup) -> Interval | None:
    """Return how far the best method is ahead of another one; None if that is not known."""
    if task_class(best.task).low_is_good:
        best, other = other, best
    return difference(best, other)


def too_close(best: BenchGroup, other: BenchGroup) -> bool:
    """Return whether the difference between two methods may be zero, or is not known."""
    lead = lead_of(best, other)
    return lead is None or lead.low <= 0 <= lead.high


def finding(groups: Sequence[BenchGroup]) -> str:
    """Return a sentence on the groups of one place: the best method, its lead with the margin, and the control."""
    task, compared, control = task_class(groups[0].task), ranked(groups), control_of(groups)
    said = f"{task.control} was not run"
    if control is not None:
        said = f"control {control.method} has {task.value_in_words(control.score)}"
    if not compared:
        return f"In {groups[0].title}, {said}; no other method was run."
    best, *others = compared
    rivals = others or ([] if control is None else [control])
    notes = costs(best, groups)
    if task.main in PERCENT and best.margin is not None:
        notes.insert(0, f"{task.shown.format(best.low)}-{task.shown.format(best.high)}")
    elif best.margin is not None:
        notes.insert(0, f"±{task.shown.format(best.margin)}")
    score = task.value_in_words(best.score)
    if notes:
        score = f"{score} ({', '.join(notes)})"
    where = f"in {best.title} ({task.unit})"
    found = f"{best.method} has {score} {where}"
    if not rivals:
        return f"{found}; {said}."
    equal = [rival for rival in rivals if too_close(best, rival)]
    if not equal:
        if others:
            found = f"{best.method} is the best of {len(compared)} {where} with {score}"
        return f"{found}, {lead_in_words(best, rivals[0])}; {said}."
    sentences: list[str] = []
    of_rival = costs(equal[0], groups)
    for kept in range(len(of_rival), -1, -1):
        sentences.append(f"{found}, {lead_in_words(best, equal[0], of_rival[:kept])}: too close to rank; {said}.")
    return short_sentence(sentences)


def lead_in_words(best: BenchGroup, other: BenchGroup, notes: Sequence[str] = ()) -> str:
    """Return how far the best method is ahead, such as "5±3 points ahead of h2o:4 (reads 33%)"."""
    task, lead = task_class(best.task), lead_of(best, other)
    name = str(other.method)
    if notes:
        name = f"{name} ({', '.join(notes)})"
    if lead is None:
        return f"beside {name}"
    side, size = "ahead of", lead.mean
    if size < 0:
        side, size = "behind", -size
    if too_close(best, other):
        side = "from"
    if task.main in PERCENT:
        return f"{100 * size:.0f}±{100 * lead.margin:.0f} points {side} {name}"
    return f"{task.shown.format(size)}±{task.shown.format(lead.margin)} {side} {name}"
