"""Dialogues from SCBench's files (Li et al. 2025): the first turn holds a long context, and every turn asks about it.

Fields, prompts and scores are those of the benchmark's own code, https://github.com/microsoft/MInference, folder
scbench. A row has `context` (`input` in scbench_vt) and `multi_turns`, a list of `input`, `answer` and, in some tasks,
`options` or `task`.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from typing import Any, Literal

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
from sinkscope.errors import SinkscopeError
from sinkscope.records import check, read_rows

Family = Literal["qa", "summary", "few-shot"]
Metric = Literal["f1", "rouge-l", "accuracy", "exact", "contains"]
PAPER_WORDS_PER_TURN, PAPER_TURNS = 9321.49, 2.61
"""Row of Table 4 for all sets together."""


@dataclass(frozen=True)
class Task:
    """One set.

    Attributes:
        name: its file in LongBench.
        title: its name in the paper.
        family: which of Algorithms 1 to 3 builds it.
        metric: how answers are scored.
        turns: turns of a dialogue, in the paper.
        dialogues: number of dialogues, in the paper.
        tokens: "Avg Token" of Table 6; the paper does not say for which tokenizer, nor whether for a turn.
    """

    name: str
    title: str
    family: Family
    metric: Metric
    turns: int
    dialogues: int
    tokens: float


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("narrativeqa", "NQA", "qa", "f1", 3, 500, 30545.54),
        Task("qasper", "Qasper", "qa", "f1", 3, 500, 5434.41),
        Task("multifieldqa_en", "MFQA-en", "qa", "f1", 3, 500, 7279.64),
        Task("hotpotqa", "HotpotQA", "qa", "f1", 3, 500, 13847.19),
        Task("2wikimqa", "2WikiMQA", "qa", "f1", 3, 500, 7471.16),
        Task("musique", "Musique", "qa", "f1", 3, 500, 16587.56),
        Task("multi_news", "MultiNews", "summary", "rouge-l", 2, 500, 2376.46),
        Task("gov_report", "GovReport", "summary", "rouge-l", 2, 500, 9324.43),
        Task("qmsum", "QMSum", "summary", "rouge-l", 2, 500, 12780.29),
        Task("trec", "TREC", "few-shot", "accuracy", 2, 199, 2293.99),
        # The paper names accuracy, which summaries do not have; LongBench uses Rouge-L.
        Task("samsum", "SAMSUM", "few-shot", "rouge-l", 2, 199, 3113.73),
    )
}


def task_of(name: str) -> Task:
    """The task of that name.

    Raises:
        SinkscopeError: there is none; the message lists all.
    """
    if name not in TASKS:
        raise SinkscopeError(f"task {name!r} is unknown: expected one of {', '.join(TASKS)}, recall, or scbench_...")
    return TASKS[name]


REPO = "microsoft/SCBench"
_KV, _MF, _CHOICE = "scbench_kv", "scbench_mf", "scbench_choice_eng"


@dataclass(frozen=True)
class Shared:
    """One set of SCBench.

    Attributes:
        new_tokens: longest answer, from the benchmark's code.
        metric: how answers are scored.
        scored: whether this package can score them.
        head: text before the context.
        asks: the question, around `input`.
        cue: text at the end of a turn, which the answer continues.
        gap: text between the question and the cue.
    """

    new_tokens: int
    metric: Metric | str
    scored: bool = False
    head: str = ""
    asks: str = "{input}"
    cue: str = ""
    gap: str = "\n"


_REPO_HEAD = (
    "Based on the function description and code context, please retrieve and repeat the exact described function from "
    "the code context in a code block wrapped by ```:"
)
SCBENCH: dict[str, Shared] = {
    _KV: Shared(
        150, "contains", True, "Extract the value corresponding to the specified key in the JSON object below."
    ),
    "scbench_prefix_suffix": Shared(150, "contains", True),
    "scbench_vt": Shared(30, "the share of its variables that are named"),
    "scbench_repoqa": Shared(1024, "the similarity of functions, after parsing", head=_REPO_HEAD),
    "scbench_qa_eng": Shared(
        40,
        "contains",
        True,
        "Read the book and answer the question. Be very concise in your answer.",
        "Question: {input}",
        "Answer:",
    ),
    "scbench_qa_chn": Shared(
        40,
        "F1 of Chinese characters",
        head="阅读以下书籍然后回答问题。",
        asks="问题：{input}",
        cue="答案：",
    ),
    _CHOICE: Shared(
        40,
        "the first letter that may be meant",
        head="Read the book and answer the question.",
        asks="Question: {input}",
        cue="The letter of the correct answer is",
        gap="\n\n",
    ),
    "scbench_many_shot": Shared(10, "whether any of its answer's characters is said"),
    "scbench_summary": Shared(200, "Rouge-Lsum, line by line"),
    _MF: Shared(5, "the first number that is said", asks="What is {input}?", gap="\n\n"),
    "scbench_summary_with_needles": Shared(800, "two measures, by turn"),
    "scbench_repoqa_and_kv": Shared(1024, "two measures, by turn"),
}
"""By name. "contains": the model's text contains the answer; upper and lower case are equal for scbench_qa_eng."""


def shared_metric(task: str) -> Metric:
    """How answers of a set of SCBench are scored.

    Raises:
        SinkscopeError: this package cannot score them.
    """
    known = SCBENCH[task]
    if not known.scored:
        ours = ", ".join(name for name, each in SCBENCH.items() if each.scored)
        raise SinkscopeError(f"{task} is scored by {known.metric}, which is not here: of SCBench {ours} can be run")
    return "contains"


def build_shared(
    task: str,
    source: str | os.PathLike[str],
    *,
    turns: int | None = None,
    count: int | None = None,
    tokenizer: Any = None,
    repo: str = REPO,
    revision: str | None = None,
) -> BuiltSet[Dialogue]:
    """Dialogues of one set of SCBench.

    The first turn holds the context and the first question, in three orders; the next turns hold only questions. "end"
    is SCBench's own order, except for scbench_mf, where it is "begin".

    Args:
        task: a name in `SCBENCH`.
        source: SCBench's file (`.jsonl`, `.json`, `.parquet`), a folder that holds it, or "hub".
        turns: largest number of turns of a dialogue.
        count: number of dialogues, from the front of the file.
        tokenizer: counts tokens; calling it gives `input_ids`.
        repo: dataset on the hub, for "hub".
        revision: branch, tag or commit of it, for "hub".

    Raises:
        SinkscopeError: unknown task, nothing there, or a row without turns or with a damaged field (which, and its
            line).
    """
    if task not in SCBENCH:
        raise SinkscopeError(f"task {task!r} is unknown: expected one of {', '.join(SCBENCH)}")
    for name, value in (("turns", turns), ("count", count)):
        if value is not None and value < 1:
            raise SinkscopeError(f"{name}={value}: expected at least 1")
    expected = f"SCBench's {task}.jsonl, or {HUB}"
    names = [f"{task}{kind}" for kind in (".jsonl", ".json", ".parquet")]
    found = find_file(source, names, expected, repo=repo, file=f"data/{task}.jsonl", revision=revision)
    rows = [(where, check(row, _Row, where, expected)) for where, row in read_rows(found.path, expected)]
    if count is not None and count > len(rows):
        raise SinkscopeError(f"count={count}: {found.name} has {len(rows)} rows: give fewer")
    made = [_dialogue(task, number, row, where, expected) for number, (where, row) in enumerate(rows)]
    chosen = tuple(Dialogue(d.id, d.task, d.turns[:turns]) for d in made[:count])
    digest = hashlib.sha256(found.path.read_bytes()).hexdigest()
    shared = SCBENCH[task]
    m: dict[str, Any] = {
        "schema": 1,
        "kind": "dialogues",
        "task": task,
        "metric": shared.metric,
        "scored": shared.scored,
        **sizes(chosen, tokenizer),
        "versions": {"sinkscope": __version__},
        "source": {"name": found.name, "records": len(rows), "sha256": digest, "commit": found.commit},
    }
    told = (
        (task, f"{m['dialogues']} dialogues"),
        ("turns", f"{m['turns']:.2f}"),
        ("words", f"{m['words']['dialogue']:,.1f} a dialogue"),
        ("tokens", f"{m['tokens']['dialogue']:,.1f} a dialogue" if m["tokens"] else NOT_COUNTED),
        ("scored by", shared.metric + ("" if shared.scored else ", which is not here: cannot be run")),
        ("source", found.name),
    )
    return BuiltSet(chosen, m, told)


@dataclass(frozen=True)
class _Asked:
    """A turn of a row."""

    input: str
    answer: Any
    options: tuple[str, ...] | None = None

    @property
    def right(self) -> list[Any]:
        return self.answer if isinstance(self.answer, list) else [self.answer]

    def __post_init__(self) -> None:
        if not self.input.strip():
            raise SinkscopeError(f"input is {self.input!r}, expected a text")
        if not self.right or not all(isinstance(a, str | int | float) and not isinstance(a, bool) for a in self.right):
            raise SinkscopeError(f"answer is {self.answer!r:.40}, expected a text, a number or a list of them")


@dataclass(frozen=True)
class _Row:
    multi_turns: tuple[_Asked, ...]
    context: Any = None
    input: Any = None

    def __post_init__(self) -> None:
        if not self.multi_turns:
            raise SinkscopeError("multi_turns is [], expected a list of at least one turn")


def _dialogue(task: str, number: int, row: _Row, where: str, expected: str) -> Dialogue:
    context = row.input if row.context is None else row.context
    if task == _MF and isinstance(context, list) and context:
        context = str(context)  # as SCBench prints numbers
    if not isinstance(context, str) or not context.strip():
        raise SinkscopeError(f"{where}: context is {context!r:.40}, expected a text: give {expected}")
    made: list[DialogueTurn] = []
    for i, asked in enumerate(row.multi_turns):
        question, cue, answers = _said(task, asked, f"{where}, multi_turns[{i}]", expected)
        whole = f"{question}{SCBENCH[task].gap}{cue}" if cue else question
        prompts: dict[Position, str] = dict.fromkeys(POSITIONS, whole)
        if i == 0:
            first, second = _halves(task, context)
            parts = {
                "begin": (question, context, cue),
                "middle": (first, question, second, cue),
                "end": (context, whole),
            }
            prompts = {p: "\n\n".join(part for part in (SCBENCH[task].head, *parts[p]) if part) for p in POSITIONS}
        # SCBench says only that an answer is in the context, not where.
        made.append(DialogueTurn(prompts, answers, (0,), None))
    return Dialogue(f"{task}-{number}", task, tuple(made))


def _said(task: str, asked: _Asked, where: str, expected: str) -> tuple[str, str, tuple[str, ...]]:
    """Question, cue and answers."""
    # scbench_vt asks for all of its variables; elsewhere each answer of a list is right.
    answers = (" ".join(map(str, asked.right)),) if task == "scbench_vt" else tuple(map(str, asked.right))
    shared = SCBENCH[task]
    if task == _MF:
        target = re.search(r"The .+ is", asked.input)
        if target is None:
            raise SinkscopeError(f"{where}: input is {asked.input!r:.40}, expected 'The ... is': give {expected}")
        return shared.asks.format(input=target.group().lower()[:-3]), asked.input, answers
    question = shared.asks.replace("{input}", asked.input)
    if task == _CHOICE:
        options = asked.options
        if options is None or len(options) != 4 or answers[0] not in options:
            raise SinkscopeError(f"{where}: options is {options!r:.40}, expected four with the answer: give {expected}")
        question += "".join(f"\n{letter}. {option}" for letter, option in zip("ABCD", options, strict=True))
        answers = (answers[0], "ABCD"[options.index(answers[0])])
    return question, shared.cue, answers


def _halves(task: str, context: str) -> tuple[str, str]:
    """Two halves; a pair of key and value is never divided."""
    at = context.find('", "', len(context) // 2) if task == _KV else -1
    return (context[: at + 2], context[at + 3 :]) if at >= 0 else split_at_middle(context)
