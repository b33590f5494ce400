"""Sampling follows the softmax, and other rows of a batch play no part."""

from __future__ import annotations

import torch

from sinkscope.bench.samplers import RowSampler


def test_sampling_follows_the_softmax_and_the_prompt_alone():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -9.0])
    ids = torch.empty(0)

    def draws(count: int, *prompts: str) -> torch.Tensor:
        """`[draw row]`."""
        process = RowSampler(0.7, 0, prompts)
        return torch.stack([process(ids, logits.expand(len(prompts), -1)).argmax(-1) for _ in range(count)])

    alone = draws(4000, "dc-0001")[:, 0]
    shares = torch.bincount(alone, minlength=5) / 4000
    expected = (logits / 0.7).softmax(-1)
    assert ((shares - expected).abs() < 4 * (expected * (1 - expected) / 4000).sqrt() + 1e-3).all()
    together = draws(100, "dc-0002", "dc-0001")
    assert torch.equal(together[:, 1], alone[:100]) and not torch.equal(together[:, 0], alone[:100])
