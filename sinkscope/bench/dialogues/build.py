"""Dialogues from benchmark files: as published, and by LoopServe's Algorithms 1 to 3, as printed and as repaired.

As published, each row becomes a dialogue and each of its questions a turn. The algorithms (appendix A.4.4) build
dialogues from LongBench; `docs/dialogues.md` lists what the paper leaves open and how each form settles it.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from sinkscope import __version__
from sinkscope.bench.dialogues.form import (
    NOT_COUNTED,
    POSITIONS,
    Dialogue,
    DialogueTurn,
    Position,
    dialogue_line,
    sizes,
    split_at_middle,
)
from sinkscope.bench.dialogues.recall import TASK as RECALL
from sinkscope.bench.dialogues.recall import recall_dialogues
from sinkscope.bench.files import (
    HUB,
    BuiltSet,
    LongBenchRecord,
    LongBenchSource,
    check_out,
    find_file,
    read_longbench,
)
from sinkscope.bench.published import FORMS, Asked, Record, read_published, set_of, spoken
from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Natural, check_values, refuse_twins
from sinkscope.measure import Count, Option, Positive, command
from sinkscope.models.load import open_tokenizer


def published_file(task: str) -> str:
    """Description of the file that a set is built from, for error messages.

    Raises:
        SinkscopeError: There is no such set, or it is not built from a file.
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
    """Build the dialogues of one set as its benchmark publishes it.

    The first turn holds the context and the first question, in three orders; later turns hold only questions. "end" is
    the benchmark's own order, except for scbench_mf, whose own order is "begin".

    Args:
        task: A name in `SETS`.
        source: The benchmark's file (`.jsonl`, `.json`, `.parquet`), a folder that contains it, or "hub".
        turns: Maximum number of turns per dialogue.
        count: Number of dialogues, from the beginning of the file.
        tokenizer: Counts tokens; calling it gives `input_ids`.
        revision: Branch, tag or commit of the dataset, for "hub".

    Raises:
        SinkscopeError: The task is unknown, no file was found, or a row has an unexpected format (names the row and
            line).
    """
    known, expected = set_of(task), published_file(task)
    check_values(Natural | None, turns=turns, count=count)
    name, digest, commit, rows = _published_rows(task, source, expected, revision)
    if count is not None and count > len(rows):
        raise SinkscopeError(f"count={count}: {name} has {len(rows)} rows: give fewer")
    refuse_twins([(where, row.id) for where, row in rows if row.id], "id", expected)
    groups: dict[str, list[str]] = {}
    for _, row in rows:
        groups.setdefault(row.group, []).extend(
            answer
            for each in row.asked
            if known.measures.get(each.measure, known.metric) == "function"
            for answer in each.answers
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


def _published_rows(
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
        # The benchmarks do not say where in a context the answer to a question stands.
        depends = (0,) if row.context else tuple(range(i + 1))
        metric = known.measures.get(asked.measure, "")
        made.append(DialogueTurn(prompts, answers or ("",), depends, None, metric))
    return tuple(made)


def _halves(task: str, context: str) -> tuple[str, str]:
    """Two halves; a pair of key and value is never divided."""
    at = context.find('", "', len(context) // 2) if task == "scbench_kv" else -1
    return (context[: at + 2], context[at + 3 :]) if at >= 0 else split_at_middle(context)


Form = Literal["faithful", "repaired"]
Family = Literal["qa", "summary", "few-shot"]
PAPER_WORDS_PER_TURN, PAPER_TURNS = 9321.49, 2.61
"""Row of Table 4 for all sets together."""


@dataclass(frozen=True)
class Task:
    """A LongBench set from which the paper's algorithms build dialogues.

    Attributes:
        name: Name of its file in LongBench.
        title: Name in the paper.
        family: Which of Algorithms 1 to 3 builds it.
        turns: Turns per dialogue in the paper.
        dialogues: Number of dialogues in the paper.
        tokens: "Avg Token" of Table 6; the paper names neither the tokenizer nor whether the count is per turn.
    """

    name: str
    title: str
    family: Family
    turns: int
    dialogues: int
    tokens: float


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("narrativeqa", "NQA", "qa", 3, 500, 30545.54),
        Task("qasper", "Qasper", "qa", 3, 500, 5434.41),
        Task("multifieldqa_en", "MFQA-en", "qa", 3, 500, 7279.64),
        Task("hotpotqa", "HotpotQA", "qa", 3, 500, 13847.19),
        Task("2wikimqa", "2WikiMQA", "qa", 3, 500, 7471.16),
        Task("musique", "Musique", "qa", 3, 500, 16587.56),
        Task("multi_news", "MultiNews", "summary", 2, 500, 2376.46),
        Task("gov_report", "GovReport", "summary", 2, 500, 9324.43),
        Task("qmsum", "QMSum", "summary", 2, 500, 12780.29),
        Task("trec", "TREC", "few-shot", 2, 199, 2293.99),
        Task("samsum", "SAMSUM", "few-shot", 2, 199, 3113.73),
    )
}
SYSTEM = "Answer the question based on the given passages. Only give me the answer and do not output any other words."
HISTORY = "Use examples from previous turns with new examples."
_EXAMPLE = re.compile(r"^(?=(?:Question|Dialogue): )", re.M)
_LABEL = re.compile(r"^((?:Type|Summary):) ?(.*)\Z", re.M | re.S)
_TITLE_WORDS = 12  # LongBench has no titles; the first words of a document serve as one


@command(group="Dialogues", command="dialogues build")
def build_dialogues(
    *,
    task: str,
    out: Annotated[str, Option(metavar="FILE", writes=True)],
    source: Annotated[str | None, Option(metavar="PATH|hub")] = None,
    form: Literal["faithful", "repaired"] = "repaired",
    turns: Positive | None = None,
    count: Positive | None = None,
    model: str | None = None,
    revision: str | None = None,
    tokenizer: Annotated[Path | None, Option(metavar="FOLDER")] = None,
    total_tokens: Positive | None = None,
    hops: Positive | None = None,
    force: bool = False,
    seed: Count = 0,
) -> None:
    """Build dialogues from published benchmark files, or for the recall model, and write a manifest next to them.

    Args:
        task: A set of LongBench (qasper), SCBench (scbench_kv), LongEval (longeval_topics), RULER (ruler_vt), MT-bench
            (mt_bench), or recall. An unknown name lists all.
        out: File for the dialogues, as JSON lines.
        source: The task's file, its folder, LongBench's data.zip, or hub.
        form: Follow the paper's algorithms as printed (faithful) or repaired.
        turns: Turns per dialogue. By default the paper's 2 or 3; 3 for recall, and all for sets with turns of their
            own.
        count: Number of dialogues. By default the paper's 500 or 199; 100 for recall, and all for other sets.
        model: Count tokens with the tokenizer of this model.
        revision: Branch, tag or commit on the hub.
        tokenizer: Count tokens with this tokenizer, instead of --model.
        total_tokens: For recall: total tokens of all turns, whose lengths vary. By default 768.
        hops: For recall: number of facts in the chain of an answer. By default 2.
        force: Replace --out if it exists.
        seed: Seed of every random choice.

    Example:
        sinkscope dialogues build --task recall --out recall.jsonl
    """
    check_out(out, force=force)
    counted = model is not None or tokenizer is not None
    recall, shared = task == RECALL, task not in TASKS
    set_of(task)
    _refuse_unused(task, sourced=bool(source or counted), sized=bool(total_tokens or hops), printed=form != "repaired")
    if recall:
        built = _recall_set(count or 100, turns or 3, total_tokens or 768, hops or 2, seed)
    else:
        if source is None:
            raise SinkscopeError(f"--task {task} is made from {published_file(task)}: give it as --source")
        counting = open_tokenizer(model, tokenizer, revision)[0] if counted else None
        if shared:
            built = build_published(task, source, turns=turns, count=count, tokenizer=counting)
        else:
            records = read_longbench(task, source)
            built = build(task, records, form=form, turns=turns, count=count, seed=seed, tokenizer=counting)
    built.deliver(dialogue_line, out, force=force)


def _refuse_unused(task: str, *, sourced: bool, sized: bool, printed: bool) -> None:
    """Refuse options that this task has no use for."""
    recall, shared = task == RECALL, task not in TASKS
    refused = {
        "--source, --model and --tokenizer mean nothing for recall, which is made up": recall and sourced,
        f"--total-tokens and --hops belong to recall: leave them out for {task}": not recall and sized,
        f"--form means nothing for {task}, whose questions are asked as published": shared and printed,
    }
    if wrong := [message for message, given in refused.items() if given]:
        raise SinkscopeError(wrong[0])


def _recall_set(count: int, turns: int, total: int, hops: int, seed: int) -> BuiltSet[Dialogue]:
    made = recall_dialogues(count, turns=turns, total=total, hops=hops, seed=seed)
    manifest = {"schema": 1, "kind": "dialogues", "task": RECALL, "seed": seed, "hops": hops, **sizes(made, None)}
    rows = (("recall", f"{len(made)} dialogues of {turns} turns, {total} tokens, {hops} hops"),)
    return BuiltSet(made, manifest, rows)


def build(
    task: str,
    source: LongBenchSource,
    *,
    form: Form | str = "repaired",
    turns: int | None = None,
    count: int | None = None,
    seed: int = 0,
    tokenizer: Any = None,
) -> BuiltSet[Dialogue]:
    """Build the dialogues of one task.

    Args:
        task: A name in `TASKS`.
        source: Its records, from `read_longbench`.
        form: "faithful" follows the paper as printed; "repaired" corrects it.
        turns: Turns per dialogue; None uses the paper's number.
        count: Number of dialogues; None uses the paper's number. Few-shot sets have at most one per record.
        seed: Seed of every random choice.
        tokenizer: Counts tokens of the variants with the question at the end; calling it gives `input_ids`.

    Raises:
        SinkscopeError: The task or form is unknown, a number is out of range, or there are too few records.
    """
    if task not in TASKS:
        raise SinkscopeError(f"task {task!r} is not of the paper: expected one of {', '.join(TASKS)}")
    known = TASKS[task]
    check_values(Form, form=form)
    n_turns, n = turns if turns is not None else known.turns, count if count is not None else known.dialogues
    if n_turns < 1 or n < 1:
        raise SinkscopeError(f"turns={n_turns}, count={n}: expected at least 1 of each")
    rng = random.Random(f"{task} {form} {seed}")
    skipped = 0
    if known.family == "few-shot":
        made, skipped = _few_shot(known, source.records, n_turns, n, form == "repaired", rng)
    else:
        if len(source.records) < 2 * n_turns:
            raise SinkscopeError(
                f"{source.name} has {len(source.records)} records, and {n_turns} turns need {2 * n_turns}: give the "
                "whole file, or fewer turns"
            )
        recipe = _question_answering if known.family == "qa" else _summaries
        made = []
        while len(made) < n:
            made += recipe(known, source.records, n_turns, len(made), form == "repaired", rng)
        made = made[:n]
    manifest = _manifest(known, source, made, form, seed, tokenizer, skipped)
    return BuiltSet(tuple(made), manifest, _rows(manifest))


def _variants(question: str, context: str, *, before: str = "") -> dict[Position, str]:
    """The question before, inside and after the context, which is divided between lines or words."""
    first, second = split_at_middle(context)
    parts = {"begin": (question, context), "middle": (first, question, second), "end": (context, question)}
    return {position: "\n\n".join(part for part in (before, *parts[position]) if part) for position in POSITIONS}


def _question_answering(
    task: Task, records: Sequence[LongBenchRecord], turns: int, number: int, repaired: bool, rng: random.Random
) -> list[Dialogue]:
    """Algorithm 1. Repaired: the context always includes that of the current turn."""
    chosen = rng.sample(range(len(records)), turns)
    rest = [i for i in range(len(records)) if i not in set(chosen)]
    irrelevant = [rng.sample(rest, turns), rng.sample(rest, turns)]
    said: set[str] = set()
    made: list[DialogueTurn] = []
    for turn, index in enumerate(chosen):
        if repaired:
            depends = [*rng.sample(range(turn), rng.randint(0, turn)), turn]
        else:
            depends = rng.sample(range(turn + 1), rng.randint(1, turn + 1))
        contexts = [records[chosen[t]].context for t in depends] + [
            records[drawn[turn]].context for drawn in irrelevant
        ]
        said.update(contexts)
        record = records[index]
        prompts = _variants(f"Question: {record.question}", "\n\n".join(contexts), before=SYSTEM)
        made.append(DialogueTurn(prompts, _answers(record), tuple(sorted(depends)), record.context in said))
    return [Dialogue(f"{task.name}-{number}", task.name, tuple(made))]


def _summaries(
    task: Task, records: Sequence[LongBenchRecord], turns: int, number: int, repaired: bool, rng: random.Random
) -> list[Dialogue]:
    """Algorithm 2. As printed, each turn is a separate item of the set, and a document may continue in later turns.

    Repaired, the turns form one dialogue, a document ends by the turn that asks for its summary, each part appears
    once, and irrelevant contexts are not documents of the dialogue.
    """
    chosen = rng.sample(range(len(records)), turns)
    others = [i for i in range(len(records)) if i not in set(chosen)] if repaired else range(len(records))
    irrelevant = rng.sample(others, turns)
    documents = [fragments(records[i].context) for i in chosen]
    assigned = [
        sorted(rng.randint(0, doc if repaired else turns - 1) for _ in parts) for doc, parts in enumerate(documents)
    ]
    if repaired:
        for doc, at in enumerate(assigned):
            at[-1] = doc
    made: list[DialogueTurn] = []
    for turn, index in enumerate(chosen):
        parts = [
            part
            for document, at in zip(documents, assigned, strict=True)
            for part, when in zip(document, at, strict=True)
            if (when == turn if repaired else when <= turn)
        ]
        record = records[index]
        asked = "Summarize: " + (record.question or " ".join(record.context.split()[:_TITLE_WORDS]))
        prompts = _variants(asked, "\n".join([*parts, records[irrelevant[turn]].context]))
        whole = assigned[turn][-1] <= turn or irrelevant[turn] == index
        depends = tuple(sorted({when for when in assigned[turn] if when <= turn}))
        made.append(DialogueTurn(prompts, _answers(record), depends, whole))
    if repaired:
        return [Dialogue(f"{task.name}-{number}", task.name, tuple(made))]
    # In an item of one turn there are no earlier ones to depend on.
    return [
        Dialogue(f"{task.name}-{number + i}", task.name, (DialogueTurn(t.prompts, t.answers, (0,), t.answerable),))
        for i, t in enumerate(made)
    ]


def fragments(document: str) -> list[str]:
    """The paragraphs of a document: its non-empty lines."""
    return [line for line in document.split("\n") if line.strip()]


def _few_shot(
    task: Task, records: Sequence[LongBenchRecord], turns: int, count: int, repaired: bool, rng: random.Random
) -> tuple[list[Dialogue], int]:
    """Algorithm 3. Repaired: each turn but the last asks about a held-out example, not the same question again."""
    classes = _classes(records) if set_of(task.name).metric == "accuracy" else ()
    made: list[Dialogue] = []
    skipped = 0
    for record in records:
        examples = examples_of(record.context)
        if len(examples) < 2 * turns:
            skipped += 1
            continue
        held = [examples.pop(rng.randrange(len(examples))) for _ in range(turns - 1)] if repaired else []
        spoken: list[DialogueTurn] = []
        for turn in range(turns):
            own = examples[turn * len(examples) // turns : (turn + 1) * len(examples) // turns]
            question, answers = _held_out(held[turn]) if turn < len(held) else (record.question, _answers(record))
            half = len(own) // 2
            before = HISTORY if turn else ""
            shots, first, second = ("\n".join(part) for part in (own, own[:half], own[half:]))
            parts = {"begin": (question, shots), "middle": (first, question, second), "end": (shots, question)}
            prompts: dict[Position, str] = {
                p: "\n".join(part for part in (before, *parts[p]) if part) for p in POSITIONS
            }
            spoken.append(DialogueTurn(prompts, answers, tuple(range(turn + 1))))
        made.append(Dialogue(f"{task.name}-{len(made)}", task.name, tuple(spoken), classes))
        if len(made) == count:
            break
    if not made:
        raise SinkscopeError(
            f"no record of {task.name} has the {2 * turns} examples that {turns} turns need: give fewer turns"
        )
    return made, skipped


def _classes(records: Sequence[LongBenchRecord]) -> tuple[str, ...]:
    """LongBench's `all_classes`, and every other answer of records and examples."""
    found = {name for record in records for name in (*(record.classes or ()), *record.answers)}
    shown = {context for record in records for context in examples_of(record.context)}
    return tuple(sorted(found | {answer for example in shown for answer in _held_out(example)[1]}))


def examples_of(context: str) -> list[str]:
    """The examples in a record of TREC (`Question: ... Type: ...`) or SAMSum (`Dialogue: ... Summary: ...`)."""
    parts = (part.strip() for part in _EXAMPLE.split(context))
    return [part for part in parts if part and _LABEL.search(part)]


def _held_out(example: str) -> tuple[str, tuple[str, ...]]:
    """An example as a question, and its answer."""
    found = _LABEL.search(example)
    assert found is not None  # `examples_of` keeps no other
    return example[: found.end(1)], (found[2].strip(),)


def _answers(record: LongBenchRecord) -> tuple[str, ...]:
    return record.answers or ("",)


def _manifest(
    task: Task,
    source: LongBenchSource,
    made: Sequence[Dialogue],
    form: str,
    seed: int,
    tokenizer: Any,
    skipped: int,
) -> dict[str, Any]:
    return {
        "schema": 1,
        "kind": "dialogues",
        "task": task.name,
        "title": task.title,
        "metric": set_of(task.name).metric,
        "form": form,
        "seed": seed,
        **sizes(made, tokenizer),
        "unanswerable": sum(turn.answerable is False for dialogue in made for turn in dialogue.turns),
        "skipped": skipped,
        "paper": {
            "dialogues": task.dialogues,
            "turns": task.turns,
            "tokens": task.tokens,
            "all_words_per_turn": PAPER_WORDS_PER_TURN,
            "all_turns": PAPER_TURNS,
        },
        "source": {
            "name": source.name,
            "records": len(source.records),
            "sha256": source.sha256,
            "commit": source.commit,
        },
        "versions": {"sinkscope": __version__},
    }


def _rows(m: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """The manifest for the reader."""
    paper, tokens = m["paper"], m["tokens"]
    counted = f"{tokens['turn']:,.1f} a turn, {tokens['dialogue']:,.1f} a dialogue" if tokens else NOT_COUNTED
    rows = (
        (m["title"], f"{m['dialogues']} dialogues (paper {paper['dialogues']}), {m['form']}"),
        ("turns", f"{m['turns']:.2f} (paper {paper['turns']}; over all its sets {paper['all_turns']})"),
        ("words", f"{m['words']['turn']:,.1f} a turn (paper, over all its sets: {paper['all_words_per_turn']:,})"),
        ("tokens", f"{counted} (paper {paper['tokens']:,})"),
        ("unanswerable", f"{m['unanswerable']} of {m['questions']} questions"),
        ("source", f"{m['source']['name']}, {m['source']['records']} records"),
    )
    return (*rows, ("skipped", f"{m['skipped']} records with too few examples")) if m["skipped"] else rows
