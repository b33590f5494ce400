"""Dialogues for the recall model, read back by a plain parser that knows nothing of how they were made."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkscope.bench.dialogues import recall as words
from sinkscope.bench.dialogues.form import POSITIONS, read_dialogues, write_dialogues
from sinkscope.bench.dialogues.recall import recall_dialogue, uneven
from sinkscope.errors import SinkscopeError

FACT = re.compile(r"fact (\S+) (\S+) (\S+) (\S+)")
SHAPES = st.tuples(
    st.integers(0, 10**6), st.lists(st.integers(60, 200), min_size=1, max_size=5), st.integers(1, 3), st.booleans()
)


@given(SHAPES)
@settings(max_examples=25, deadline=None)
def test_answers_follow_from_the_text(shape: tuple[int, list[int], int, bool]) -> None:
    """By an own reading of the text: the chain from the key asked about, through facts of this turn or before."""
    seed, lengths, hops, stated = shape
    dialogue = recall_dialogue(seed, turns=len(lengths), tokens=lengths, hops=hops, stated=stated)
    assert dialogue == recall_dialogue(seed, turns=len(lengths), tokens=lengths, hops=hops, stated=stated)
    for position in POSITIONS:
        facts: dict[str, tuple[int, list[str]]] = {}
        for index, turn in enumerate(dialogue.turns):
            said = turn.prompts[position].split()
            assert len(said) == lengths[index]
            assert (said[0], said[-1], said.count("ask")) == (f"turn{index + 1}", "answer", 1)
            for key, *rest in FACT.findall(turn.prompts[position]):
                assert key not in facts, "stated once"
                facts[key] = index, list(rest)
            asked = said[said.index("ask") + 1]
            answer, places, key = [], set(), asked
            while key in facts and len(answer) < 3 * hops:
                places.add(facts[key][0])
                answer += facts[key][1]
                key = answer[-1]
            if stated or index < len(lengths) - 1:
                assert (" ".join(answer),) == turn.answers
                assert len(answer) == 3 * hops and answer[-1] == "."
                assert turn.answerable and turn.depends == tuple(sorted(places))
            else:
                assert turn.answers == ("unknown .",)
                assert not turn.answerable and turn.depends == ()
                assert " ".join(t.prompts[position] for t in dialogue.turns).split().count(asked) == 1


@given(SHAPES)
@settings(max_examples=20, deadline=None)
def test_variants_differ_in_the_place_of_the_question_alone(shape: tuple[int, list[int], int, bool]) -> None:
    seed, lengths, hops, _ = shape
    for turn in recall_dialogue(seed, turns=len(lengths), tokens=lengths, hops=hops).turns:
        without, at = set(), []
        for position in POSITIONS:
            said = turn.prompts[position].split()
            i = said.index("ask")
            at.append((i - 1) / (len(said) - 7))
            assert said[i + 2 : i + 5] == ["what", "was", "said"]
            without.add(" ".join(said[:i] + said[i + 5 :]))
        assert len(without) == 1
        assert at[0] == 0 and at[2] == 1 and abs(at[1] - 0.5) < 0.2


def test_three_words_between_facts_which_the_model_needs() -> None:
    for seed in range(20):
        for turn in recall_dialogue(seed, turns=2, tokens=200).turns:
            said = turn.prompts["begin"].split()
            starts = [i for i, word in enumerate(said) if word == "fact"]
            assert all(b - a >= 8 for a, b in pairwise(starts))
            assert starts[-1] + 5 + 3 <= len(said) - 1


def test_facts_come_from_all_turns_up_to_the_question() -> None:
    """Uniformly: the last of three turns needs each of them about as often."""
    counts = [0, 0, 0]
    for seed in range(300):
        for turn in recall_dialogue(seed, tokens=100, hops=1).turns[2].depends:
            counts[turn] += 1
    assert sum(counts) == 300
    assert min(counts) > 70


def test_distractors() -> None:
    def stated(wanted: int | None) -> int:
        dialogue = recall_dialogue(0, turns=2, tokens=200, hops=2, distractors=wanted)
        return sum(turn.prompts["end"].count("fact ") for turn in dialogue.turns)

    assert [stated(0), stated(5)] == [4, 9]
    assert stated(None) == 2 * ((200 - 7 - 3) // 8)


@given(st.integers(1, 16), st.integers(0, 3000), st.integers(0, 99))
def test_uneven_lengths_add_up(turns: int, more: int, seed: int) -> None:
    lengths = uneven(turns * 48 + more, turns, seed)
    assert len(lengths) == turns and sum(lengths) == turns * 48 + more and min(lengths) >= 48


def test_every_word_is_one_of_the_model() -> None:
    known = {*words.SPECIAL, *words.TURNS, *words.KEYS, *words.VALUES, *words.FILLER}
    assert len(known) == sum(map(len, (words.SPECIAL, words.TURNS, words.KEYS, words.VALUES, words.FILLER)))
    dialogue = recall_dialogue(0, turns=16, tokens=200, hops=3)
    assert set(" ".join(f"{t.prompts['end']} {t.answers[0]}" for t in dialogue.turns).split()) <= known


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"turns": 17}, "turns=17: expected 1 to 16"),
        ({"turns": 0}, "turns=0"),
        ({"tokens": (100, 100)}, "tokens has 2 numbers for 3 turns"),
        ({"tokens": 5}, "tokens=5: a turn has at least 10 tokens"),
        ({"tokens": 30, "hops": 3}, "turn 1 and those before it have no place left"),
        ({"hops": 0}, "hops=0"),
        ({"hops": 22}, "at most 21"),
        ({"distractors": 100}, "distractors=100: expected 0 to"),
        ({"distractors": -1}, "distractors=-1"),
    ],
)
def test_what_does_not_fit_is_said(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(SinkscopeError, match=re.escape(message)):
        recall_dialogue(0, **arguments)  # type: ignore[arg-type]
    with pytest.raises(SinkscopeError, match="total=90 tokens for 2 turns of at least 48: give 96 or more"):
        uneven(90, 2)


def test_file_comes_back_equal(tmp_path: Path) -> None:
    made = tuple(recall_dialogue(i, tokens=90, stated=i != 1) for i in range(3))
    assert read_dialogues(write_dialogues(made, tmp_path / "d.jsonl")) == made


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('{"id"', "[", "d.jsonl line 2 is not JSON"),
        ("recall-1", "recall-0", "d.jsonl line 2: id 'recall-0' is that of d.jsonl line 1 too"),
        ('"turns": [', '"turns": [], "x": [', "d.jsonl line 2: turns is [], expected a list of at least one"),
        ('"turns"', '"turn"', "d.jsonl line 2: turns is missing"),
        (
            '"middle"',
            '"center"',
            "d.jsonl line 2: turns[0].prompts.center is 'center', expected 'begin'",
        ),
        ('"answers": [', '"answers": [3, ', "d.jsonl line 2: turns[0].answers[0] is 3, expected"),
        ('"depends": [0', '"depends": [7', "d.jsonl line 2: turns[0].depends is [7"),
        ('"answerable": true', '"answerable": 1', "d.jsonl line 2: turns[0].answerable is 1"),
        ('"classes": []', '"classes": 1', "d.jsonl line 2: classes is 1"),
    ],
)
def test_damaged_file_names_its_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = write_dialogues([recall_dialogue(i, tokens=90) for i in range(2)], tmp_path / "d.jsonl")
    first, second = path.read_text(encoding="utf-8").splitlines()
    assert old in second
    path.write_text(f"{first}\n{second.replace(old, new, 1)}\n", encoding="utf-8")
    with pytest.raises(SinkscopeError, match=re.escape(message)):
        read_dialogues(path)


def test_file_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(SinkscopeError, match="no such file"):
        read_dialogues(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(SinkscopeError, match=r"empty\.jsonl is empty: give a file that"):
        read_dialogues(tmp_path / "empty.jsonl")
