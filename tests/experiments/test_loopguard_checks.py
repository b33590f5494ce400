"""The check of lemma 1: numbers against their definitions, written out position by position."""

from __future__ import annotations

import pytest
import torch
from organisms import tiny_model
from raw_kit import attention
from torch import Tensor
from torch.testing import assert_close

from experiments.loopguard.rotary import tails
from experiments.queries_and_keys import queries_and_keys
from sinkscope.opening.live import target_of
from sinkscope.tap.tap import listening


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3"])
@torch.no_grad()
def test_scores_and_the_tail_operator_are_those_of_eager_attention(family: str) -> None:
    model, tokenizer = tiny_model(family)
    target = target_of(model, tokenizer)
    generator = torch.Generator().manual_seed(2)
    start, cycle = torch.randint(4, 90, (14,), generator=generator).split([10, 4])
    ids, tail, shift = torch.cat([start, cycle.repeat(6)]), 4, 5
    part = tails(target, ids, [1], tail)[1]
    seen: dict[bool, tuple[Tensor, Tensor]] = {}
    held: list[Tensor] = []
    with queries_and_keys(target, lambda _, rotated, q, k: seen.update({rotated: (q[0], k[0])}), [1]):
        with listening(target, lambda call: held.append(call.value[0]) if call.layer == 1 else None):
            target.forward(ids[None])
    query, key = seen[True]
    group = len(query) // len(key)
    scores = query @ key.repeat_interleave(group, 0).mT
    last = torch.arange(len(ids) - tail, len(ids))
    near = last[:, None] + torch.arange(1 - tail, 1)  # what each of the last queries sees of the tail
    now, then = scores[:, last[:, None], near], scores[:, last[:, None] - shift, near - shift]
    change = (now - then).abs().mean((1, 2)) / now.flatten(1).std(1, correction=0)
    assert_close(part.change(shift), change, rtol=1e-3, atol=0)
    band = attention(model, ids[None])[1, 0] * torch.ones(len(ids), len(ids)).triu(1 - tail).tril()
    sums = band @ held[0].repeat_interleave(group, 0)
    moved = (sums[:, last] - sums[:, last - shift]).norm(dim=-1) / sums[:, last].norm(dim=-1)
    assert_close(part.drift(shift), moved.median(1).values, rtol=1e-3, atol=0)
