"""Dialogues from SCBench's files (Li et al. 2025): a long context in the first turn, questions about it in all.

Fields, prompts and scores are those of the benchmark's own code, https://github.com/microsoft/MInference, folder
scbench. A row has `context` (`input` in scbench_vt) and `multi_turns`, a list of `input`, `answer` and, in some tasks,
`options` or `task`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from sinkscope import __version__
from sinkscope.bench.dialogues.build import split_at_middle
from sinkscope.bench.dialogues.form import POSITIONS, Dialogue, Position, Turn
from sinkscope.bench.dialogues.rows import read_rows
from sinkscope.bench.dialogues.tasks import Metric
from sinkscope.errors import SinkscopeError

HUB, REPO = "hub", "microsoft/SCBench"
_KV, _MF, _CHOICE = "scbench_kv", "scbench_mf", "scbench_choice_eng"


@dataclass(frozen=True)
class Shared:
    """One set of SCBench.

    Attributes:
        new_tokens: longest answer, by its code.
        metric: what answers are scored by, or why they are not.
        scored: whether they are.
        head: stands before the context.
        asks: the question, of `input`.
        cue: what the answer is to follow on, at the end of a turn.
        gap: between the question and the cue.
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
"""By name. "contains": the answer is in what was said, of scbench_qa_eng in any case."""


def shared_metric(task: str) -> Metric:
    """What answers of a set of SCBench are scored by.

    Raises:
        SinkscopeError: by something that is not here.
    """
    known = SCBENCH[task]
    if not known.scored:
        ours = ", ".join(name for name, each in SCBENCH.items() if each.scored)
        raise SinkscopeError(f"{task} is scored by {known.metric}, which is not here: of SCBench {ours} can be run")
    return "contains"


@dataclass(frozen=True)
class BuiltShared:
    """Dialogues of one set, and how they came about.

    Attributes:
        dialogues: in the order of the file.
        manifest: source with its sha256, and numbers reached; knows no paths.
    """

    dialogues: tuple[Dialogue, ...]
    manifest: dict[str, Any]

    def text(self) -> str:
        """A few lines for the reader."""
        m, tokens = self.manifest, self.manifest["tokens"]
        rows = [
            (m["task"], f"{m['dialogues']} dialogues"),
            ("turns", f"{m['turns']:.2f}"),
            ("words", f"{m['words']['dialogue']:,.1f} a dialogue"),
            ("tokens", f"{tokens['dialogue']:,.1f} a dialogue" if tokens else "not counted: give a tokenizer"),
            ("scored by", m["metric"] if m["scored"] else f"{m['metric']}, which is not here: cannot be run"),
            ("source", m["source"]["name"]),
        ]
        return "\n".join(f"{name:<13} {value}" for name, value in rows)


def build_shared(
    task: str,
    source: str | os.PathLike[str],
    *,
    turns: int | None = None,
    count: int | None = None,
    tokenizer: Any = None,
    repo: str = REPO,
    revision: str | None = None,
) -> BuiltShared:
    """Dialogues of one set of SCBench.

    The first turn holds the context and the first question, in three orders, the next ones questions alone. "end" is
    SCBench's own order, of scbench_mf "begin".

    Args:
        task: a name in `SCBENCH`.
        source: SCBench's file (`.jsonl`, `.json`, `.parquet`), a folder that holds it, or "hub".
        turns: at most so many of a dialogue.
        count: only so many dialogues, the first ones.
        tokenizer: to count tokens with (called, it gives `input_ids`).
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
    path, shown, commit = _find(task, source, repo, revision)
    rows = list(read_rows(path, f"SCBench's {task}.jsonl"))
    if count is not None and count > len(rows):
        raise SinkscopeError(f"count={count}: {shown} has {len(rows)} rows: give fewer")
    made = [_dialogue(task, number, row, where) for number, (where, row) in enumerate(rows)]
    chosen = tuple(Dialogue(d.id, d.task, d.turns[:turns]) for d in made[:count])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest = _manifest(task, chosen, tokenizer)
    manifest["source"] = {"name": shown, "records": len(rows), "sha256": digest, "commit": commit}
    return BuiltShared(chosen, manifest)


def _find(task: str, source: str | os.PathLike[str], repo: str, revision: str | None) -> tuple[Path, str, str | None]:
    """The file, what to call it, and the hub's commit."""
    if os.fspath(source) == HUB:
        from sinkscope.models.checkpoint import hub_file

        name = f"data/{task}.jsonl"
        try:
            local = hub_file(repo, name, revision, kind="dataset")
        except FileNotFoundError:
            raise SinkscopeError(f"the dataset {repo} has no {name}: give --source with a local copy") from None
        return local, f"{repo}/{name}", local.parents[1].name  # the cache names a snapshot after its commit
    path = Path(source).expanduser()
    if path.is_dir():
        places = [path / f"{below}{task}{kind}" for below in ("", "data/") for kind in (".jsonl", ".json", ".parquet")]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise SinkscopeError(f"the folder {path.resolve().name} has no {task}.jsonl: give SCBench's file, or {HUB}")
        path = found
    return path, path.name, None


def _dialogue(task: str, number: int, row: Any, where: str) -> Dialogue:
    again = f"give SCBench's {task}.jsonl, or download it again"
    if not isinstance(row, dict):
        raise SinkscopeError(f"{where} is {type(row).__name__}, expected an object: {again}")
    turns = row.get("multi_turns")
    if not isinstance(turns, list) or not turns:
        raise SinkscopeError(f"{where}: multi_turns is {turns!r:.40}, expected a list of at least one turn: {again}")
    context = row["context"] if "context" in row else row.get("input")
    if task == _MF and isinstance(context, list) and context:
        context = str(context)  # as SCBench prints numbers
    if not isinstance(context, str) or not context.strip():
        raise SinkscopeError(f"{where}: context is {context!r:.40}, expected a text: {again}")
    said = [_turn(task, turn, f"{where}, turn {i}", again) for i, turn in enumerate(turns, 1)]
    made: list[Turn] = []
    for i, (question, cue, answers) in enumerate(said):
        prompts: dict[Position, str] = dict.fromkeys(POSITIONS, _end(task, question, cue))
        if i == 0:
            first, second = _halves(task, context)
            parts = {
                "begin": (question, context, cue),
                "middle": (first, question, second, cue),
                "end": (context, _end(task, question, cue)),
            }
            prompts = {p: "\n\n".join(part for part in (SCBENCH[task].head, *parts[p]) if part) for p in POSITIONS}
        # SCBench does not say what an answer was made from, but that it is in the context.
        made.append(Turn(prompts, answers, (0,), None))
    return Dialogue(f"{task}-{number}", task, tuple(made))


def _turn(task: str, turn: Any, where: str, again: str) -> tuple[str, str, tuple[str, ...]]:
    """Question, cue and answers."""
    if not isinstance(turn, dict):
        raise SinkscopeError(f"{where} is {turn!r:.40}, expected an object: {again}")
    asked, answer = turn.get("input"), turn.get("answer")
    if not isinstance(asked, str) or not asked.strip():
        raise SinkscopeError(f"{where}: input is {asked!r:.40}, expected a text: {again}")
    right = answer if isinstance(answer, list) else [answer]
    if not right or not all(isinstance(a, str | int | float) and not isinstance(a, bool) for a in right):
        raise SinkscopeError(f"{where}: answer is {answer!r:.40}, expected a text, a number or a list of them: {again}")
    # The variables of scbench_vt are all asked for; elsewhere the answers of a list are one or the other.
    answers = (" ".join(map(str, right)),) if task == "scbench_vt" else tuple(map(str, right))
    shared = SCBENCH[task]
    if task == _MF:
        target = re.search(r"The .+ is", asked)
        if target is None:
            raise SinkscopeError(f"{where}: input is {asked!r:.40}, expected 'The ... is': {again}")
        return shared.asks.format(input=target.group().lower()[:-3]), asked, answers
    question = shared.asks.replace("{input}", asked)
    if task == _CHOICE:
        options = turn.get("options")
        if not isinstance(options, list) or len(options) != 4 or answers[0] not in options:
            raise SinkscopeError(f"{where}: options is {options!r:.40}, expected four with the answer: {again}")
        question += "".join(f"\n{letter}. {option}" for letter, option in zip("ABCD", options, strict=True))
        answers = (answers[0], "ABCD"[options.index(answers[0])])
    return question, shared.cue, answers


def _end(task: str, question: str, cue: str) -> str:
    return f"{question}{SCBENCH[task].gap}{cue}" if cue else question


def _halves(task: str, context: str) -> tuple[str, str]:
    """Two halves; pairs of key and value stay whole."""
    at = context.find('", "', len(context) // 2) if task == _KV else -1
    return (context[: at + 2], context[at + 3 :]) if at >= 0 else split_at_middle(context)


def _manifest(task: str, made: Sequence[Dialogue], tokenizer: Any) -> dict[str, Any]:
    texts = [turn.prompts["end"] for dialogue in made for turn in dialogue.turns]
    words = [len(text.split()) for text in texts]
    tokens: dict[str, float] | None = None
    if tokenizer is not None:
        counted = [len(tokenizer(text)["input_ids"]) for text in texts]
        tokens = {"turn": fmean(counted), "dialogue": sum(counted) / len(made)}
    return {
        "schema": 1,
        "kind": "dialogues",
        "task": task,
        "metric": SCBENCH[task].metric,
        "scored": SCBENCH[task].scored,
        "dialogues": len(made),
        "turns": len(texts) / len(made),
        "questions": len(texts),
        "words": {"turn": fmean(words), "dialogue": sum(words) / len(made)},
        "tokens": tokens,
        "versions": {"sinkscope": __version__},
    }
