"""Sets of questions as their benchmarks publish them: the fields of a row, how the benchmark asks, and its score.

`SETS` has a row for each set, and `FORMS` one for each form of file. Fields, prompts and scores are those of the
benchmarks' own code: LongBench and LongBench v2 (github.com/THUDM/LongBench), SCBench (github.com/microsoft/MInference,
folder scbench), LongEval (github.com/DachengLi1/LongChat), RULER (github.com/NVIDIA/RULER), MT-bench
(github.com/lm-sys/FastChat, folder fastchat/llm_judge), MT-Bench-101 (github.com/mtbench101/mt-bench-101).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired

from typing_extensions import TypedDict

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import check, read_rows

Texts = tuple[str, ...]


@dataclass(frozen=True)
class Asked:
    """A question.

    Attributes:
        input: Text of the question.
        answers: Correct answers; empty if the file has none.
        options: Options of a multiple-choice question.
        measure: Which of the set's measures scores it, if there are several.
        cue: Text at the end of the prompt that the answer continues, if the file has one.
    """

    input: str
    answers: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    measure: str = ""
    cue: str = ""


@dataclass(frozen=True)
class Record:
    """A row of a file: a text, and one or more questions about it in order.

    Attributes:
        id: Id of the row; empty if it has none.
        context: The text; empty if the questions need none.
        asked: The questions.
        dataset: Name of the set, if the row gives it.
        group: Rows of one group share the possible answers of a question.
    """

    id: str
    context: str
    asked: tuple[Asked, ...]
    dataset: str = ""
    group: str = ""


def _row(**fields: Any) -> Any:
    """The type of an object with these fields, and others that do not count."""
    return TypedDict("_row", fields)  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]


def _require(fine: object, said: str) -> None:
    if not fine:
        raise SinkscopeError(said)


def _longbench(row: dict[str, Any]) -> Record:
    _require(f"{row['context']}{row['input']}".strip(), "the prompt is empty")
    dataset = row.get("dataset", "").removesuffix("_e")  # LongBench-E
    return Record(str(row.get("_id", "")), row["context"], (Asked(row["input"], row.get("answers", ())),), dataset)


def _choices(row: dict[str, Any]) -> Record:
    _require(row["context"].strip(), "the context is empty")
    options = (row["choice_A"], row["choice_B"], row["choice_C"], row["choice_D"])
    said = "\n".join(f"({letter}) {text.strip()}" for letter, text in zip("ABCD", options, strict=True))
    asked = Asked(f"{row['question'].strip()}\nChoices:\n{said}", (row["answer"],))
    return Record(str(row.get("_id", "")), f"<text>\n{row['context'].strip()}\n</text>", (asked,), "longbench_v2")


def _parted(prompt: str, at: int, *rest: Any) -> tuple[str, Asked]:
    """Text and question of a prompt whose question begins at a place."""
    _require(prompt[:at].strip() and prompt[at:].strip(), "the prompt has no text before its question, or no question")
    return prompt[:at].rstrip(), Asked(prompt[at:].strip(), *rest)


def _topics(row: dict[str, Any]) -> Record:
    end = "Now the record ends."
    _require(end in row["prompt"], f"the prompt has no {end!r}, as LongEval's topic retrieval has")
    _require(row["topics"], "topics is [], expected at least one text")
    context, asked = _parted(row["prompt"], row["prompt"].rindex(end) + len(end), row["topics"][:1])
    return Record(str(row.get("test_id", "")), context, (asked,), "longeval_topics")


def _lines(row: dict[str, Any]) -> Record:
    end, number = "Now the record is over.", row["expected_number"]
    _require(end in row["prompt"], f"the prompt has no {end!r}, as LongEval's line retrieval has")
    context, asked = _parted(row["prompt"], row["prompt"].rindex(end), (str(number),))
    _require(f"<{number}>" in context, f"no line of the prompt has <{number}>")
    return Record("", context, (asked,), "longeval_lines")


def _ruler(row: dict[str, Any]) -> Record:
    _require(any(row["outputs"]), f"outputs is {list(row['outputs'])}, expected at least one text")
    at = row["input"].rstrip().rfind("\n")
    _require(at > 0, "the last line of input is its question, but input has one line alone")
    context, asked = _parted(row["input"], at, row["outputs"], (), "", row.get("answer_prefix", ""))
    return Record("", context, (asked,), "ruler_niah_single_1")  # all sets are asked alike; see `read_prompts`


def _shared(row: dict[str, Any]) -> Record:
    _require(row["multi_turns"], "multi_turns is [], expected a list of at least one turn")
    context = row.get("context") if row.get("context") is not None else row.get("input")
    if isinstance(context, list) and context and all(isinstance(value, int | float) for value in context):
        context = str(context)  # as SCBench prints numbers
    _require(isinstance(context, str) and context.strip(), f"context is {context!r:.40}, expected a text")
    asked: list[Asked] = []
    for i, turn in enumerate(row["multi_turns"]):
        answer: Any = turn["answer"]
        right: list[Any] = answer if isinstance(answer, list) else [answer]
        known = all(isinstance(a, str | int | float) and not isinstance(a, bool) for a in right)
        _require(turn["input"].strip(), f"multi_turns[{i}]: input is {turn['input']!r}, expected a text")
        said = f"multi_turns[{i}]: answer is {answer!r:.40}, expected a text, a number or a list of them"
        _require(right and known, said)
        asked.append(Asked(turn["input"], tuple(map(str, right)), turn.get("options") or (), turn.get("task") or ""))
    return Record("", str(context), tuple(asked), group=str(row.get("repo", "")))


def _questions(row: dict[str, Any]) -> Record:
    _require(row["turns"] and all(map(str.strip, row["turns"])), "turns: expected texts, none of them empty")
    return Record(str(row["question_id"]), "", tuple(map(Asked, row["turns"])), "mt_bench")


def _talk(row: dict[str, Any]) -> Record:
    history = row["history"]
    _require(history and all(each["user"].strip() for each in history), "history: expected turns of a user")
    asked = tuple(Asked(each["user"], (each["bot"],)) for each in history)
    return Record(f"{row['task']}-{row['id']}", "", asked, "mt_bench_101")


def _prompt_alone(row: dict[str, Any]) -> Record:
    _require(row["prompt"].strip(), "the prompt is empty")
    return Record("", row["prompt"], ())


class Form(NamedTuple):
    """A form of file.

    Attributes:
        whose: The benchmark.
        row: Type of a row.
        record: What is made of a row.
        keys: Fields that tell its rows from those of the other forms; the first form that fits is taken.
        files: Names in a folder, around the name of the set.
        hub: Dataset on the hub; empty: none that is read from there.
        hub_file: The file in it.
    """

    whose: str
    row: Any
    record: Callable[[Any], Record]
    keys: tuple[str, ...]
    files: tuple[str, ...]
    hub: str = ""
    hub_file: str = ""


_MAY, _MAY_TEXT = NotRequired[Any], NotRequired[str]
_OPTIONS = dict.fromkeys(["choice_A", "choice_B", "choice_C", "choice_D"], str)
_TURN = _row(input=str, answer=Any, options=NotRequired[Texts | None], task=NotRequired[str | None])
FORMS = {
    "scbench": Form(
        "SCBench",
        _row(multi_turns=tuple[_TURN, ...], context=_MAY, input=_MAY, repo=_MAY),
        _shared,
        ("multi_turns",),
        ("{}.jsonl", "{}.json", "{}.parquet"),
        "microsoft/SCBench",
        "data/{}.jsonl",
    ),
    "longbench": Form(
        "LongBench",
        _row(context=str, input=str, answers=NotRequired[Texts], dataset=_MAY_TEXT, _id=_MAY),
        _longbench,
        ("context", "input"),
        ("{}.jsonl",),
        "zai-org/LongBench",
    ),
    "longbench-v2": Form(
        "LongBench v2",
        _row(context=str, question=str, **_OPTIONS, answer=Literal["A", "B", "C", "D"], _id=_MAY),
        _choices,
        ("question", "choice_A"),
        ("data.json",),
        "zai-org/LongBench-v2",
        "data.json",
    ),
    "topics": Form(
        "LongEval", _row(prompt=str, topics=Texts, test_id=_MAY), _topics, ("prompt", "topics"), ("5_topics.jsonl",)
    ),
    "lines": Form(
        "LongEval", _row(prompt=str, expected_number=int), _lines, ("prompt", "expected_number"), ("200_lines.jsonl",)
    ),
    "ruler": Form(
        "RULER",
        _row(input=str, outputs=Texts, answer_prefix=_MAY_TEXT),
        _ruler,
        ("input", "outputs"),
        ("{}/validation.jsonl", "validation.jsonl"),
    ),
    "mt-bench": Form(
        "MT-bench", _row(question_id=Any, turns=Texts), _questions, ("question_id", "turns"), ("question.jsonl",)
    ),
    "mt-bench-101": Form(
        "MT-Bench-101",
        _row(task=str, id=Any, history=tuple[_row(user=str, bot=str), ...]),
        _talk,
        ("history",),
        ("mtbench101.jsonl",),
    ),
    "prompt": Form("any", _row(prompt=str), _prompt_alone, ("prompt",), ()),
}
_REFERENCE = _row(question_id=Any, choices=tuple[_row(turns=Texts), ...])
REFERENCES = ("reference_answer/gpt-4.jsonl", "reference_gpt4.jsonl")
"""Where the right answers of MT-bench's questions lie, beside the questions."""
ANY = (
    "a file of LongBench, LongBench v2, LongEval, RULER, SCBench, MT-bench or MT-Bench-101, or JSON lines with a "
    '"prompt"'
)


@dataclass(frozen=True)
class Published:
    """A set.

    Attributes:
        form: Of its file, a name in `FORMS`.
        new_tokens: Longest answer, the benchmark's own number.
        metric: How answers are scored, a name in `sinkscope.bench.scorers.METRICS`.
        head: Text before the context.
        asks: The question, around `{}`.
        cue: Text at the end of a prompt, which the answer continues.
        gap: Text between the question and the cue.
        between: Text between the parts of a prompt.
        measures: For sets of two measures, the metric of each.
    """

    form: str
    new_tokens: int
    metric: str
    head: str = ""
    asks: str = "{}"
    cue: str = ""
    gap: str = "\n"
    between: str = "\n\n"
    measures: Mapping[str, str] = field(default_factory=dict[str, str])


_REPO_HEAD = (
    "Based on the function description and code context, please retrieve and repeat the exact described function from "
    "the code context in a code block wrapped by ```:"
)
_MF, _CHOICE = "scbench_mf", "scbench_choice_eng"
_NIAH = "single_1 single_2 single_3 multikey_1 multikey_2 multikey_3 multivalue multiquery".split()
SETS: dict[str, Published] = {
    "narrativeqa": Published("longbench", 128, "f1"),
    "qasper": Published("longbench", 128, "f1"),
    "multifieldqa_en": Published("longbench", 64, "f1"),
    "hotpotqa": Published("longbench", 32, "f1"),
    "2wikimqa": Published("longbench", 32, "f1"),
    "musique": Published("longbench", 32, "f1"),
    "multi_news": Published("longbench", 512, "rouge-l"),
    "gov_report": Published("longbench", 512, "rouge-l"),
    "qmsum": Published("longbench", 512, "rouge-l"),
    "trec": Published("longbench", 64, "accuracy"),
    # LoopServe names accuracy, which summaries do not have; LongBench uses Rouge-L.
    "samsum": Published(
        "longbench",
        128,
        "rouge-l",
        "Summarize the dialogue into a few short sentences. The following are some examples.",
    ),
    "passage_retrieval_en": Published(
        "longbench",
        32,
        "paragraph",
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.",
        "The following is an abstract.\n\n{}",
        'Please enter the number of the paragraph that the abstract is from. The answer format must be like "Paragraph '
        '1", "Paragraph 2", etc.\n\nThe answer is: ',
        "\n\n",
    ),
    "longbench_v2": Published(
        "longbench-v2",
        128,
        "stated-letter",
        "Please read the following text and answer the question below.",
        "What is the correct answer to this question: {}",
        'Format your response as follows: "The correct answer is (insert answer here)".',
        "\n\n",
    ),
    "recall": Published("recall", 64, "exact"),  # made by this package; an answer has as many tokens as 21 hops take
    "longeval_topics": Published("topics", 50, "any-case", between=" "),
    "longeval_lines": Published("lines", 100, "last-number"),
    "mt_bench": Published("mt-bench", 1024, "f1"),
    "mt_bench_101": Published("mt-bench-101", 1024, "f1"),
    **{f"ruler_niah_{name}": Published("ruler", 128, "all", gap="", between="\n") for name in _NIAH},
    "ruler_vt": Published("ruler", 30, "all", gap="", between="\n"),
    "ruler_cwe": Published("ruler", 120, "all", gap="", between="\n"),
    "ruler_fwe": Published("ruler", 50, "all", gap="", between="\n"),
    "ruler_qa_1": Published("ruler", 32, "any-case", gap="", between="\n"),
    "ruler_qa_2": Published("ruler", 32, "any-case", gap="", between="\n"),
    "scbench_kv": Published(
        "scbench", 150, "contains", "Extract the value corresponding to the specified key in the JSON object below."
    ),
    "scbench_prefix_suffix": Published("scbench", 150, "contains"),
    "scbench_vt": Published("scbench", 30, "all"),
    "scbench_repoqa": Published("scbench", 1024, "function", _REPO_HEAD),
    "scbench_qa_eng": Published(
        "scbench",
        40,
        "any-case",
        "Read the book and answer the question. Be very concise in your answer.",
        "Question: {}",
        "Answer:",
    ),
    "scbench_qa_chn": Published("scbench", 40, "f1-characters", "阅读以下书籍然后回答问题。", "问题：{}", "答案："),
    _CHOICE: Published(
        "scbench",
        40,
        "letter",
        "Read the book and answer the question.",
        "Question: {}",
        "The letter of the correct answer is",
        "\n\n",
    ),
    "scbench_many_shot": Published("scbench", 10, "any-case"),
    "scbench_summary": Published("scbench", 200, "rouge-lsum"),
    _MF: Published("scbench", 5, "first-number", asks="What is {}?", gap="\n\n"),
    "scbench_summary_with_needles": Published(
        "scbench", 800, "", measures={"scbench_summary": "rouge-lsum", "scbench_passkey": "first-digits"}
    ),
    "scbench_repoqa_and_kv": Published(
        "scbench", 1024, "", measures={"scbench_repoqa": "function", "scbench_kv": "contains"}
    ),
}


def set_of(name: str) -> Published:
    """The set of that name.

    Raises:
        SinkscopeError: There is none; the message lists similar names, or all.
    """
    if name not in SETS:
        family = name.split("_")[0]
        near = [each for each in SETS if each.split("_")[0] == family and "_" in each]
        shown = near or [each for each in SETS if not each.startswith(("scbench", "ruler"))] + [
            "ruler_...",
            "scbench_...",
        ]
        raise SinkscopeError(f"task {name!r} is unknown: expected one of {', '.join(shown)}")
    return SETS[name]


def read_published(path: str | os.PathLike[str], form: str = "", expected: str = ANY) -> list[tuple[str, Record]]:
    """The rows of a file, and the location of each.

    Args:
        path: JSON lines, one JSON array, or `.parquet`.
        form: A name in `FORMS`. If empty, each row's form is detected.
        expected: What the caller should give.

    Raises:
        SinkscopeError: The file cannot be read or has no rows, or a row has another form (with its line).
    """
    found: list[tuple[str, Record]] = []
    for where, row in read_rows(path, expected):
        kind = form or next((name for name, each in FORMS.items() if _fits(row, each.keys)), "")
        if not kind and isinstance(row, dict):
            raise SinkscopeError(f"{where}: the fields of a prompt are missing: give {expected}")
        wanted = FORMS[kind or "prompt"]
        made = check(row, wanted.row, where, expected)
        try:
            found.append((where, wanted.record(made)))
        except SinkscopeError as error:
            raise SinkscopeError(f"{where}: {error}: give {expected}") from None
    return _with_references(Path(path), found) if found and found[0][1].dataset == "mt_bench" else found


def _fits(row: Any, keys: tuple[str, ...]) -> bool:
    return isinstance(row, dict) and row.keys() >= {*keys}


def _with_references(path: Path, found: list[tuple[str, Record]]) -> list[tuple[str, Record]]:
    """MT-bench's questions with the right answers that lie beside them."""
    expected = "MT-bench's reference_answer/gpt-4.jsonl, or none"
    files = [path.expanduser().parent / name for name in REFERENCES]
    rows = next((list(read_rows(file, expected)) for file in files if file.is_file()), [])
    known = [check(row, _REFERENCE, where, expected) for where, row in rows]
    told = {str(each["question_id"]): choice["turns"] for each in known for choice in each["choices"][:1]}
    return [
        (
            where,
            replace(row, asked=tuple(Asked(a.input, told.get(row.id, ())[i : i + 1]) for i, a in enumerate(row.asked))),
        )
        for where, row in found
    ]


def spoken(name: str, asked: Asked) -> tuple[str, str, str, Texts]:
    """A question as its benchmark asks it: question, cue, both of them together, and correct answers.

    Raises:
        SinkscopeError: The question does not have the form of this set.
    """
    known, answers = SETS.get(name, Published("", 0, "")), asked.answers
    if known.metric == "all" and answers:
        answers = (", ".join(answers),)  # all of them are asked for; elsewhere each of several is right
    question, cue = known.asks.replace("{}", asked.input), known.cue or asked.cue
    if name == _MF:
        target = re.search(r"(The .+) is", asked.input)
        _require(target, f"input is {asked.input!r:.40}, expected 'The ... is'")
        fine = all(re.fullmatch(r"-?[\d.]+(e-?\d+)?", answer) for answer in answers)
        _require(fine, f"answer is {list(answers)!r:.40}, expected a number")
        question, cue = known.asks.replace("{}", str(target and target[1]).lower()), asked.input
    if name == _CHOICE:
        options = asked.options
        fine = len(options) == 4 and answers[0] in options
        _require(fine, f"options is {list(options) or None!r:.40}, expected four with the answer")
        question += "".join(f"\n{letter}. {option}" for letter, option in zip("ABCD", options, strict=True))
        answers = (answers[0], "ABCD"[options.index(answers[0])])
    return question, cue, f"{question}{known.gap}{cue}" if cue else question, answers


@dataclass(frozen=True)
class TextPrompt:
    """A prompt, divided into context and question if its file says how.

    Attributes:
        id: Id of the record, or its line if it has none.
        context: What the question is about; if there are several, also the earlier questions with their answers.
        question: The question; empty if the file does not separate it from the context.
        answers: Correct answers, if the file has them.
    """

    id: str
    context: str
    question: str
    answers: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The prompt as the benchmark gives it, with the question at its end."""
        return self.context + self.question


def read_prompts(path: str | os.PathLike[str]) -> tuple[TextPrompt, ...]:
    """The prompts of a benchmark's file, recognised by its fields, or of JSON lines with a "prompt".

    SCBench's and RULER's rows do not name their set, so the name of the file or its folder decides.

    Raises:
        SinkscopeError: The file cannot be read or has no records, or a row has none of the forms (with its line).
    """
    file = Path(path)
    stem = next((name for name in (file.stem, f"ruler_{file.parent.name}") if name in SETS), "")
    return tuple(_prompt(record, where, stem or record.dataset) for where, record in read_published(path))


def _prompt(record: Record, where: str, name: str) -> TextPrompt:
    known, number = SETS.get(name, Published("", 0, "")), record.id or where.rpartition(" ")[2]
    if not record.asked:
        return TextPrompt(number, record.context, "")
    try:
        *earlier, (_, _, question, answers) = [spoken(name, asked) for asked in record.asked]
    except SinkscopeError as error:
        raise SinkscopeError(f"{where}: {error}: give {ANY}") from None
    before = [text for _, _, whole, right in earlier for text in (whole, *right[:1])]
    parts = [text for text in (known.head, record.context, *before) if text]
    return TextPrompt(number, "".join(text + known.between for text in parts), question, answers)
