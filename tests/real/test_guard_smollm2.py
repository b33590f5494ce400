"""The guard on a real model: what it leaves alone, and that an act leaves the next token a context."""

from __future__ import annotations

from itertools import pairwise

import pytest

import sinkscope as ss

pytest.importorskip("experiments.real.models")

from experiments.loopguard.real import openings_of

NEW = 256


@pytest.mark.slow
def test_guard_changes_no_text_without_an_alarm_and_repeats_no_token(smollm2):
    prompts = [text for _, text in openings_of("report", 2)]
    told = {}
    for guard in (False, True, ss.LoopGuard(act="cut", steer=None)):
        told[str(guard)] = ss.generate(
            smollm2.model, prompts, guard=guard, max_new_tokens=NEW, batch_size=len(prompts), chat=False
        )
    plain, *guarded = told.values()
    acted = [[bool(one.events) for one in answers] for answers in guarded]
    assert acted[0] == acted[1] and 2 <= sum(acted[0]) <= 6, "the monitor does not depend on what an alarm does"
    for answers in guarded:
        for alone, answer in zip(plain, answers, strict=True):
            if not answer.events:
                assert answer.tokens == alone.tokens
                continue
            data = answer.events[0].data
            behind = answer.tokens[data["generated"] - data["taken_back"] :][:25]
            assert sum(one == other for one, other in pairwise(behind)) < 8
    assert all(len(one.tokens) <= NEW for one in guarded[0])
