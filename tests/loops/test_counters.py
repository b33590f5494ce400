"""Repetitions whose numbers change, and what prompts ask to be repeated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hypothesis import strategies as st

from sinkscope.loops import Monitor, MonitorSettings


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


PIECES = st.lists(st.integers(0, 13), min_size=1, max_size=5)


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
