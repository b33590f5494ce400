"""Metrics of loops on tokens made by hand, and what follows an alarm."""

from __future__ import annotations

import random
from typing import Any

from bench_kit import tiny, words
from refusals import refused

from sinkscope.bench.answer import Batch
from sinkscope.bench.record import Answer, Turn
from sinkscope.bench.tasks.loops import Loops, first_alarm, is_looping
from sinkscope.opening.load import load, target_of

LOOP = [5, 6, 7] * 100
FRESH = [*range(4, 50), *range(4, 44)]


def scored(tokens: list[int], method: str = "full", ended="cap", **changes) -> dict[str, Any]:
    answer = Answer(tokens=tuple(tokens), text="", ended=ended, metrics={}, **changes)
    return Loops().score(target_of(*tiny()), Batch((method,), (), len(LOOP)), Turn(words(8)), answer)


def test_records_of_a_loop_and_of_a_text_without_one():
    loop, fresh = scored(LOOP), scored(FRESH, ended="eos")
    assert (loop["loop"], loop["loop_paper"], loop["eos"], loop["ttr"]) == (1.0, 1.0, 0.0, 3 / 300)
    assert (fresh["loop"], fresh["loop_paper"], fresh["eos"], fresh["alarm"]) == (0.0, 0.0, 1.0, None)
    assert loop["interventions"] is None and loop["alarm"] == first_alarm(LOOP) and 20 < first_alarm(LOOP) < 100
    acts = [{"step": at, "position": at, "kind": "guard", "data": {"generated": at}} for at in (40, 100, 130, 290)]
    made = scored(LOOP, "loopguard:64", events=tuple(acts))
    assert (made["interventions"], made["alarm"]) == (4.0, 40)


def test_ends_that_are_loops():
    assert is_looping([1, 2, 3, 4, 9, 8] * 4) and is_looping([*range(100), *[7] * 24])
    assert not is_looping([*range(100), *[7] * 23]) and not is_looping(list(range(300)))
    assert is_looping(list(range(128)) * 3), "three copies of a cycle that is longer than the rule's window can show"
    noise = random.Random(0).choices([1, 2], k=256)
    assert is_looping([*range(2000), *noise]) and not is_looping([*noise, *range(200)]), "the last tokens decide"


def test_openings_of_text():
    target = target_of(load())
    task = Loops(source="text", count=3)
    prompts = task.prompts(target)
    assert len(prompts) == 3 and {prompt.set for prompt in prompts} == {"text"}
    ids = target.tokenizer(prompts[1].turns[0].text)["input_ids"]
    assert abs(len(ids) - task.opening) <= 1
    assert task.new_tokens(target) == 384 and Loops().new_tokens(target) == 2500
    with refused("cannot read large: no such file"):
        Loops(source="large").prompts(target)
