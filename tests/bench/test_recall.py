"""Dialogues for the recall model, read back by a plain parser that knows nothing of how they were made."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

import sinkscope as ss
from sinkscope.bench.benchmark import run as run_bench
from sinkscope.bench.record import Answer, Turn
from sinkscope.bench.table import tabulate_records
from sinkscope.bench.tasks.recall import Recall, recall_dialogue, uneven

FACT = re.compile(r"fact (\S+) (\S+) (\S+) (\S+)")
LENGTHS = st.lists(st.integers(60, 200), min_size=1, max_size=5)


@given(st.integers(0, 10**6), LENGTHS, st.integers(1, 3))
def test_answers_follow_from_the_text(seed, lengths, hops):
    """By an own reading of the text: the chain from the key asked about, through facts of this turn or before."""
    dialogue = recall_dialogue(seed, tokens=lengths, hops=hops, position="middle")
    assert dialogue == recall_dialogue(seed, tokens=lengths, hops=hops, position="middle")
    facts = {}
    for index, turn in enumerate(dialogue.turns):
        said = turn.text.split()
        assert len(said) == lengths[index]
        assert (said[0], said[-1], said.count("ask")) == (f"turn{index + 1}", "answer", 1)
        for key, *rest in FACT.findall(turn.text):
            assert key not in facts, "stated once"
            facts[key] = rest
        starts = [i for i, word in enumerate(said) if word == "fact"]
        assert all(b - a >= 8 for a, b in pairwise(starts)), "three words between facts, which the model needs"
        key = said[said.index("ask") + 1]
        answer = []
        while key in facts and len(answer) < 3 * hops:
            answer += facts[key]
            key = answer[-1]
        assert (" ".join(answer),) == turn.answers and len(answer) == 3 * hops and answer[-1] == "."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": (100,) * 17}, "hops=2: expected 1 to 16"),
        ({"tokens": (100, 5)}, "tokens=(100, 5), hops=2: expected 1 to 16 turns of at least 10 tokens"),
        ({"tokens": (30, 30), "hops": 3}, "turn 1 and those before it have no place left"),
        ({"hops": 22}, "fewer than 64 hops in all"),
    ],
)
def test_settings_that_do_not_fit_are_refused(arguments, message):
    with refused(words=[message]):
        recall_dialogue(0, **arguments)  # type: ignore[arg-type]
    with refused("90 tokens for 2 turns of at least 48: give 96 or more"):
        uneven(90, 2)
    with refused("but the context of recall is"):
        run_bench(ss.load("recall"), Recall(lengths=(40000,)), ["full"])


def test_the_full_cache_is_right_and_what_is_evicted_is_lost():
    task = Recall(samples=1, turns=2, lengths=(200,), hops=2, positions=("begin", "end"))
    records = run_bench(ss.load("recall"), task, ["full", "streaming:40", "loopserve-d:40"], batch_size=2)
    groups = {group.method: group for group in tabulate_records([records]).groups}
    full, window, late = (groups[name] for name in ("full", "streaming:40", "loopserve-d:40"))
    assert (full.score, full.metrics["prefix"], full.answers) == (1.0, 1.0, 4)
    assert window.metrics["read"] == 41 and window.score < 1 and window.metrics["prefix"] < 1
    assert late.score == 1.0  # answers are shorter than the steps that read everything
    assert {len(record.tokens) for record in records if record.method == "full"} == {6}


@pytest.mark.parametrize(("said", "score", "prefix"), [("a b", 1.0, 1.0), ("a x .", 0.0, 1 / 3), ("x b", 0.0, 0.0)])
def test_an_answer_counts_up_to_its_first_mistake(said, score, prefix):
    answer = Answer(tokens=(), text=said, ended="eos", metrics={})
    found = Recall().score(None, None, Turn("", ("a b .",)), answer)  # type: ignore[arg-type]
    assert found == {"score": score, "prefix": prefix}
