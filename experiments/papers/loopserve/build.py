"""Dialogues of LoopServe's Algorithms 1 to 3 (appendix A.4.4) from LongBench's files, repaired.

    python -m experiments.papers.loopserve.build qasper qasper.jsonl --out qasper-set.jsonl [--turns 3]
    sinkscope bench --task qasper-set.jsonl:chat=true:new=128 --model MODEL --methods full,snapkv:1024 --out runs

Each dialogue is written three times, with the question at the beginning, in the middle and at the end of each turn
("part"). What differs from the printed algorithms:

- Algorithm 1 (questions): the turns that a question depends on may leave out the current one, so that the answer is
  nowhere. Here the current context is always there.
- Algorithm 2 (summaries): each turn becomes a separate item, and a document may continue after its summary was asked
  for. Here the turns form one dialogue, and a document ends by the turn that asks for its summary.
- Algorithm 3 (few-shot): every turn asks the same question. Here each turn but the last asks about a held-out example.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from experiments.longbench import ANSWER_ALONE, LongBenchRecord, read_longbench
from experiments.record import Row, write_rows
from experiments.script import run
from sinkscope.bench.tasks.recall import POSITIONS
from sinkscope.errors import SinkscopeError

ROUGE, ACCURACY = "experiments.papers.loopserve.scores:rouge_l", "experiments.papers.loopserve.scores:accuracy"
SIZES = {"qa": (3, 500), "summary": (2, 500), "few-shot": (2, 199)}
"""By algorithm, 1 to 3: turns of a dialogue, and dialogues of a set, in the paper."""
SETS = {
    "narrativeqa": ("qa", "f1"),
    "qasper": ("qa", "f1"),
    "multifieldqa_en": ("qa", "f1"),
    "hotpotqa": ("qa", "f1"),
    "2wikimqa": ("qa", "f1"),
    "musique": ("qa", "f1"),
    "multi_news": ("summary", ROUGE),
    "gov_report": ("summary", ROUGE),
    "qmsum": ("summary", ROUGE),
    "trec": ("few-shot", ACCURACY),
    # LoopServe names accuracy, which summaries do not have; LongBench uses Rouge-L.
    "samsum": ("few-shot", ROUGE),
}
"""The LongBench sets from which dialogues are built: the algorithm, and the score after LongBench's."""
HISTORY = "Use examples from previous turns with new examples."
_EXAMPLE = re.compile(r"^(?=(?:Question|Dialogue): )", re.M)
_LABEL = re.compile(r"^((?:Type|Summary):) ?(.*)\Z", re.M | re.S)
_TITLE_WORDS = 12  # LongBench has no titles; the first words of a document serve as one


BuiltTurn = tuple[dict[str, str], tuple[str, ...]]
"""A turn: its text by position of the question, and its correct answers."""


def build(
    name: str,
    records: Sequence[LongBenchRecord],
    *,
    turns: int | None = None,
    count: int | None = None,
    seed: int = 0,
) -> list[tuple[BuiltTurn, ...]]:
    """Build the dialogues of one set.

    Args:
        name: A name in `SETS`.
        records: Its records.
        turns: Turns per dialogue; None uses the paper's number.
        count: Number of dialogues; None uses the paper's number. Few-shot sets have at most one per record.
        seed: Seed of every random choice.

    Raises:
        SinkscopeError: There are too few records.
    """
    family = SETS[name][0]
    turns = turns or SIZES[family][0]
    count = count or SIZES[family][1]
    rng = random.Random(f"{name} repaired {seed}")
    if family == "few-shot":
        dialogues = [dialogue for record in records if (dialogue := few_shot(record, turns, rng))]
        if not dialogues:
            raise SinkscopeError(f"no record of {name} has the {2 * turns} examples that {turns} turns need")
        return dialogues[:count]
    if len(records) < 2 * turns:
        raise SinkscopeError(f"{len(records)} records: {turns} turns need {2 * turns}; give the whole file")
    make = question_answering if family == "qa" else summaries
    return [make(records, turns, rng) for _ in range(count)]


def split_at_middle(text: str) -> tuple[str, str]:
    """Split a text in two at the line break nearest to the middle; if there is none, at the nearest space."""
    gaps = [gap.start() for gap in re.finditer("\n" if "\n" in text else " ", text)]
    at = min(gaps, key=lambda place: abs(place - len(text) // 2), default=len(text) // 2)
    return text[:at].rstrip(), text[at:].lstrip()


def variants(question: str, halves: tuple[str, str], whole: str, glue: str, before: str = "") -> dict[str, str]:
    """The question before, between and after the halves of a context."""
    parts = {"begin": (question, whole), "middle": (halves[0], question, halves[1]), "end": (whole, question)}
    return {position: glue.join(part for part in (before, *parts[position]) if part) for position in POSITIONS}


def question_answering(records: Sequence[LongBenchRecord], turns: int, rng: random.Random) -> tuple[BuiltTurn, ...]:
    """Algorithm 1: each turn shows its own document, some of those before it and two that nothing is asked about."""
    shuffled = rng.sample(records, len(records))
    chosen, rest = shuffled[:turns], shuffled[turns:]
    dialogue: list[BuiltTurn] = []
    for turn, record in enumerate(chosen):
        shown = [*rng.sample(chosen[:turn], rng.randint(0, turn)), record, *rng.sample(rest, 2)]
        whole = "\n\n".join(each.context for each in shown)
        prompts = variants(f"Question: {record.question}", split_at_middle(whole), whole, "\n\n", ANSWER_ALONE)
        dialogue.append((prompts, record.answers or ("",)))
    return tuple(dialogue)


def summaries(records: Sequence[LongBenchRecord], turns: int, rng: random.Random) -> tuple[BuiltTurn, ...]:
    """Algorithm 2: the lines of a document are spread over the turns up to the one that asks for its summary."""
    shuffled = rng.sample(records, len(records))
    shown: list[list[str]] = [[] for _ in range(turns)]
    for number, record in enumerate(shuffled[:turns]):
        lines = [line for line in record.context.split("\n") if line.strip()]
        for line, turn in zip(lines, [*sorted(rng.choices(range(number + 1), k=len(lines) - 1)), number], strict=True):
            shown[turn].append(line)
    dialogue: list[BuiltTurn] = []
    for turn, record in enumerate(shuffled[:turns]):
        question = "Summarize: " + (record.question or " ".join(record.context.split()[:_TITLE_WORDS]))
        whole = "\n".join([*shown[turn], shuffled[turns + turn].context])
        dialogue.append((variants(question, split_at_middle(whole), whole, "\n\n"), record.answers or ("",)))
    return tuple(dialogue)


def few_shot(record: LongBenchRecord, turns: int, rng: random.Random) -> tuple[BuiltTurn, ...]:
    """Algorithm 3; empty if the record has too few examples."""
    examples = examples_of(record.context)
    if len(examples) < 2 * turns:
        return ()
    held_out = [examples.pop(rng.randrange(len(examples))) for _ in range(turns - 1)]
    dialogue: list[BuiltTurn] = []
    for turn in range(turns):
        own = examples[turn * len(examples) // turns : (turn + 1) * len(examples) // turns]
        question = record.question
        answers = record.answers or ("",)
        if turn < len(held_out):
            question, answers = asked_about(held_out[turn])
        halves = "\n".join(own[: len(own) // 2]), "\n".join(own[len(own) // 2 :])
        prompts = variants(question, halves, "\n".join(own), "\n", HISTORY if turn else "")
        dialogue.append((prompts, answers))
    return tuple(dialogue)


def examples_of(context: str) -> list[str]:
    """The examples in a record of TREC (`Question: ... Type: ...`) or SAMSum (`Dialogue: ... Summary: ...`)."""
    return [part.strip() for part in _EXAMPLE.split(context) if _LABEL.search(part.strip())]


def asked_about(example: str) -> tuple[str, tuple[str, ...]]:
    """An example as a question, and its answer."""
    label = _LABEL.search(example)
    assert label is not None  # `examples_of` keeps no other
    return example[: label.end(1)], (label[2].strip(),)


def classes_of(records: Sequence[LongBenchRecord]) -> list[str]:
    """LongBench's `all_classes`, and every other answer of records and examples."""
    names: set[str] = set()
    for record in records:
        names.update(record.classes, record.answers)
        for example in examples_of(record.context):
            names.update(asked_about(example)[1])
    return sorted(names)


def rows_of(name: str, dialogues: Sequence[tuple[BuiltTurn, ...]], classes: Sequence[str]) -> list[Row]:
    """Rows of the file of prompts: every dialogue at every position. Wrong classes follow the correct answer."""
    rows: list[Row] = []
    for number, dialogue in enumerate(dialogues):
        for position in POSITIONS:
            turns: list[Row] = []
            for prompts, right in dialogue:
                answers = [*right, *(each for each in classes if each not in right)]
                turns.append({"prompt": prompts[position], "answers": answers, "metric": SETS[name][1]})
            rows.append({"id": f"{name}-{number} {position}", "set": name, "part": position, "turns": turns})
    return rows


def main(
    set: Literal[*SETS],
    source: Path,
    *,
    turns: int | None = None,
    out: Path,
) -> None:
    """Make what the module describes.

    Args:
        source: LongBench's .jsonl of the set.
    """
    records = read_longbench(source)
    dialogues = build(set, records, turns=turns)
    rows = rows_of(set, dialogues, classes_of(records) if SETS[set][1] == ACCURACY else ())
    write_rows(out, rows)


if __name__ == "__main__":
    run(main)
