"""Files of benchmarks, written here in their formats: what is read of them, in which order it is said, the scores."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hub_server import hub
from longbench_files import Words, record, save
from test_prompts import ROWS as ROWS_OF

from sinkscope.app.cli import main
from sinkscope.bench.dialogues.build import build_published
from sinkscope.bench.dialogues.form import POSITIONS, read_dialogues
from sinkscope.bench.published import SETS
from sinkscope.bench.scorers import METRICS, score
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


def written(tmp_path: Path, task: str, rows: Any = None) -> Path:
    return save(tmp_path / f"{task}.jsonl", ROWS[task] if rows is None else rows)


def test_all_sets_of_the_benchmark_are_known() -> None:
    assert ROWS.keys() == {name for name in SETS if name.startswith("scbench")}
    for known in SETS.values():
        assert known.new_tokens > 0 and {known.metric, *known.measures.values()} - {""} <= METRICS.keys()


@pytest.mark.parametrize("task", ROWS)
def test_a_row_is_a_dialogue(tmp_path: Path, task: str) -> None:
    (dialogue,) = build_published(task, written(tmp_path, task)).made
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
        return build_published(task, written(tmp_path, task)).made[0].turns[turn].prompts[place]

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
    (dialogue,) = build_published("scbench_kv", written(tmp_path, "scbench_kv")).made
    first, second = dialogue.turns[0].prompts["middle"].split('\n\nKey: "key-3"\n\n')
    pairs = re.findall(r'"(key-\d+)": "(value-\d+)"', first), re.findall(r'"(key-\d+)": "(value-\d+)"', second)
    assert len(pairs[0]) + len(pairs[1]) == 21 and abs(len(pairs[0]) - len(pairs[1])) < 4
    assert first.endswith(",") and second.startswith('"key-')


def test_answers(tmp_path: Path) -> None:
    def answers(task: str) -> list[tuple[str, ...]]:
        return [turn.answers for turn in build_published(task, written(tmp_path, task)).made[0].turns]

    assert answers("scbench_mf") == [("9",), ("4",)]
    assert answers("scbench_vt") == [("VAR A, B",)]
    assert answers("scbench_choice_eng") == [("a ship", "B")]


def test_functions_of_a_repository_are_the_classes(tmp_path: Path) -> None:
    """RepoQA compares with every function that is asked for in the same repository."""

    def row(repo: str, *names: str) -> dict[str, Any]:
        turns = [{"input": "Adds.", "answer": f"def {name}(): ...", "name": name} for name in names]
        return {**ROWS["scbench_repoqa"][0], "repo": repo, "multi_turns": turns}

    rows = [row("a/b", "add", "sub"), row("c/d", "mul"), row("a/b", "div")]
    made = build_published("scbench_repoqa", written(tmp_path, "scbench_repoqa", rows)).made
    ours = ("def add(): ...", "def sub(): ...", "def div(): ...")
    assert [d.classes for d in made] == [ours, ("def mul(): ...",), ours]


def test_two_measures_by_turn(tmp_path: Path) -> None:
    task = "scbench_repoqa_and_kv"
    turns = [
        {"task": "scbench_repoqa", "input": "Repeat it.", "answer": "def add(): ...", "name": "add"},
        {"task": "scbench_kv", "input": "Extract the value of key-1.", "answer": "value-1"},
    ]
    file = written(tmp_path, task, [{**ROWS[task][0], "multi_turns": turns}])
    (dialogue,) = build_published(task, file).made
    assert [turn.metric for turn in dialogue.turns] == ["function", "contains"]
    assert dialogue.classes == ("def add(): ...",), "values are no functions"
    wrong = written(tmp_path, task, [{**ROWS[task][0], "multi_turns": [{**turns[1], "task": "kv"}]}])
    with pytest.raises(SinkscopeError, match="task is 'kv', expected scbench_repoqa or scbench_kv"):
        build_published(task, wrong)


def test_turns_count_and_tokens(tmp_path: Path) -> None:
    rows = [{**ROWS["scbench_kv"][0], "id": i} for i in range(3)]
    file = written(tmp_path, "scbench_kv", rows)
    whole = build_published("scbench_kv", file)
    part = build_published("scbench_kv", file, turns=1, count=2, tokenizer=Words())
    assert [d.turns for d in part.made] == [d.turns[:1] for d in whole.made[:2]]
    words = len(whole.made[0].turns[0].prompts["end"].split())
    assert part.manifest["tokens"] == {"turn": words + 1, "dialogue": words + 1}
    assert whole.manifest["tokens"] is None and whole.manifest["source"]["records"] == 3
    assert "not counted" in whole.text() and f"{words + 1:,.1f} a dialogue" in part.text()


def test_the_same_however_it_is_packed(tmp_path: Path) -> None:
    task = "scbench_choice_eng"
    rows = ROWS[task] * 2
    file = written(tmp_path / "data", task, rows)
    want = build_published(task, file).made
    (tmp_path / "array").mkdir()
    (tmp_path / "array" / f"{task}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    (tmp_path / "columns").mkdir()
    pytest.importorskip("pyarrow")
    pd.DataFrame(rows).to_parquet(tmp_path / "columns" / f"{task}.parquet")
    for where in (tmp_path, file.parent, tmp_path / "array", tmp_path / "columns"):
        assert build_published(task, where).made == want
    with hub(tmp_path / "cache") as server:
        commit = server.add("datasets/microsoft/SCBench", tmp_path)
        found = build_published(task, "hub")
        assert found.made == want
        assert found.manifest["source"]["name"] == f"microsoft/SCBench/data/{task}.jsonl"
        assert found.manifest["source"]["commit"] == commit
        with pytest.raises(SinkscopeError, match=r"has no data/scbench_kv\.jsonl"):
            build_published("scbench_kv", "hub")


GOOD = ROWS["scbench_kv"][0]
TURN = GOOD["multi_turns"][0]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "line 2 is not JSON: give SCBench's"),
        ([], r"line 2 is \[\], expected an object"),
        ({"context": "a"}, "line 2: multi_turns is missing"),
        ({**GOOD, "multi_turns": []}, r"line 2: multi_turns is \[\], expected a list of at least one"),
        ({**GOOD, "multi_turns": ["x"]}, r"line 2: multi_turns\[0\] is 'x', expected an object"),
        ({**GOOD, "multi_turns": [TURN, {"answer": "a"}]}, r"line 2: multi_turns\[1\].input is missing"),
        ({**GOOD, "multi_turns": [{"input": "a"}]}, r"line 2: multi_turns\[0\].answer is missing"),
        ({**GOOD, "multi_turns": [{**TURN, "answer": [{}]}]}, r"line 2: multi_turns\[0\]: answer is"),
        ({**GOOD, "context": " "}, "line 2: context is ' ', expected a text"),
        ({**GOOD, "context": ["a"]}, r"line 2: context is \['a'\], expected a text"),
    ],
)
def test_a_damaged_row_is_named(tmp_path: Path, row: Any, says: str) -> None:
    file = written(tmp_path, "scbench_kv", [GOOD, row])
    with pytest.raises(SinkscopeError, match=f"scbench_kv.jsonl {says}"):
        build_published("scbench_kv", file)


@pytest.mark.parametrize(
    ("task", "turn", "says"),
    [
        ("scbench_choice_eng", {"input": "a?", "answer": "b"}, "options is None, expected four with the answer"),
        ("scbench_choice_eng", {"input": "a?", "answer": "b", "options": OPTIONS}, "expected four with the answer"),
        ("scbench_mf", {"input": "How many?", "answer": 1}, "expected 'The ... is'"),
        ("scbench_mf", {"input": "The sum is", "answer": "x"}, "answer is ['x'], expected a number"),
    ],
)
def test_a_damaged_turn_of_one_set(tmp_path: Path, task: str, turn: dict[str, Any], says: str) -> None:
    file = written(tmp_path, task, [{**ROWS[task][0], "multi_turns": [turn]}])
    with pytest.raises(SinkscopeError, match=rf"line 1, multi_turns\[0\]: .*{re.escape(says)}"):
        build_published(task, file)


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
        (("--task", "scbench_kv"), "made from SCBench's scbench_kv.jsonl, or hub: give it as --source"),
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


# --- LongEval, RULER, LongBench's other tasks, MT-bench, MT-Bench-101 ------------------------------------------------

NUMBERS = [f"line owl-{i}: REGISTER_CONTENT is <{i}>" for i in range(20)]
LINE: dict[str, Any] = {
    **ROWS_OF["lines"],
    "prompt": "Remember these lines.\n\n" + "\n".join(NUMBERS) + "\n\nNow the record is over. What is in line owl-8? ",
}


def made(tmp_path: Path, task: str, rows: list[Any], name: str = "x.jsonl", **options: Any) -> Any:
    return build_published(task, save(tmp_path / name, rows), **options)


def test_longeval(tmp_path: Path) -> None:
    """At the end the prompt is the published one, but for spaces around; elsewhere only the question moves."""
    for task, row, answer, question in (
        ("longeval_topics", ROWS_OF["topics"], "art", "What is the first topic?"),
        ("longeval_lines", LINE, "8", LINE["prompt"].strip().rpartition("\n")[2]),
    ):
        ((turn,),) = [d.turns for d in made(tmp_path, task, [row]).made]
        assert turn.prompts["end"] == row["prompt"].strip() and turn.answers == (answer,)
        assert turn.prompts["begin"].startswith(question) and question in turn.prompts["middle"]
        assert {len("".join(text.split())) for text in turn.prompts.values()} == {len("".join(row["prompt"].split()))}
        assert score(SETS[task].metric, f"It is <{answer}>.", turn.answers) == 1
    before, after = turn.prompts["middle"].split(question)
    assert all(line in before or line in after for line in NUMBERS), "no line is divided"


def test_ruler(tmp_path: Path) -> None:
    row = {**ROWS_OF["ruler"], "outputs": ["77", "78"]}
    whole = row["input"] + row["answer_prefix"]
    for task, answers in (("ruler_niah_multivalue", ("77, 78",)), ("ruler_qa_1", ("77", "78"))):
        ((turn,),) = [d.turns for d in made(tmp_path, task, [row]).made]
        assert turn.prompts["end"] == whole and turn.answers == answers
        assert all(turn.prompts[place].endswith(row["answer_prefix"]) for place in POSITIONS)
        assert turn.prompts["begin"].startswith("What is the magic number")
    folder = tmp_path / "ruler"
    save(folder / "niah_multivalue" / "validation.jsonl", [row])
    assert build_published("ruler_niah_multivalue", folder).manifest["source"]["name"] == "validation.jsonl"


def test_longbench_s_passage_retrieval(tmp_path: Path) -> None:
    context = "\n\n".join(f"Paragraph {i}: About {i}." for i in range(1, 31))
    row = record("passage_retrieval_en", 0, context, input="An abstract.", answers=["Paragraph 7"])
    ((turn,),) = [d.turns for d in made(tmp_path, "passage_retrieval_en", [row]).made]
    text = turn.prompts["end"]
    assert text.startswith("Here are 30 paragraphs from Wikipedia") and text.endswith("\n\nThe answer is: ")
    assert context in text and text.index("An abstract.") > text.index("About 30") and turn.answers == ("Paragraph 7",)
    assert turn.prompts["middle"].index("About 3.") < turn.prompts["middle"].index("An abstract.")
    with pytest.raises(SinkscopeError, match="is of 'qasper', expected passage_retrieval_en"):
        made(tmp_path, "passage_retrieval_en", [{**row, "dataset": "qasper"}])


def test_longbench_v2(tmp_path: Path) -> None:
    ((turn,),) = [d.turns for d in made(tmp_path, "longbench_v2", [ROWS_OF["longbench-v2"]]).made]
    assert turn.prompts["end"].endswith(
        '(D) four\n\nFormat your response as follows: "The correct answer is (insert answer here)".'
    )
    assert turn.answers == ("C",) and score("stated-letter", "The correct answer is (C).", turn.answers) == 1


def test_mt_bench_with_references_and_without(tmp_path: Path) -> None:
    rows = [ROWS_OF["mt-bench"], {**ROWS_OF["mt-bench"], "question_id": 101, "category": "math"}]
    plain = made(tmp_path, "mt_bench", rows, "question.jsonl")
    assert [turn.answers for d in plain.made for turn in d.turns] == [("",)] * 4
    assert plain.manifest["without_answer"] == 4 and "4 questions have no right answer" in plain.text()
    reference = {
        "question_id": 101,
        "answer_id": "z",
        "model_id": "gpt-4",
        "choices": [{"index": 0, "turns": ["r1", "r2"]}],
    }
    save(tmp_path / "reference_answer" / "gpt-4.jsonl", [reference])
    found = build_published("mt_bench", tmp_path).made
    assert [(d.id, [turn.answers for turn in d.turns]) for d in found] == [
        ("mt_bench-81", [("",), ("",)]),
        ("mt_bench-101", [("r1",), ("r2",)]),
    ]
    assert [turn.depends for turn in found[1].turns] == [(0,), (0, 1)]
    assert set(found[1].turns[1].prompts.values()) == {"Rewrite it."}
    wrong = save(tmp_path / "reference_answer" / "gpt-4.jsonl", [{**reference, "choices": [{"turns": [1]}]}])
    said = r"gpt-4\.jsonl line 1: choices\[0\]\.turns\[0\] is 1, .*: give MT-bench's reference_answer"
    with pytest.raises(SinkscopeError, match=said):
        build_published("mt_bench", tmp_path)
    wrong.unlink()
    with pytest.raises(SinkscopeError, match=r"question\.jsonl line 2: id '81' is that of question\.jsonl line 1 too"):
        made(tmp_path, "mt_bench", rows[:1] * 2, "question.jsonl")


def test_mt_bench_101(tmp_path: Path) -> None:
    (dialogue,) = made(tmp_path, "mt_bench_101", [ROWS_OF["mt-bench-101"]]).made
    assert dialogue.id == "mt_bench_101-GR-3"
    assert [(turn.prompts["end"], turn.answers) for turn in dialogue.turns] == [("u1", ("b1",)), ("u2", ("b2",))]


def test_questions_without_an_answer_are_not_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**ROWS_OF["mt-bench"], "question_id": i} for i in (81, 101)]
    file = save(tmp_path / "question.jsonl", rows)
    words = ["dialogues", "run", "--dialogues", f"mt_bench:{file}", "--methods", "full", "--positions", "end"]
    words += ["--max-new-tokens", "2", "--out"]
    assert main([*words, str(tmp_path / "none")]) == 2
    assert "no question of mt_bench has a right answer" in capsys.readouterr().err
    reference = {"question_id": 101, "choices": [{"turns": ["unknown", "unknown"]}]}
    save(tmp_path / "reference_gpt4.jsonl", [reference])
    assert main([*words, str(tmp_path / "run"), "--json", str(tmp_path / "t.json")]) == 0
    (group,) = json.loads((tmp_path / "t.json").read_text())["result"]["groups"]
    assert (group["dialogues"], group["questions"]) == (2, 2), "four were asked, two have a right answer"


@pytest.mark.parametrize("task", sorted(SETS.keys() - {"recall"}))
def test_a_wrong_file_is_answered_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], task: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "wrong.jsonl", [{"text": "something else"}])
    assert main(["dialogues", "build", "--out", "o.jsonl", "--task", task, "--source", "wrong.jsonl"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: wrong.jsonl line 1: ") and " is missing: give " in said
    assert said.count("\n") == 1 and not (tmp_path / "o.jsonl").exists()
