"""Sampling follows the softmax."""

from __future__ import annotations

import torch

from sinkscope.bench.samplers import RowSampler


def test_sampling_follows_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -9.0])
    ids = torch.empty(0)

    process = RowSampler(0.7, 0, ["dc-0001"])
    alone = torch.cat([process(ids, logits[None]).argmax(-1) for _ in range(4000)])
    shares = torch.bincount(alone, minlength=5) / 4000
    expected = (logits / 0.7).softmax(-1)
    assert ((shares - expected).abs() < 4 * (expected * (1 - expected) / 4000).sqrt() + 1e-3).all()
