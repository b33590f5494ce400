"""Scores by hand, and against LongBench's own definitions."""

from __future__ import annotations

import sys

import pytest

from sinkscope.bench.scorers import score
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


def test_what_is_missing_or_unknown_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(SinkscopeError, match="pip install rouge-score"):
        score("rouge-l", "a", ["a"])
    with pytest.raises(SinkscopeError, match="metric 'bleu' is unknown"):
        score("bleu", "a", ["a"])
