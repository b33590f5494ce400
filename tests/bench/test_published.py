"""Benchmarks' files as prompts: a row of each published form, written here by hand, and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from longbench_files import save

from sinkscope.bench.published import FORMS, SETS, read_prompts, read_published
from sinkscope.errors import SinkscopeError

RECORD = "Memorize each <TOPIC>. Now the record start. USER: a \n ASSISTANT: b \n USER: c. Now the record ends."
LINES = "Remember these lines.\n\nline red-fox: REGISTER_CONTENT is <71>\nline old-owl: REGISTER_CONTENT is <8>\n"
ASKS = "Now the record is over. Tell me what is the <REGISTER_CONTENT> in line old-owl? I need the number."
NEEDLE = "A special magic number is hidden below.\nThe magic number for lamp is 77.\nGrass is green."
LONGBENCH = {"context": "C", "input": "Q", "_id": "i", "answers": ["a"], "length": 1, "all_classes": None}
ROWS: dict[str, dict[str, Any]] = {  # a row of each form, with the fields that its benchmark publishes
    "longbench": {**LONGBENCH, "dataset": "samsum"},
    "longbench-v2": {
        "_id": "v2",
        "domain": "d",
        "sub_domain": "s",
        "difficulty": "easy",
        "length": "short",
        "question": " Who? ",
        "choice_A": "one",
        "choice_B": "two",
        "choice_C": "three",
        "choice_D": "four",
        "answer": "C",
        "context": " Long text. ",
    },
    "topics": {
        "test_id": 7,
        "prompt": f"{RECORD} What is the first topic?",
        "topics": ["art", "sea"],
        "prompt_length": -1,
    },
    "lines": {
        "random_idx": ["old-owl", 1],
        "expected_number": 8,
        "num_lines": 2,
        "correct_line": "line old-owl: REGISTER_CONTENT is <8>\n",
        "prompt": f"{LINES}\n{ASKS} ",
    },
    "ruler": {
        "index": 4,
        "input": f"{NEEDLE}\nWhat is the magic number for lamp?",
        "outputs": ["77"],
        "length": 99,
        "answer_prefix": " The magic number for lamp is",
    },
    "scbench": {
        "id": 1,
        "context": "Book.",
        "multi_turns": [{"input": "A?", "answer": "1"}, {"input": "B?", "answer": 2}],
    },
    "mt-bench": {"question_id": 81, "category": "writing", "turns": ["Write it.", "Rewrite it."]},
    "mt-bench-101": {"task": "GR", "id": 3, "history": [{"user": "u1", "bot": "b1"}, {"user": "u2", "bot": "b2"}]},
    "prompt": {"prompt": "Now the record ends. All"},
}
SAMSUM = "Summarize the dialogue into a few short sentences. The following are some examples.\n\nC\n\n"
OPTIONS = "What is the correct answer to this question: Who?\nChoices:\n(A) one\n(B) two\n(C) three\n(D) four\n\n"
V2 = "Please read the following text and answer the question below.\n\n<text>\nLong text.\n</text>\n\n"
FORMAT = 'Format your response as follows: "The correct answer is (insert answer here)".'
WANTED = {  # id, context, question, right answers
    "longbench": ("i", SAMSUM, "Q", ("a",)),
    "longbench-v2": ("v2", V2, OPTIONS + FORMAT, ("C",)),
    "topics": ("7", f"{RECORD} ", "What is the first topic?", ("art",)),
    "lines": ("1", f"{LINES}\n", ASKS, ("8",)),
    "ruler": ("1", f"{NEEDLE}\n", "What is the magic number for lamp? The magic number for lamp is", ("77",)),
    "scbench": ("1", "Book.\n\nA?\n\n1\n\n", "B?", ("2",)),
    "mt-bench": ("81", "Write it.\n\n", "Rewrite it.", ()),
    "mt-bench-101": ("GR-3", "u1\n\nb1\n\n", "u2", ("b2",)),
    "prompt": ("1", "Now the record ends. All", "", ()),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_told_by_its_fields(tmp_path: Path, form: str) -> None:
    file = save(tmp_path / "x.jsonl", [ROWS[form]])
    (found,) = read_prompts(file)
    assert (found.id, found.context, found.question, found.answers) == WANTED[form]
    assert found.text == found.context + found.question
    assert [record for _, record in read_published(file)] == [record for _, record in read_published(file, form)]
    (tmp_path / "y.json").write_text(json.dumps([ROWS[form]], indent=1))
    assert [(p.context, p.answers) for p in read_prompts(tmp_path / "y.json")] == [WANTED[form][1::2]]


def test_files_of_several_forms_and_other_tasks_of_longbench(tmp_path: Path) -> None:
    found = read_prompts(save(tmp_path / "x.jsonl", [{**LONGBENCH, "dataset": "qasper_e"}, "", {"prompt": "a"}]))
    assert [(p.id, p.context, p.question) for p in found] == [("i", "C\n\n", "Q"), ("3", "a", "")]


def test_the_prompt_of_ruler_is_whole_and_the_folder_names_the_set(tmp_path: Path) -> None:
    """`answer_prefix` begins with a space and follows the question at once."""
    row = changed("ruler", outputs=["77", "78"])
    for name, answers in (("niah_multivalue", ("77, 78",)), ("qa_1", ("77", "78"))):
        (found,) = read_prompts(save(tmp_path / name / "validation.jsonl", [row]))
        assert found.text == row["input"] + row["answer_prefix"] and found.answers == answers


def test_every_set_has_a_form(tmp_path: Path) -> None:
    assert {known.form for name, known in SETS.items() if name != "recall"} == FORMS.keys() - {"prompt"}


def changed(form: str, **fields: Any) -> dict[str, Any]:
    return {**ROWS[form], **fields}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "x.jsonl line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ([1], "line 2 is [1], expected an object"),
        ({"text": "a"}, "line 2: the fields of a prompt are missing: give a file of LongBench"),
        ({"context": 1, "input": "a"}, "line 2: context is 1, expected a string"),
        ({"context": " ", "input": ""}, "line 2: the prompt is empty"),
        ({"prompt": "no end", "topics": []}, "line 2: the prompt has no 'Now the record ends.'"),
        (changed("topics", topics=[]), "line 2: topics is [], expected at least one text"),
        (changed("topics", prompt=RECORD), "line 2: the prompt has no text before its question, or no question"),
        (changed("lines", prompt=LINES), "line 2: the prompt has no 'Now the record is over.'"),
        (changed("lines", expected_number="8"), "line 2: expected_number is '8', expected a whole number"),
        (changed("lines", expected_number=9), "line 2: no line of the prompt has <9>"),
        (changed("longbench-v2", answer="E"), "line 2: answer is 'E', expected 'A', 'B', 'C' or 'D'"),
        ({k: v for k, v in ROWS["longbench-v2"].items() if k != "choice_D"}, "line 2: choice_D is missing"),
        (changed("longbench-v2", context=" "), "line 2: the context is empty"),
        (changed("ruler", outputs=[]), "line 2: outputs is [], expected at least one text"),
        (changed("ruler", outputs="77"), "line 2: outputs is '77', expected a list"),
        (changed("ruler", input="one line"), "line 2: the last line of input is its question, but input has one line"),
        (changed("mt-bench", turns=["a", " "]), "line 2: turns: expected texts, none of them empty"),
        (changed("mt-bench-101", history=[{"user": "a"}]), "line 2: history[0].bot is missing"),
        (changed("mt-bench-101", history=[]), "line 2: history: expected turns of a user"),
        (changed("scbench", multi_turns=[]), "line 2: multi_turns is [], expected a list of at least one"),
        ({"prompt": "  "}, "line 2: the prompt is empty"),
    ],
)
def test_damaged_lines_are_named(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(SinkscopeError) as caught:
        read_prompts(save(tmp_path / "x.jsonl", [{"prompt": "a"}, row]))
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("form", sorted(FORMS.keys() - {"prompt"}))
def test_a_file_of_another_benchmark_is_refused(tmp_path: Path, form: str) -> None:
    for other in FORMS.keys() - {form}:
        file = save(tmp_path / f"{other}.jsonl", [ROWS[other]])
        with pytest.raises(SinkscopeError, match=rf"{other}\.jsonl line 1: .* is missing: give THIS$"):
            read_published(file, form, "THIS")


def test_empty_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(SinkscopeError, match="is empty"):
        read_prompts(save(tmp_path / "x.jsonl", []))
    with pytest.raises(SinkscopeError, match=r"none.jsonl': no such file"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "half.jsonl").write_text('{"prompt": "a \\ud800 b"}')
    assert read_prompts(tmp_path / "half.jsonl")[0].text == "a ? b"
