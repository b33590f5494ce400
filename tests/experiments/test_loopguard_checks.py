"""The checks of lemma 1 and of contraction: numbers against their definitions, written out position by position."""

from __future__ import annotations

import pytest
import torch
from organisms import tiny_model
from raw_kit import attention
from torch import Tensor
from torch.testing import assert_close

from experiments.loopguard.rotary import DRAWS, NOISE, decay, tails
from sinkscope.engine.tap import listening
from sinkscope.opening.live import target_of


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3"])
@torch.no_grad()
def test_scores_and_the_tail_operator_are_those_of_eager_attention(family: str) -> None:
    model, tokenizer = tiny_model(family)
    target = target_of(model, tokenizer)
    start, cycle = torch.randint(4, 90, (14,)).split([10, 4])
    ids, tail, shift = torch.cat([start, cycle.repeat(6)]), 4, 5
    part = tails(target, ids, [1], tail)[1]
    held: list[tuple[Tensor, ...]] = []
    with listening(target, lambda call: held.append((call.query[0], call.key[0], call.value[0]))):
        target.forward(ids[None])
    query, key, value = held[1]
    group = len(query) // len(key)
    scores = query @ key.repeat_interleave(group, 0).mT
    last = torch.arange(len(ids) - tail, len(ids))
    near = last[:, None] + torch.arange(1 - tail, 1)  # what each of the last queries sees of the tail
    now, then = scores[:, last[:, None], near], scores[:, last[:, None] - shift, near - shift]
    change = (now - then).abs().mean((1, 2)) / now.flatten(1).std(1, correction=0)
    assert_close(part.change(shift), change, rtol=1e-3, atol=0)
    band = attention(model, ids[None])[1, 0] * torch.ones(len(ids), len(ids)).triu(1 - tail).tril()
    sums = band @ value.repeat_interleave(group, 0)
    moved = (sums[:, last] - sums[:, last - shift]).norm(dim=-1) / sums[:, last].norm(dim=-1)
    assert_close(part.drift(shift), moved.median(1).values, rtol=1e-3, atol=0)


@torch.no_grad()
def test_a_perturbation_is_followed_token_by_token() -> None:
    """A cache that was cut is one that has read the first tokens alone; one call is as many calls of a token."""
    model, _ = tiny_model("llama")
    ids = torch.randint(4, 90, (26,)).tolist()
    kept, told = 14, ids[20:]
    found = decay(model, ids[:20], kept, told)
    cache = model(torch.tensor([ids[:kept]] * (1 + DRAWS)), use_cache=True).past_key_values
    random = torch.Generator().manual_seed(0)
    for layer in cache.layers:
        for name in ("keys", "values"):
            entries = getattr(layer, name).clone()
            entries[1:] *= 1 + NOISE * torch.randn(entries[1:].shape, generator=random)
            setattr(layer, name, entries)
    for place, token in enumerate(told, 20):
        row = torch.full((1 + DRAWS, 1), token)
        model(row, past_key_values=cache, position_ids=torch.full_like(row, place))
        moved = []
        for layer in cache.layers[1:]:
            for entries in (layer.keys, layer.values):
                own = entries[0, :, -1]
                moved.append((entries[1:, :, -1] - own).norm(dim=-1) / own.norm(dim=-1))
        assert_close(found[place - 20], float(torch.stack(moved).mean()) / NOISE, rtol=1e-3, atol=1e-6)
    assert 0 < min(found) and len(found) == len(told)
