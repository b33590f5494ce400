"""Benchmark files as prompts: the forms that are out there, and what is said about damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sinkscope.errors import SinkscopeError
from sinkscope.text.prompts import read_prompts


def _file(folder: Path, *rows: Any) -> Path:
    path = folder / "x.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_the_forms(tmp_path: Path) -> None:
    common = {"context": "C", "input": "Q", "_id": "i", "answers": ["a"], "length": 1, "all_classes": None}
    record = "Memorize each <TOPIC>. Now the record start. USER: a \n ASSISTANT: b \n USER: c. Now the record ends."
    found = read_prompts(
        _file(
            tmp_path,
            {**common, "dataset": "samsum"},
            "",
            {**common, "dataset": "qasper_e"},
            {"test_id": 7, "prompt": f"{record} What is the first topic?", "topics": ["a"], "prompt_length": -1},
            {"prompt": "Now the record ends. All"},
        )
    )
    samsum = "Summarize the dialogue into a few short sentences. The following are some examples.\n\nC\n\n"
    assert [(p.id, p.context, p.question) for p in found] == [
        ("i", samsum, "Q"),
        ("i", "C\n\n", "Q"),
        ("7", record, " What is the first topic?"),
        ("5", "Now the record ends. All", ""),
    ]
    assert found[0].text == samsum + "Q"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "x.jsonl line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ([1], "line 2 is [1], expected an object"),
        ({"text": "a"}, "line 2: the fields of a prompt are missing"),
        ({"context": 1, "input": "a"}, "line 2: context is 1, expected a valid string"),
        ({"prompt": "no end", "topics": []}, "line 2: the prompt has no 'Now the record ends.'"),
        ({"prompt": "  "}, "line 2: the prompt is empty"),
    ],
)
def test_damaged_lines_are_named(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(SinkscopeError) as caught:
        read_prompts(_file(tmp_path, {"prompt": "a"}, row))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_empty_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(SinkscopeError, match="is empty"):
        read_prompts(_file(tmp_path, ""))
    with pytest.raises(SinkscopeError, match=r"none.jsonl': no such file"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "half.jsonl").write_text('{"prompt": "a \\ud800 b"}')
    assert read_prompts(tmp_path / "half.jsonl")[0].text == "a ? b"
