"""SCBench's files, written here in its format: what is read of them, in which order it is said, how it is scored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hub_server import hub
from longbench_files import Words, save

from sinkscope.bench.dialogues.form import POSITIONS, read_dialogues
from sinkscope.bench.dialogues.run import NEW, metric_of
from sinkscope.bench.dialogues.scbench import SCBENCH, build_shared
from sinkscope.bench.scorers import score
from sinkscope.cli import main
from sinkscope.errors import SinkscopeError

BOOK = "\n".join(f"Chapter {i}. The captain of ship {i} was called Name{i}." for i in range(9))
PAIRS = json.dumps({f"key-{i}": f"value-{i}" for i in range(21)})
OPTIONS = ["a whale", "a ship", "a harbour", "a storm"]
ROWS: dict[str, list[dict[str, Any]]] = {  # fields as in the benchmark's files, a row each
    "scbench_kv": [
        {
            "id": 7,
            "context": f"JSON data:\n{PAIRS}",
            "multi_turns": [
                {"input": 'Key: "key-3"', "answer": "value-3"},
                {"input": 'Key: "key-19"', "answer": "value-19"},
            ],
        }
    ],
    "scbench_prefix_suffix": [
        {"context": BOOK, "multi_turns": [{"input": "Prefix: Na, suffix: e4", "answer": "Name4"}]}
    ],
    "scbench_vt": [{"input": BOOK, "multi_turns": [{"input": "Which variables?", "answer": ["VAR A", "B"]}]}],
    "scbench_repoqa": [
        {
            "id": 0,
            "context": BOOK,
            "lang": "python",
            "repo": "a/b",
            "multi_turns": [{"input": "The function adds.", "answer": "def add(): ...", "name": "add"}],
        }
    ],
    "scbench_qa_eng": [
        {
            "id": 1,
            "context": BOOK,
            "multi_turns": [
                {"input": "Who is the captain of ship 5?", "answer": "Name5"},
                {"input": "And of 6?", "answer": "Name6"},
            ],
        }
    ],
    "scbench_qa_chn": [{"id": 2, "context": BOOK, "multi_turns": [{"input": "谁?", "answer": "Name5"}]}],
    "scbench_choice_eng": [
        {"id": 3, "context": BOOK, "multi_turns": [{"input": "What sinks?", "answer": "a ship", "options": OPTIONS}]}
    ],
    "scbench_many_shot": [
        {"id": 4, "task": "geometric", "context": BOOK, "multi_turns": [{"input": "Which is it?", "answer": "(A)"}]}
    ],
    "scbench_summary": [{"id": 5, "context": BOOK, "multi_turns": [{"input": "Summarize.", "answer": "Captains."}]}],
    "scbench_mf": [
        {
            "id": 6,
            "context": [9, 4, 7, 1] * 5,
            "multi_turns": [
                {"input": "The largest number is", "answer": 9},
                {"input": "The median number is", "answer": [4]},
            ],
        }
    ],
    "scbench_summary_with_needles": [
        {
            "id": 8,
            "context": BOOK,
            "multi_turns": [{"task": "scbench_passkey", "input": "What is the pass key?", "answer": "71"}],
        }
    ],
    "scbench_repoqa_and_kv": [
        {
            "id": 9,
            "lang": "go",
            "repo": "a/b",
            "context": BOOK,
            "multi_turns": [{"task": "scbench_kv", "input": "Extract the value of key-1.", "answer": "value-1"}],
        }
    ],
}
SCORED = {"scbench_kv", "scbench_prefix_suffix", "scbench_qa_eng"}


def written(tmp_path: Path, task: str, rows: Any = None) -> Path:
    return save(tmp_path / f"{task}.jsonl", ROWS[task] if rows is None else rows)


def test_all_sets_of_the_benchmark_are_known() -> None:
    assert ROWS.keys() == SCBENCH.keys()
    assert {task: NEW[task] for task in SCBENCH} == {task: SCBENCH[task].new_tokens for task in SCBENCH}


@pytest.mark.parametrize("task", ROWS)
def test_a_row_is_a_dialogue(tmp_path: Path, task: str) -> None:
    (dialogue,) = build_shared(task, written(tmp_path, task)).made
    row = ROWS[task][0]
    assert (dialogue.id, dialogue.task, len(dialogue.turns)) == (f"{task}-0", task, len(row["multi_turns"]))
    context = str(row.get("context", row["input"] if "input" in row else ""))
    for number, (turn, asked) in enumerate(zip(dialogue.turns, row["multi_turns"], strict=True)):
        assert (turn.depends, turn.answerable) == ((0,), None)
        for place in POSITIONS:
            assert turn.prompts[place].count(asked["input"]) == 1
        if number:
            assert len(set(turn.prompts.values())) == 1 and context[:40] not in turn.prompts["end"]
            continue
        assert context in turn.prompts["begin"] and context in turn.prompts["end"]
        words = {place: sorted(turn.prompts[place].split()) for place in POSITIONS}
        assert words["begin"] == words["middle"] == words["end"], "the variants say the same"
        asking = f"What is {asked['input'].lower()[:-3]}?" if task == "scbench_mf" else asked["input"]
        at = {place: turn.prompts[place].index(asking) for place in POSITIONS}
        starts = {place: turn.prompts[place].index(context[:8]) for place in POSITIONS}
        ends = {place: turn.prompts[place].rindex(context[-8:]) for place in POSITIONS}
        assert at["begin"] < starts["begin"] and at["end"] > ends["end"]
        assert starts["middle"] < at["middle"] < ends["middle"]


def test_the_prompts_are_the_benchmark_s_own(tmp_path: Path) -> None:
    """Its templates, filled in by hand."""

    def said(task: str, turn: int = 0, place: Any = "end") -> str:
        return build_shared(task, written(tmp_path, task)).made[0].turns[turn].prompts[place]

    extract = "Extract the value corresponding to the specified key in the JSON object below."
    assert said("scbench_kv") == f'{extract}\n\nJSON data:\n{PAIRS}\n\nKey: "key-3"'
    assert said("scbench_kv", 1) == 'Key: "key-19"'
    concise = "Read the book and answer the question. Be very concise in your answer."
    assert said("scbench_qa_eng") == f"{concise}\n\n{BOOK}\n\nQuestion: Who is the captain of ship 5?\nAnswer:"
    assert said("scbench_qa_eng", 1) == "Question: And of 6?\nAnswer:"
    letters = (
        "Question: What sinks?\nA. a whale\nB. a ship\nC. a harbour\nD. a storm\n\nThe letter of the correct answer is"
    )
    assert said("scbench_choice_eng").endswith(f"\n\n{letters}")
    assert said("scbench_qa_chn").endswith("问题：谁?\n答案：")
    assert said("scbench_summary") == f"{BOOK}\n\nSummarize."
    assert (
        said("scbench_mf", 0, "begin") == f"What is the largest number?\n\n{[9, 4, 7, 1] * 5}\n\nThe largest number is"
    )
    assert said("scbench_mf", 1) == "What is the median number?\n\nThe median number is"


def test_a_pair_is_not_parted(tmp_path: Path) -> None:
    (dialogue,) = build_shared("scbench_kv", written(tmp_path, "scbench_kv")).made
    first, second = dialogue.turns[0].prompts["middle"].split('\n\nKey: "key-3"\n\n')
    pairs = re.findall(r'"(key-\d+)": "(value-\d+)"', first), re.findall(r'"(key-\d+)": "(value-\d+)"', second)
    assert len(pairs[0]) + len(pairs[1]) == 21 and abs(len(pairs[0]) - len(pairs[1])) < 4
    assert first.endswith(",") and second.startswith('"key-')


def test_answers(tmp_path: Path) -> None:
    def answers(task: str) -> list[tuple[str, ...]]:
        return [turn.answers for turn in build_shared(task, written(tmp_path, task)).made[0].turns]

    assert answers("scbench_mf") == [("9",), ("4",)]
    assert answers("scbench_vt") == [("VAR A B",)]
    assert answers("scbench_choice_eng") == [("a ship", "B")]


def test_scores_are_the_benchmark_s(tmp_path: Path) -> None:
    assert {task for task in SCBENCH if SCBENCH[task].scored} == SCORED
    for task in SCORED:
        metric = metric_of(task)
        assert score(metric, "It is Value-3, I think", ["Value-3"], task=task) == 1
        assert score(metric, "It is Value-4", ["Value-3"], task=task) == 0
        assert score(metric, "it is VALUE-3", ["Value-3"], task=task) == (task == "scbench_qa_eng")
    for task in SCBENCH.keys() - SCORED:
        with pytest.raises(
            SinkscopeError, match=f"^{task} is scored by .*, which is not here: of SCBench .*scbench_kv"
        ):
            metric_of(task)


def test_turns_count_and_tokens(tmp_path: Path) -> None:
    rows = [{**ROWS["scbench_kv"][0], "id": i} for i in range(3)]
    file = written(tmp_path, "scbench_kv", rows)
    whole = build_shared("scbench_kv", file)
    part = build_shared("scbench_kv", file, turns=1, count=2, tokenizer=Words())
    assert [d.turns for d in part.made] == [d.turns[:1] for d in whole.made[:2]]
    words = len(whole.made[0].turns[0].prompts["end"].split())
    assert part.manifest["tokens"] == {"turn": words + 1, "dialogue": words + 1}
    assert whole.manifest["tokens"] is None and whole.manifest["source"]["records"] == 3
    assert "not counted" in whole.text() and f"{words + 1:,.1f} a dialogue" in part.text()


def test_the_same_however_it_is_packed(tmp_path: Path) -> None:
    task = "scbench_choice_eng"
    rows = ROWS[task] * 2
    file = written(tmp_path / "data", task, rows)
    want = build_shared(task, file).made
    (tmp_path / "array").mkdir()
    (tmp_path / "array" / f"{task}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    (tmp_path / "columns").mkdir()
    pd.DataFrame(rows).to_parquet(tmp_path / "columns" / f"{task}.parquet")
    for where in (tmp_path, file.parent, tmp_path / "array", tmp_path / "columns"):
        assert build_shared(task, where).made == want
    with hub(tmp_path / "cache") as server:
        commit = server.add("datasets/microsoft/SCBench", tmp_path)
        found = build_shared(task, "hub")
        assert found.made == want
        assert found.manifest["source"]["name"] == f"microsoft/SCBench/data/{task}.jsonl"
        assert found.manifest["source"]["commit"] == commit
        with pytest.raises(SinkscopeError, match=r"has no data/scbench_kv\.jsonl"):
            build_shared("scbench_kv", "hub")


GOOD = ROWS["scbench_kv"][0]
TURN = GOOD["multi_turns"][0]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "line 2 is not JSON: give SCBench's"),
        ([], r"line 2 is \[\], expected an object"),
        ({"context": "a"}, "line 2 has no field 'multi_turns'"),
        ({**GOOD, "multi_turns": []}, r"line 2: multi_turns is \[\], expected a list of at least one"),
        ({**GOOD, "multi_turns": ["x"]}, r"line 2: multi_turns\[0\] is 'x', expected an object"),
        ({**GOOD, "multi_turns": [TURN, {"answer": "a"}]}, r"line 2 has no field 'multi_turns\[1\].input'"),
        ({**GOOD, "multi_turns": [{"input": "a"}]}, r"line 2 has no field 'multi_turns\[0\].answer'"),
        ({**GOOD, "multi_turns": [{**TURN, "answer": [{}]}]}, r"line 2, multi_turns\[0\]: answer is"),
        ({**GOOD, "context": " "}, "line 2: context is ' ', expected a text"),
        ({**GOOD, "context": [1]}, r"line 2: context is \[1\], expected a text"),
    ],
)
def test_a_damaged_row_is_named(tmp_path: Path, row: Any, says: str) -> None:
    file = written(tmp_path, "scbench_kv", [GOOD, row])
    with pytest.raises(SinkscopeError, match=f"scbench_kv.jsonl {says}"):
        build_shared("scbench_kv", file)


@pytest.mark.parametrize(
    ("task", "turn", "says"),
    [
        ("scbench_choice_eng", {"input": "a?", "answer": "b"}, "options is None, expected four with the answer"),
        ("scbench_choice_eng", {"input": "a?", "answer": "b", "options": OPTIONS}, "expected four with the answer"),
        ("scbench_mf", {"input": "How many?", "answer": 1}, "expected 'The ... is'"),
    ],
)
def test_a_damaged_turn_of_one_set(tmp_path: Path, task: str, turn: dict[str, Any], says: str) -> None:
    file = written(tmp_path, task, [{**ROWS[task][0], "multi_turns": [turn]}])
    with pytest.raises(SinkscopeError, match=rf"line 1, multi_turns\[0\]: .*{re.escape(says)}"):
        build_shared(task, file)


def test_from_the_file_to_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`contains` finds "value-1" in the answer of a model that only knows other words: never."""
    row = {**GOOD, "context": '{"a": "b", "c": "d"}'}
    file, out = written(tmp_path, "scbench_kv", [row]), tmp_path / "kv.jsonl"
    assert main(["dialogues", "build", "--task", "scbench_kv", "--source", str(file), "--out", str(out)]) == 0
    assert "1 dialogues" in capsys.readouterr().out
    assert len(read_dialogues(out)[0].turns) == 2
    manifest = json.loads((tmp_path / "kv.manifest.json").read_text())
    assert manifest["metric"] == "contains" and manifest["source"]["name"] == "scbench_kv.jsonl"
    words = ["dialogues", "run", "--dialogues", str(out), "--methods", "full", "--max-new-tokens", "2", "--out"]
    assert main([*words, str(tmp_path / "run")]) == 0
    assert "scbench_kv by recall: full 0.0%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--task", "scbench_kv"), "made from SCBench's scbench_kv.jsonl: give --source PATH or hub"),
        (("--task", "scbench_x", "--source", "."), "task 'scbench_x' is unknown: expected one of scbench_kv,"),
        (("--task", "scbench_kv", "--source", "."), "scbench_kv.parquet: give SCBench's scbench_kv.jsonl, or hub"),
        (("--task", "scbench_kv", "--source", "none.jsonl"), "there is no file or folder 'none.jsonl': give SCBench's"),
        (("--task", "scbench_kv", "--source", ".", "--form", "faithful"), "--form means nothing for scbench_kv"),
        (("--task", "scbench_vt", "--source", "vt.jsonl", "--count", "2"), "count=2: vt.jsonl has 1 rows: give fewer"),
        (("--task", "scbench_vt", "--source", "empty.jsonl"), "empty.jsonl is empty: give SCBench's scbench_vt.jsonl"),
        (("--task", "scbench_vt", "--source", "bad.parquet"), "bad.parquet cannot be read as parquet"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: Any, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "vt.jsonl", ROWS["scbench_vt"])
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.parquet").write_text("x")
    assert main(["dialogues", "build", "--out", "o.jsonl", *words]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
    assert not (tmp_path / "o.jsonl").exists()
