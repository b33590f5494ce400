"""Repetitions whose numbers change, and what prompts ask to be repeated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkscope.loops import Monitor, MonitorSettings, tail_period
from sinkscope.loops.text.repetition import CounterRepetition, asked_copies


def masked(ids: list[int]) -> tuple[list[int], list[int]]:
    """The ids with runs of numbers (below 10) as one -1, and the places where they begin."""
    tokens: list[int] = []
    places: list[int] = []
    for place, token in enumerate(ids):
        shown = -1 if token < 10 else token
        if shown == -1 and place and ids[place - 1] < 10:
            continue
        tokens.append(shown)
        places.append(place)
    return tokens, places


def expected_of(ids: list[int], copies: int, least: int, longest: int) -> int | None:
    """Start of the masked repetition that reaches the end and covers most; of equals the shortest."""
    tokens, places = masked(ids)
    tail = tail_period(tokens, repeats=copies, shortest=2 * copies, longest=longest)
    if tail is None or len(ids) - places[tail.start] < least:
        return None
    return places[tail.start]


PIECES = st.lists(st.integers(0, 13), min_size=1, max_size=5)


@given(st.lists(st.integers(0, 13), max_size=10), PIECES, st.integers(1, 9))
def test_counter_repetitions_equal_a_search_of_every_period(head, piece, copies):
    ids = head + piece * copies
    repetition = CounterRepetition(longest=16, copies=3, tokens=8)
    for end, token in enumerate(ids, 1):
        tail = repetition.add(token, token < 10)
        if token < 10 and end > 1 and ids[end - 2] < 10:
            assert tail is None, "within a number nothing is said"
            continue
        start = expected_of(ids[:end], 3, 8, 16)
        assert (tail is None) == (start is None) and (tail is None or (tail.start, tail.exact) == (start, False))


def numbered(count: int, more: int = 0) -> list[int]:
    """Lines of "<two digits> 50 51 52" and some more, which count up."""
    ids: list[int] = []
    for number in range(count):
        ids += [number // 10 % 10, number % 10, 50, 51, 52, *range(60, 60 + more)]
    return ids


def words_of(ids: Sequence[int], other: str = "lamp") -> list[str]:
    """Digits in a row are a number, the others words of prose."""
    text = "".join(str(token) if token < 10 else f" {other} " for token in ids)
    return text.split()


code_of = partial(words_of, other="lamp_")


def test_fewer_than_12_copies_are_no_counter():
    settings = MonitorSettings(counter_tokens=10)
    monitor = Monitor(settings, words_of=words_of)
    steps = [monitor.update(token) for token in numbered(20)]
    first = next(step.step for step in steps if step.trigger)
    assert first == 5 * 12


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("Repeat the word 'apple' 40 times.", 40),
        ("Write ten lines of it", 10),
        ("a dozen times, please", 12),
        ("In 1945, the city had 30 houses", 0),
        ("Give me 12 identical lines that say: no", 12),
        ("Print 30 rows each containing 0,0,0", 30),
        ("Give me 12 lines after each other: ok", 12),
        ("Repeat 25 times the sentence: all is well", 25),
        ("Write out 40 times that he is late", 40),
        ("List 100 animals.", 0),
        ("Say it 20 times. This is 1000 times faster", 20),
        ("It is ten times as large, and 5 times the price", 0),
        ("It is 10 times that of France, and costs 40 times that.", 0),
        ("Is it 100 times the mass, and 30 times what it was? He is 30 times better", 0),
        ("Why do cats sleep 3 times per night, 4 times each day, 5 times daily?", 0),
        ("Take it 3 times a day, 100 times per second", 0),
        ("Find the error in the 500 lines below; the file has 900 rows", 0),
        ("", 0),
    ],
)
def test_copies_that_a_prompt_asks_for(prompt, asked):
    assert asked_copies(prompt) == asked
