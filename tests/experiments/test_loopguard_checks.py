"""The check of lemma 1: numbers against their definitions, written out position by position."""

from __future__ import annotations

import pytest
import torch
from organisms import tiny_model
from torch import Tensor

from experiments.loopguard.rotary import tails
from experiments.queries_and_keys import queries_and_keys
from sinkscope.opening.live import target_of
from sinkscope.tap.tap import listening


def ids_of(length: int, seed: int) -> Tensor:
    return torch.randint(4, 90, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3"])
@torch.no_grad()
def test_scores_and_the_tail_operator_are_those_of_eager_attention(family: str) -> None:
    model, tokenizer = tiny_model(family)
    target = target_of(model, tokenizer)
    ids, tail, shift = torch.cat([ids_of(10, 2), ids_of(4, 3).repeat(6)]), 4, 5
    part = tails(target, ids, [1], tail)[1]
    seen: dict[bool, tuple[Tensor, Tensor]] = {}
    with queries_and_keys(target, lambda _, rotated, q, k: seen.update({rotated: (q[0], k[0])}), [1]):
        target.forward(ids[None])
    query, key = seen[True]
    key = key.repeat_interleave(len(query) // len(key), 0)
    held: list[Tensor] = []
    with listening(target, lambda call: held.append(call.value[0]) if call.layer == 1 else None):
        target.forward(ids[None])
    values = held[0].repeat_interleave(len(query) // len(held[0]), 0)
    model.set_attn_implementation("eager")
    attention = model(ids[None], output_attentions=True).attentions[1][0]
    last = range(len(ids) - tail, len(ids))
    for head in range(len(query)):
        scores = (query[head] @ key[head].T).tolist()
        pairs = [(scores[t][i], scores[t - shift][i - shift]) for t in last for i in range(t - tail + 1, t + 1)]
        spread = torch.tensor([now for now, _ in pairs]).std(correction=0)
        wanted = sum(abs(now - then) for now, then in pairs) / len(pairs) / float(spread)
        assert float(part.change(shift)[head]) == pytest.approx(wanted, rel=1e-3)
        near = attention[head] * torch.ones(len(ids), len(ids)).triu(1 - tail).tril()
        assert float(near[-1, -tail - 1]) == 0 < float(near[-1, -tail])
        sums = near @ values[head]
        moved = [float((sums[t] - sums[t - shift]).norm() / sums[t].norm()) for t in last]
        assert float(part.drift(shift)[head]) == pytest.approx(sorted(moved)[(tail - 1) // 2], rel=1e-3)
