"""Dialogues from benchmarks' files: each row becomes a dialogue, and each of its questions a turn."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from sinkscope import __version__
from sinkscope.bench.dialogues.form import (
    NOT_COUNTED,
    POSITIONS,
    Dialogue,
    DialogueTurn,
    Position,
    sizes,
    split_at_middle,
)
from sinkscope.bench.files import HUB, BuiltSet, find_file
from sinkscope.bench.loopbench.longbench import read_longbench
from sinkscope.errors import SinkscopeError
from sinkscope.published import FORMS, Asked, Published, Record, read_published, set_of, spoken
from sinkscope.records import refuse_twins


def published_file(task: str) -> str:
    """What a set is made from, for errors.

    Raises:
        SinkscopeError: no such set, or one that has no file.
    """
    if (form := FORMS.get(set_of(task).form)) is None:
        raise SinkscopeError(f"task {task!r} is read from no file: leave out --source")
    return f"{form.whose}'s {_named(task, form.files[0])}" + (f", or {HUB}" if form.hub else "")


def _named(task: str, pattern: str) -> str:
    return pattern.replace("{}", task.removeprefix("ruler_"))


def build_published(
    task: str,
    source: str | os.PathLike[str],
    *,
    turns: int | None = None,
    count: int | None = None,
    tokenizer: Any = None,
    revision: str | None = None,
) -> BuiltSet[Dialogue]:
    """Dialogues of one set as its benchmark publishes it.

    The first turn holds the context and the first question, in three orders; the next turns hold only questions. "end"
    is the benchmark's own order, except for scbench_mf, where it is "begin".

    Args:
        task: a name in `SETS`.
        source: the benchmark's file (`.jsonl`, `.json`, `.parquet`), a folder that holds it, or "hub".
        turns: largest number of turns of a dialogue.
        count: number of dialogues, from the front of the file.
        tokenizer: counts tokens; calling it gives `input_ids`.
        revision: branch, tag or commit of the dataset, for "hub".

    Raises:
        SinkscopeError: unknown task, nothing there, or a row of another form (which, and its line).
    """
    known, expected = set_of(task), published_file(task)
    for name, value in (("turns", turns), ("count", count)):
        if value is not None and value < 1:
            raise SinkscopeError(f"{name}={value}: expected at least 1")
    name, digest, commit, rows = _rows(task, source, expected, revision)
    if count is not None and count > len(rows):
        raise SinkscopeError(f"count={count}: {name} has {len(rows)} rows: give fewer")
    refuse_twins([(where, row.id) for where, row in rows if row.id], "id", expected)
    groups: dict[str, list[str]] = {}
    for _, row in rows:
        groups.setdefault(row.group, []).extend(
            a for each in row.asked if _by_function(known, each) for a in each.answers
        )
    made = [
        Dialogue(
            f"{task}-{row.id or i}", task, _turns(task, row, where, expected), tuple(dict.fromkeys(groups[row.group]))
        )
        for i, (where, row) in enumerate(rows)
    ]
    chosen = tuple(Dialogue(d.id, d.task, d.turns[:turns], d.classes) for d in made[:count])
    unknown = sum(not any(turn.answers) for dialogue in chosen for turn in dialogue.turns)
    metric = known.metric or ", ".join(f"{name} by {metric}" for name, metric in known.measures.items())
    m: dict[str, Any] = {
        "schema": 1,
        "kind": "dialogues",
        "task": task,
        "metric": metric,
        "without_answer": unknown,
        **sizes(chosen, tokenizer),
        "versions": {"sinkscope": __version__},
        "source": {"name": name, "records": len(rows), "sha256": digest, "commit": commit},
    }
    told = (
        (task, f"{m['dialogues']} dialogues"),
        ("turns", f"{m['turns']:.2f}"),
        ("words", f"{m['words']['dialogue']:,.1f} a dialogue"),
        ("tokens", f"{m['tokens']['dialogue']:,.1f} a dialogue" if m["tokens"] else NOT_COUNTED),
        ("scored by", metric + (f"; {unknown} questions have no right answer" if unknown else "")),
        ("source", name),
    )
    return BuiltSet(chosen, m, told)


def _rows(
    task: str, source: str | os.PathLike[str], expected: str, revision: str | None
) -> tuple[str, str, str | None, list[tuple[str, Record]]]:
    """Name, sha256 and commit of the file, and its rows."""
    known, form = set_of(task), FORMS[set_of(task).form]
    if known.form == "longbench":
        found = read_longbench(task, source, revision=revision)
        rows = [(found.name, Record(r.id, r.context, (Asked(r.question, r.answers),))) for r in found.records]
        return found.name, found.sha256, found.commit, rows
    if os.fspath(source) == HUB and not form.hub:
        raise SinkscopeError(f"--source {HUB}: {form.whose} is not read from the hub: give {expected}")
    names, there = [_named(task, name) for name in form.files], _named(task, form.hub_file)
    file = find_file(source, names, expected, repo=form.hub, file=there, revision=revision)
    return (
        file.name,
        hashlib.sha256(file.path.read_bytes()).hexdigest(),
        file.commit,
        read_published(file.path, known.form, expected),
    )


def _by_function(known: Published, asked: Asked) -> bool:
    return known.measures.get(asked.measure, known.metric) == "function"


def _turns(task: str, row: Record, where: str, expected: str) -> tuple[DialogueTurn, ...]:
    known, made = set_of(task), list[DialogueTurn]()
    for i, asked in enumerate(row.asked):
        try:
            question, cue, whole, answers = spoken(task, asked)
            if known.measures and asked.measure not in known.measures:
                raise SinkscopeError(f"task is {asked.measure!r}, expected {' or '.join(known.measures)}")
        except SinkscopeError as error:
            raise SinkscopeError(f"{where}, multi_turns[{i}]: {error}: give {expected}") from None
        prompts: dict[Position, str] = dict.fromkeys(POSITIONS, whole)
        if i == 0 and row.context:
            first, second = _halves(task, row.context)
            parts = {
                "begin": (question, row.context, cue),
                "middle": (first, question, second, cue),
                "end": (row.context, whole),
            }
            prompts = {p: known.between.join(part for part in (known.head, *parts[p]) if part) for p in POSITIONS}
        # Where the answer to a question about a context stands in it, the benchmarks do not say.
        depends = (0,) if row.context else tuple(range(i + 1))
        metric = known.measures.get(asked.measure, "")
        made.append(DialogueTurn(prompts, answers or ("",), depends, None, metric))
    return tuple(made)


def _halves(task: str, context: str) -> tuple[str, str]:
    """Two halves; a pair of key and value is never divided."""
    at = context.find('", "', len(context) // 2) if task == "scbench_kv" else -1
    return (context[: at + 2], context[at + 3 :]) if at >= 0 else split_at_middle(context)
