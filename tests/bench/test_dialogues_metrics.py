"""Scores by hand, and against LongBench's own definitions."""

from __future__ import annotations

import math
import sys

import pytest

from sinkscope.bench.scorers import bleu, score
from sinkscope.errors import SinkscopeError


@pytest.mark.parametrize(
    ("said", "answer", "expected"),
    [
        ("The Eiffel Tower", "eiffel tower!", 1.0),
        ("tower in Paris", "Eiffel tower", 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)),
        ("yes yes", "yes", 2 * 0.5 * 1 / 1.5),  # a word counts as often as it stands there
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("the", "a", 0.0),
    ],
)
def test_f1(said: str, answer: str, expected: float) -> None:
    assert score("f1", said, [answer]) == pytest.approx(expected)
    assert score("f1", said, ["something else", answer]) == pytest.approx(expected), "the best of the answers"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Number", 1.0),
        ("Number or City", 0.5),
        ("City", 0.0),
        ("\nNumber\nType: City", 1.0),  # the first line
        ("number", 0.0),
    ],
)
def test_accuracy(said: str, expected: float) -> None:
    assert score("accuracy", said, ["Number"], classes=["City", "Number", "Person"], task="trec") == expected


def test_accuracy_where_one_name_is_part_of_the_other() -> None:
    classes = ["Number", "Number of something"]
    assert score("accuracy", "Number of something", ["Number of something"], classes=classes) == 1
    assert score("accuracy", "Number of something", ["Number"], classes=classes) == 0.5


@pytest.mark.parametrize(
    ("said", "expected"),
    [("lamp rope .", 1), (" lamp  rope", 1), ("lamp rope . turn2", 1), ("lamp", 0), ("rope lamp .", 0), ("", 0)],
)
def test_exact(said: str, expected: float) -> None:
    assert score("exact", said, ["lamp rope ."]) == expected


def test_rouge_l() -> None:
    pytest.importorskip("rouge_score", reason="needs the library rouge-score")
    # Longest common subsequence: the cat sat (3 of 4 and 3 of 5 words).
    assert score("rouge-l", "the cat sat down", ["the black cat sat still"]) == pytest.approx(2 * 3 / (4 + 5))
    assert score("rouge-l", "a b", ["x y", "a b"]) == 1


@pytest.mark.parametrize(
    ("metric", "said", "answer", "expected"),
    [
        ("contains", "It is Value-3.", "Value-3", 1),
        ("contains", "it is VALUE-3", "Value-3", 0),
        ("any-case", "it is VALUE-3", "Value-3", 1),
        ("all", "they are vara and B", "VARA, b, x, z", 0.5),
        ("last-number", "line 7 holds <0042>", "42", 1),
        ("last-number", "<42>, I think, of 200 lines", "42", 0),
        ("last-number", "none", "42", 0),
        ("first-digits", "The key is 71, not 8", "71", 1),
        ("first-digits", "71432", "71", 0),
        ("first-number", "about 9.7", "9", 1),  # SCBench cuts where the answer is whole
        ("first-number", "about 9.7, not 4", "4", 0),
        ("first-number", "4.50", "4.5", 1),
        ("first-number", "4", "4.5", 0),
        ("first-number", "none", "4", 0),
        ("paragraph", "Paragraph 7", "Paragraph 7", 1),
        ("paragraph", "7 or 12 or 7", "Paragraph 7", 2 / 3),
        ("paragraph", "seven", "Paragraph 7", 0),
        ("stated-letter", "**The correct answer is (B)**.", "B", 1),
        ("stated-letter", "The correct answer is B", "B", 1),
        ("stated-letter", "The correct answer is A. No: The correct answer is (B)", "B", 1),
        ("stated-letter", "B", "B", 0),
        ("f1-characters", "红，马", "红马！", 1),
        ("f1-characters", "红马跑", "红马", 2 * (2 / 3) / (2 / 3 + 1)),
        ("f1-characters", "", "红马", 0),
    ],
)
def test_measures_of_one_answer(metric: str, said: str, answer: str, expected: float) -> None:
    assert score(metric, said, [answer]) == pytest.approx(expected)
    assert score(metric, said, ["88", answer] if metric != "stated-letter" else ["D", answer]) == pytest.approx(
        expected
    )


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("B", 1),
        ("B. a ship", 1),
        ("Bears sink", 1),  # the first letter is all that counts
        ("A ship", 0),
        ("a ship", 1),
        ("a boat", 0),
        ("I say the answer is: B", 1),
        ("the answer is a ship", 1),
        ("the answer is", 0),
        ("the option is C, not B", 0),
        ("not sure, B or C", 1),
        ("not sure", 0),
        ("", 0),
    ],
)
def test_letter(said: str, expected: float) -> None:
    assert score("letter", said, ["a ship", "B"]) == expected


def test_bleu_by_hand() -> None:
    assert bleu("a b c d".split(), "a b c d".split()) == pytest.approx(1)
    assert bleu("a b c d".split(), "a b c d e".split()) == pytest.approx(math.exp(1 - 5 / 4))  # too short
    # 2 of 4 words and 1 of 3 pairs; the smoothing gives ln(4) / 10 of 2 triples and ln(4) / 20 of 1 quadruple.
    parts = (2 / 4, 1 / 3, math.log(4) / 10 / 2, math.log(4) / 20)
    assert bleu("a b x y".split(), "a b c d".split()) == pytest.approx(math.prod(parts) ** (1 / 4))
    assert bleu("x y".split(), "a b".split()) == bleu([], ["a"]) == 0
    assert bleu(["a"], ["a"]) == 1, "a word has no pairs that could be missed"


def test_function() -> None:
    add = "def add(a, b):\n    total = a + b\n    return total"
    sub = "def sub(a, b):\n    total = a - b\n    return total"
    near = f"{add}  # the end"
    for said, expected in (
        (add, 1),
        (f"Here it is:\n```python\n{add}\n```\nIt adds.", 1),
        (f"```\n{sub}\n```\n```\n{add}\n```", 0),  # the first block counts
        (sub, 0),
        ("def add(a, b):", 0),  # the most similar, but not similar enough
        ("", 0),
    ):
        assert score("function", said, [add], classes=[sub, add]) == expected, said
    assert score("function", add, [add], classes=[near, add]) == 1
    assert score("function", add, [near], classes=[near, add]) == 0, "the other one is more similar"


def test_what_is_missing_or_unknown_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(SinkscopeError, match="pip install rouge-score"):
        score("rouge-l", "a", ["a"])
    with pytest.raises(SinkscopeError, match="metric 'bleu' is unknown"):
        score("bleu", "a", ["a"])
