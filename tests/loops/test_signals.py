"""Signals of repetition, and what follows it token by token, against a search of every period."""

from __future__ import annotations

import math
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sinkscope.loops import Tail, compression_ratio, is_loop, tail_period, type_token_ratio
from sinkscope.loops.text import signals
from sinkscope.loops.text.repetition import (
    CounterRepetition,
    EarlierCopies,
    TailRepetition,
    asked_copies,
    copy_length,
)


def repeated(parts, most: int = 400) -> list[int]:
    return [token for piece, copies in parts for token in piece * copies][:most]


# Cycles of few different tokens, which hold repetitions of their own: any stretch of a few tokens comes several times.
PIECE = st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 5)), max_size=4)
RUNS = st.lists(st.tuples(PIECE.map(repeated), st.integers(1, 5)), min_size=1, max_size=3).map(repeated)


def searched(ids: list[int], repeats: float, shortest: int, longest: int) -> Tail | None:
    """Every period, counted backwards token by token."""
    best = None
    for period in range(1, min(longest, len(ids) - 1) + 1):
        start = len(ids) - period
        while start and ids[start - 1] == ids[start - 1 + period]:
            start -= 1
        covered = len(ids) - start
        if covered >= max(repeats * period, shortest) and (best is None or start < best.start):
            best = Tail(period, start, covered / period)
    return best


@given(RUNS)
@example([1, 2, 3, 3, 3] * 3)
def test_repetitions_are_those_of_a_search(ids):
    """At the end of a text, and followed token by token."""
    for repeats, shortest, longest in ((2, 0, 40), (2.5, 9, 9), (3, 0, 40)):
        found = tail_period(ids, repeats=repeats, shortest=shortest, longest=longest)
        assert found == searched(ids, repeats, shortest, longest)
    for shortest, longest in ((12, 5), (20, 20), (30, 31)):
        follows = TailRepetition(longest, 3, shortest)
        for end, token in enumerate(ids, 1):
            assert follows.add(token) == searched(ids[:end], 3, shortest, longest)


@given(RUNS)
def test_counters_are_the_repetitions_of_a_text_in_which_all_numbers_are_one(ids):
    """Two of three tokens are numbers; several in a row are one."""
    follows = CounterRepetition(longest=7, copies=3, tokens=8)
    masked, places = list[int](), list[int]()
    for place, token in enumerate(ids):
        is_number = token < 2
        tail = follows.add(token, is_number)
        if is_number and masked[-1:] == [-1]:
            assert tail is None, "within a number nothing is said"
            continue
        masked.append(-1 if is_number else token)
        places.append(place)
        wanted = searched(masked, 3, 6, 7)
        start = None if wanted is None or place + 1 - places[wanted.start] < 8 else places[wanted.start]
        assert (tail is None) == (start is None) and (tail is None or (tail.start, tail.exact) == (start, False))


@pytest.mark.parametrize("form", [list, np.array, torch.tensor])
def test_ratios_of_ids_in_any_form(form):
    ids = form([1, 2, 1, 1, 300])
    packed = struct.pack("<5I", 1, 2, 1, 1, 300)
    assert type_token_ratio(ids) == 3 / 5 and compression_ratio(ids) == len(zlib.compress(packed, 9)) / len(packed)
    assert tail_period(ids) is None and not is_loop(ids, None)
    assert math.isnan(type_token_ratio([])) and math.isnan(compression_ratio([])) and not is_loop([], None)


def test_loop_rule_at_its_lengths():
    """The default length is 2,480 of 2,500."""
    loop = [3, 4, 5, 6] * 625
    assert is_loop(loop[:2480]) and not is_loop(loop[:2479]) and is_loop(loop[:2479], None)
    assert is_loop(loop[:992], 1000) and not is_loop(loop[:991], 1000)


@pytest.mark.parametrize(("ttr", "below", "found"), [(0.2, 0.0, True), (0.2, 1e-9, False), (0.19, 0.0, False)])
def test_loop_rule_at_its_thresholds(ttr, below, found, monkeypatch):
    """Eq. 7 has <= and >=."""
    ids = [*range(20)] * 5
    monkeypatch.setattr(signals, "THETA_TTR", ttr)
    monkeypatch.setattr(signals, "THETA_CR", compression_ratio(ids) - below)
    assert is_loop(ids, None) == found


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
    ],
)
def test_copies_that_a_prompt_asks_for(prompt, asked):
    assert asked_copies(prompt) == asked


@given(RUNS, st.integers(1, 4), st.integers(1, 30), st.integers(0, 9))
def test_earlier_copies_of_the_end_are_all_found_with_their_lengths(ids, shortest, longest, back):
    """Token by token, after several tokens at once, and after tokens were taken back."""
    copies = EarlierCopies(shortest)

    def check(row: list[int]) -> None:
        copies.follow(row)
        lengths = {place: copy_length(row, place, len(row)) for place in range(1, len(row))}
        want = {place: min(length, longest) for place, length in lengths.items() if length >= shortest}
        assert dict(copies.of_end(longest)) == want

    for end in [*range(1, len(ids) // 2), len(ids)]:
        check(ids[:end])
    copies.take_back(max(0, len(ids) - back))
    check([*ids[: max(0, len(ids) - back)], 1])


def test_a_token_of_a_stuck_row_costs_its_copies_once():
    """Twice as many tokens take twice as many comparisons, and not four times."""
    compared = [0]

    class Token(int):
        def __eq__(self, other: object) -> bool:
            compared[0] += 1
            return int.__eq__(self, other)

        __hash__ = int.__hash__

    def comparisons(length: int) -> int:
        copies = EarlierCopies(3)
        row = [Token(7) for _ in range(length)]
        copies.follow(row[:-1])
        list(copies.of_end(length))
        copies.follow(row)
        compared[0] = 0
        list(copies.of_end(length))
        return compared[0]

    assert comparisons(400) <= 2.5 * max(comparisons(200), 400)


@pytest.mark.parametrize(("window", "n"), [(6, 2), (7, 3), (4, 1)])
def test_an_n_gram_is_new_if_the_window_that_ends_with_it_has_it_once(window, n):
    ids = torch.randint(0, 4, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    novelty = signals.WindowNovelty(window, n, span=1)
    for at in range(len(ids)):
        inside = ids[max(0, at + 1 - window) : at + 1]
        grams = [tuple(inside[i : i + n]) for i in range(len(inside) - n + 1)]
        is_new = at < n - 1 or grams.count(tuple(ids[at + 1 - n : at + 1])) == 1
        assert novelty.add(ids[at]) == is_new, at
