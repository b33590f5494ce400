"""Sampling follows the softmax, and edits can see it."""

from __future__ import annotations

import torch

from sinkscope.bench.task import RowSampler
from sinkscope.models.draws import draws, gumbel, in_order


def test_sampling_follows_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -9.0])
    ids = torch.empty(0)

    process = RowSampler(0.7, 0, ["dc-0001"])
    drawn = torch.cat([process(ids, logits[None]) for _ in range(2000)])
    assert ((drawn == 0).sum(-1) == 1).all() and (drawn.isinf().sum(-1) == 4).all(), "all others are forbidden"
    alone = drawn.argmax(-1)
    shares = torch.bincount(alone, minlength=5) / 2000
    expected = (logits / 0.7).softmax(-1)
    assert ((shares - expected).abs() < 4 * (expected * (1 - expected) / 2000).sqrt() + 1e-3).all()


def test_what_is_drawn_in_half_precision_is_drawn_as_often():
    """Eight equal logits far from 0, where bfloat16 has steps of an eighth, and noise rounds to equal numbers."""
    logits = torch.full((8,), 20.0)
    process = RowSampler(0.7, 0, ["dc-0001"])
    dtype, count, by_bench, by_guard = torch.bfloat16, 2000, torch.zeros(8), torch.zeros(8)
    for number in range(count):
        by_bench[process(torch.empty(0), logits[None].to(dtype))[0].argmax()] += 1
        noise = 0.7 * gumbel(8, torch.float32, draws(0, f"{number}"))
        by_guard[in_order(logits + noise, dtype).argmax()] += 1
    for shares in (by_bench / count, by_guard / count):
        assert (shares - 1 / 8).abs().max() < 4 * (7 / 64 / count) ** 0.5
