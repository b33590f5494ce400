"""The paper's dialogues, checked by searching their texts; the files they are made from are written by code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from longbench_files import Words, prose, record, save

from sinkscope.app.cli import main
from sinkscope.bench.dialogues.build import PAPER_TURNS, TASKS, build, examples_of, split_at_middle
from sinkscope.bench.dialogues.form import POSITIONS, read_dialogues
from sinkscope.bench.files import BuiltSet, read_longbench
from sinkscope.bench.scorers import score
from sinkscope.errors import SinkscopeError

N = 12
LABELS = ("City", "Person", "Number of something", "Number")


def documents(task: str) -> list[dict[str, Any]]:
    """Each line of a document names the document and the line, so that it can be searched for."""
    made = []
    for i in range(N):
        context = "\n".join(f"[doc {i} line {j}] {prose(8, 100 * i + j)}" for j in range(3 + i % 3))
        made.append(record(task, i, context, input=f"What of {i}?", answers=[f"answer {i}", f"also {i}"]))
    return made


def examples(i: int, n: int) -> str:
    shown = (f"Question: what is {i}.{j} ?\nType: {LABELS[(i + j) % 4]}" for j in range(n))
    return "\n".join(shown)


def trec(sizes: tuple[int, ...] = (9, 3, 8)) -> list[dict[str, Any]]:
    return [
        record("trec", i, examples(i, n), input=f"Question: which is {i} ?\nType:", answers=[LABELS[i]])
        for i, n in enumerate(sizes)
    ]


def built(tmp_path: Path, task: str, content: list[dict[str, Any]], **settings: Any) -> BuiltSet[Any]:
    return build(task, read_longbench(task, save(tmp_path / f"{task}.jsonl", content)), **settings)


def asked_in(prompt: str) -> str:
    return re.findall(r"What of (\d+)\?", prompt)[0]


def without_question(prompt: str, question: str) -> str:
    assert prompt.count(question) == 1
    return " ".join(prompt.replace(question, "").split())


@pytest.mark.parametrize("form", ["faithful", "repaired"])
def test_question_answering(tmp_path: Path, form: str) -> None:
    result = built(tmp_path, "hotpotqa", documents("hotpotqa"), form=form, count=40, seed=3)
    missing = 0
    for dialogue in result.made:
        assert len(dialogue.turns) == 3
        order = [asked_in(turn.prompts["end"]) for turn in dialogue.turns]
        assert len(set(order)) == 3
        said: set[str] = set()
        for number, turn in enumerate(dialogue.turns):
            shown = re.findall(r"\[doc (\d+) line 0\]", turn.prompts["end"])
            assert sorted(shown[:-2]) == sorted(order[t] for t in turn.depends)
            assert not set(shown[-2:]) & set(order), "irrelevant contexts are of other records"
            assert len(turn.depends) >= 1 and max(turn.depends) <= number
            said.update(shown)
            assert turn.answerable == (order[number] in said)
            missing += order[number] not in said
            assert turn.answers == (f"answer {order[number]}", f"also {order[number]}")
    assert result.manifest["unanswerable"] == missing
    assert (missing == 0) == (form == "repaired")


def test_as_printed_leaves_out_what_is_asked_as_often_as_it_must(tmp_path: Path) -> None:
    """Turn t takes 1 to t + 1 of t + 1 turns, so its own with probability (t + 2) / (2 t + 2): 1, 3/4, 2/3."""
    result = built(tmp_path, "hotpotqa", documents("hotpotqa"), form="faithful", count=800)
    shares = [sum(not d.turns[t].answerable for d in result.made) / 800 for t in range(3)]
    assert shares == pytest.approx([0, 1 / 4, 1 / 3], abs=0.05)


@pytest.mark.parametrize(("task", "question"), [("hotpotqa", "Question: What of"), ("qmsum", "Summarize: What of")])
@pytest.mark.parametrize("form", ["faithful", "repaired"])
def test_variants_differ_in_the_place_of_the_question_alone(
    tmp_path: Path, task: str, question: str, form: str
) -> None:
    for dialogue in built(tmp_path, task, documents(task), form=form, count=6).made:
        for turn in dialogue.turns:
            whole = f"{question} {asked_in(turn.prompts['end'])}?"
            rest = {without_question(turn.prompts[p], whole) for p in POSITIONS}
            assert len(rest) == 1
            share = [turn.prompts[p].index(whole) / len(turn.prompts[p]) for p in POSITIONS]
            assert share[0] < 0.25 and 0.3 < share[1] < 0.7 and share[2] > 0.85
            assert turn.prompts["end"].endswith(whole)


@pytest.mark.parametrize("form", ["faithful", "repaired"])
def test_summaries(tmp_path: Path, form: str) -> None:
    content = documents("qmsum")
    result = built(tmp_path, "qmsum", content, form=form, count=30, seed=1)
    lines = {str(i): re.findall(r"\[doc \d+ line \d+\]", c["context"]) for i, c in enumerate(content)}
    unanswerable = 0
    for dialogue in result.made:
        assert len(dialogue.turns) == (2 if form == "repaired" else 1)
        said: list[str] = []
        for turn in dialogue.turns:
            said += re.findall(r"\[doc \d+ line \d+\]", turn.prompts["end"])
            wanted = lines[asked_in(turn.prompts["end"])]
            whole = set(wanted) <= set(said)
            assert turn.answerable == whole
            unanswerable += not whole
            if form == "repaired":
                assert [said.count(line) for line in wanted] == [1] * len(wanted), "said once"
                assert [line for line in said if line in wanted] == wanted, "in its order"
    assert result.manifest["unanswerable"] == unanswerable
    assert (unanswerable == 0) == (form == "repaired")
    assert result.manifest["turns"] == (2 if form == "repaired" else 1)


def test_summaries_without_a_question_are_asked_by_their_first_words(tmp_path: Path) -> None:
    content = [{**d, "input": ""} for d in documents("gov_report")]
    turn = built(tmp_path, "gov_report", content, count=1).made[0].turns[0]
    assert re.search(r"Summarize: \[doc \d+ line 0\] (\S+ ){7}\S+$", turn.prompts["end"])


def test_few_shot_as_printed_asks_the_same_in_each_turn(tmp_path: Path) -> None:
    result = built(tmp_path, "trec", trec(), form="faithful")
    assert result.manifest["skipped"] == 1  # three examples are fewer than twice two turns
    assert [len(d.turns) for d in result.made] == [2, 2]
    for dialogue, number in zip(result.made, (0, 2), strict=True):
        assert dialogue.classes == tuple(sorted(LABELS))  # of the examples, too
        shown: list[list[str]] = []
        for i, turn in enumerate(dialogue.turns):
            assert turn.prompts["end"].endswith(f"\nQuestion: which is {number} ?\nType:")
            assert turn.prompts["end"].startswith("Use examples from previous turns with new examples.\n") == (i > 0)
            assert turn.answers == (LABELS[number],)
            assert turn.depends == tuple(range(i + 1))
            shown.append(re.findall(r"what is (\S+) ", turn.prompts["middle"]))
            before = turn.prompts["middle"].split("which is")[0]
            assert abs(before.count("what is") - len(shown[-1]) / 2) <= 0.5
        assert shown[0] + shown[1] == [f"{number}.{j}" for j in range(9 - number // 2)]
        assert abs(len(shown[0]) - len(shown[1])) <= 1


def test_few_shot_repaired_asks_what_it_has_not_shown(tmp_path: Path) -> None:
    for dialogue in built(tmp_path, "trec", trec(), turns=3).made:
        questions = [re.findall(r"(\S+) \?\nType:$", turn.prompts["end"])[0] for turn in dialogue.turns]
        assert len(set(questions)) == 3 and "." not in questions[-1]
        text = "\n".join(turn.prompts["end"] for turn in dialogue.turns)
        for question, turn in zip(questions[:-1], dialogue.turns, strict=False):
            assert text.count(f"what is {question} ") == 1
            i, j = map(int, question.split("."))
            assert turn.answers == (LABELS[(i + j) % 4],)


def test_every_right_answer_is_a_class_and_scores_1(tmp_path: Path) -> None:
    """Held-out examples may have labels that no record asks for, and LongBench names classes that none has at all."""
    content = [{**record, "all_classes": [*LABELS[:2], "Colour"]} for record in trec()]
    for form in ("faithful", "repaired"):
        for dialogue in built(tmp_path, "trec", content, form=form).made:
            assert dialogue.classes == tuple(sorted((*LABELS, "Colour")))
            for turn in dialogue.turns:
                assert score("accuracy", turn.answers[0], turn.answers, classes=dialogue.classes, task="trec") == 1
    bad = [{**content[0], "all_classes": ["City", 3]}]
    with pytest.raises(SinkscopeError, match=r"line 1: all_classes\[1\] is 3, expected a string"):
        built(tmp_path, "trec", bad)


def test_examples_of_both_sets() -> None:
    assert examples_of(examples(1, 2)) == [
        "Question: what is 1.0 ?\nType: Person",
        "Question: what is 1.1 ?\nType: Number of something",
    ]
    samsum = "Dialogue: A: hi\nB: ho\nSummary: They greet.\nDialogue: A: x\nSummary: A says x."
    assert examples_of(samsum) == samsum.replace("\nDialogue", "\n\nDialogue").split("\n\n")


def test_split_at_middle() -> None:
    assert split_at_middle("one two three") == ("one two", "three")
    assert split_at_middle("aaaa bbbb\ncccc dddd") == ("aaaa bbbb", "cccc dddd")
    assert split_at_middle("abcd") == ("ab", "cd")
    assert split_at_middle("") == ("", "")


def test_numbers_beside_the_papers(tmp_path: Path) -> None:
    """Words and tokens by hand; the table's turns agree with the paper's own mean."""
    result = built(tmp_path, "hotpotqa", documents("hotpotqa"), count=5, tokenizer=Words())
    words = [len(turn.prompts["end"].split()) for d in result.made for turn in d.turns]
    m = result.manifest
    assert m["words"] == {"turn": pytest.approx(sum(words) / 15), "dialogue": pytest.approx(sum(words) / 5)}
    assert m["tokens"]["turn"] == pytest.approx(sum(words) / 15 + 1)
    assert m["paper"]["tokens"] == 13847.19
    weighted = sum(t.turns * t.dialogues for t in TASKS.values()) / sum(t.dialogues for t in TASKS.values())
    assert round(weighted, 2) == PAPER_TURNS
    assert "paper 13,847.19" in result.text() and "0 of 15 questions" in result.text()


def test_same_seed_same_set_and_the_papers_sizes(tmp_path: Path) -> None:
    first, again, other = (built(tmp_path, "qasper", documents("qasper"), seed=s) for s in (0, 0, 1))
    assert first == again != other
    assert [len(first.made), first.manifest["turns"]] == [500, 3]
    assert len({d.id for d in first.made}) == 500


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("qasper", {"turns": 7}, "qasper.jsonl has 12 records, and 7 turns need 14"),
        ("qasper", {"form": "mended"}, "form='mended': expected 'faithful' or 'repaired'"),
        ("qasper", {"turns": 0}, "turns=0, count=500: expected at least 1 of each"),
        ("trec", {"turns": 20}, "no record of trec has the 40 examples that 20 turns need"),
    ],
)
def test_what_cannot_be_built_is_said(tmp_path: Path, task: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SinkscopeError, match=re.escape(message)):
        built(tmp_path, task, trec() if task == "trec" else documents(task), **settings)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "data/qasper.jsonl", documents("qasper"))
    words = ["dialogues", "build", "--task", "qasper", "--source", "data", "--out", "q.jsonl", "--count", "4"]
    assert main([*words, "--form", "faithful", "--turns", "4", "--model", "recall"]) == 0
    out = capsys.readouterr()
    assert "4 dialogues (paper 500), faithful" in out.out and "wrote q.jsonl and q.manifest.json" in out.err
    assert [len(d.turns) for d in read_dialogues("q.jsonl")] == [4] * 4
    manifest = json.loads(Path("q.manifest.json").read_text(encoding="utf-8"))
    assert manifest["form"] == "faithful" and manifest["tokens"]["turn"] > 50
    assert main(words) == 2
    assert "q.jsonl is there already" in capsys.readouterr().err

    assert main(["dialogues", "build", "--task", "recall", "--out", "r.jsonl", "--count", "3", "--hops", "1"]) == 0
    made = read_dialogues("r.jsonl")
    assert {sum(len(t.prompts["end"].split()) for t in d.turns) for d in made} == {768}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "squad", "--source", "x"), "task 'squad' is unknown: expected one of narrativeqa, qasper"),
        (("--task", "qasper"), "made from LongBench's qasper.jsonl, or hub: give it as --source"),
        (("--task", "qasper", "--source", "none"), "there is no file or folder 'none'"),
        (("--task", "recall", "--source", "x"), "mean nothing for recall"),
        (
            ("--task", "recall", "--total-tokens", "100"),
            "total=100 tokens for 3 turns of at least 48: give 144 or more",
        ),
    ],
)
def test_bad_command(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["dialogues", "build", "--out", "o.jsonl", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
