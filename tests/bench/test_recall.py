"""Dialogues for the recall model, read back by a plain parser that knows nothing of how they were made."""

from __future__ import annotations

import re

import pytest
from hypothesis import strategies as st
from refusals import refused

from sinkscope.bench.record import Turn
from sinkscope.bench.tasks.recall import recall_dialogue, uneven

FACT = re.compile(r"fact (\S+) (\S+) (\S+) (\S+)")
SHAPES = st.tuples(st.integers(0, 10**6), st.lists(st.integers(60, 200), min_size=1, max_size=5), st.integers(1, 3))


def at(position: str, shape: tuple[int, list[int], int]) -> tuple[Turn, ...]:
    seed, lengths, hops = shape
    return recall_dialogue(
        seed,
        turns=len(lengths),
        tokens=lengths,
        hops=hops,
        position=position,  # type: ignore[arg-type]
    ).turns


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"turns": 17}, "turns=17, tokens=256, hops=2: expected 1 to 16"),
        ({"tokens": (100, 100)}, "turns=3, tokens=(100, 100), hops=2: expected"),
        ({"tokens": 5}, "tokens=5, hops=2: expected 1 to 16 turns of at least 10 tokens"),
        ({"tokens": 30, "hops": 3}, "turn 1 and those before it have no place left"),
        ({"hops": 0}, "hops=0"),
        ({"hops": 22}, "fewer than 64 hops in all"),
    ],
)
def test_settings_that_do_not_fit_are_refused(arguments, message):
    with refused(words=[message]):
        recall_dialogue(0, **arguments)  # type: ignore[arg-type]
    with refused("total=90 tokens for 2 turns of at least 48: give 96 or more"):
        uneven(90, 2)
