"""Metrics of loops on tokens made by hand, and what follows an alarm."""

from __future__ import annotations

from typing import Any

from bench_kit import tiny, words
from refusals import refused

from sinkscope.bench.answer import Batch
from sinkscope.bench.methods import read_method
from sinkscope.bench.record import Answer, Turn
from sinkscope.bench.tasks.loops import Loops, first_alarm, is_looping
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load

LOOP = [5, 6, 7] * 100
FRESH = [*range(4, 50), *range(4, 44)]


def scored(tokens: list[int], method: str = "full", ended="cap", **changes) -> dict[str, Any]:
    target = target_of(*tiny())
    answer = Answer(**{"tokens": tuple(tokens), "text": "", "ended": ended, "metrics": {}, **changes})
    batch = Batch("f", "loops", (read_method(method, 64),), (), len(LOOP))
    return Loops().score(target, batch, Turn(words(8)), answer)


def test_records_of_a_loop_and_of_a_text_without_one():
    loop, fresh = scored(LOOP), scored(FRESH, ended="eos")
    assert (loop["loop"], loop["loop_paper"], loop["eos"]) == (1.0, 1.0, 0.0)
    assert (fresh["loop"], fresh["loop_paper"], fresh["eos"]) == (0.0, 0.0, 1.0)
    assert loop["ttr"] == 3 / 300
    assert loop["interventions"] is None
    assert fresh["alarm"] is None


def test_ends_that_are_loops():
    assert is_looping([1, 2, 3, 4, 9, 8] * 4) and is_looping([*range(100), *[7] * 24])
    assert not is_looping([*range(100), *[7] * 23]) and not is_looping(list(range(300)))
    long_cycle = list(range(128)) * 3
    assert is_looping(long_cycle), "three copies of a cycle that is longer than the rule's window can show"


def test_the_alarm_of_a_run_without_a_guard_is_the_monitor_s():
    step = first_alarm(LOOP)
    assert 20 < step < 100
    assert scored(LOOP)["alarm"] == step
    assert first_alarm(FRESH) is None


def test_scores_count_interventions_and_the_first_alarm():
    acts = [{"step": at, "position": at, "kind": "guard", "data": {"generated": at}} for at in (40, 100, 130, 290)]
    made = scored(LOOP, "loopguard", events=tuple(acts))
    assert (made["interventions"], made["alarm"]) == (4.0, 40)


def test_openings_of_text_and_their_own_continuation():
    target = target_of(load())
    task = Loops(source="text", count=3)
    prompts = task.prompts(target)
    assert len(prompts) == 3 and {prompt.set for prompt in prompts} == {"text"}
    ids = target.tokenizer(prompts[1].turns[0].text)["input_ids"]
    assert abs(len(ids) - task.opening) <= 1 and len(prompts[1].turns[0].answers[0]) > 500
    assert task.new_tokens(target) == 384 and Loops().new_tokens(target) == 2500


def test_unknown_prompts():
    with refused("cannot read large: no such file"):
        Loops(source="large").prompts(target_of(*tiny()))
