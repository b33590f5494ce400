"""Sampling follows the softmax, and edits can see it."""

from __future__ import annotations

import torch
from bench_kit import tiny

from sinkscope.bench.answer import Answer, answer_rows
from sinkscope.bench.samplers import RowSampler
from sinkscope.hooks.edit.decode import ForcedAnswer
from sinkscope.loops.guard import LoopGuard
from sinkscope.opening.live import target_of

LOOP = [11, 12, 13] * 12


def test_sampling_follows_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -9.0])
    ids = torch.empty(0)

    process = RowSampler(0.7, 0, ["dc-0001"])
    drawn = torch.cat([process(ids, logits[None]) for _ in range(4000)])
    assert ((drawn == 0).sum(-1) == 1).all() and (drawn.isinf().sum(-1) == 4).all(), "all others are forbidden"
    alone = drawn.argmax(-1)
    shares = torch.bincount(alone, minlength=5) / 4000
    expected = (logits / 0.7).softmax(-1)
    assert ((shares - expected).abs() < 4 * (expected * (1 - expected) / 4000).sqrt() + 1e-3).all()


def first_logits(temperature: float, **chosen) -> tuple[float, ...]:
    """A logit of each step under a guard, while a loop is written."""
    monitor = {"warmup": 0, "tail_shortest": 12, "tail_beyond": 0, "cooldown": 20}
    edit = LoopGuard(budget=64, anchors=4, act="cut", monitor=monitor, temperature=temperature)
    answers: list[Answer] = answer_rows(
        target_of(*tiny()), [[5, 6, 7, 8]], 30, edit, measure=lambda logits: {"first": logits[:, 0]}, **chosen
    )
    assert answers[0].tokens == LOOP[:30] and answers[0].events
    return answers[0].steps["first"]


def test_the_guard_draws_nothing_where_the_bench_samples():
    sampler = ForcedAnswer([LOOP], 4)
    assert first_logits(0.7, along=[LOOP[:30]]) != first_logits(0.0, along=[LOOP[:30]]), "greedy"
    assert first_logits(0.7, sampler=sampler) == first_logits(0.0, sampler=sampler)
