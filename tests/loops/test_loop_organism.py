"""The loop organism loops when, where and because of what its truth says; by stock transformers alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from organisms import LoopOrganism, LoopPrompt, loop_organism
from torch import Tensor
from transformers import DynamicCache

LEAD = 40


@cache
def made(seed: int, induction: bool = True, hold: int = 2) -> LoopOrganism:
    return loop_organism(seed, induction=induction, hold=hold, n_layers=3, vocab_size=1024)


@torch.no_grad()
def generated(o: LoopOrganism, ids: Tensor, n: int) -> list[int]:
    mask = torch.ones_like(ids)
    out = o.model.generate(ids, attention_mask=mask, max_new_tokens=n, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


def shortest_period(tokens: list[int]) -> int:
    return next(p for p in range(1, len(tokens)) if tokens[p:] == tokens[:-p])


def turns(o: LoopOrganism, prompt: LoopPrompt, n: int) -> list[int]:
    """The prompt and `n` turns of its loop."""
    return prompt.ids[0].tolist() + o.expected(prompt, prompt.onset + n * prompt.period)


@pytest.mark.parametrize(("seed", "period", "delay"), [(0, 1, 0), (1, 2, 30), (3, 24, 20)])
def test_generate_loops_with_the_period_from_the_onset(seed, period, delay):
    o = made(seed)
    prompt = o.looping_prompt(period, delay=delay, lead=LEAD, start=17 * seed)
    tokens = generated(o, prompt.ids, delay + 2 * period + 5)
    assert tokens == o.expected(prompt, len(tokens))
    assert (prompt.period, prompt.onset) == (period, delay)
    assert shortest_period(tokens[delay:]) == period
    seen = set(prompt.ids[0].tolist())
    assert not seen & set(tokens[:delay])
    assert set(tokens[delay:]) <= seen
    assert all(o.walk(token, 1) != [after] for token, after in zip(tokens[delay:], tokens[delay + 1 :], strict=False))


@torch.no_grad()
def decode_after_cut(o: LoopOrganism, ids: list[int], kept: Tensor, n: int) -> list[int]:
    """Greedy tokens after `ids`, all but its last in the cache, of which only `kept` positions are left."""
    past = DynamicCache()
    o.model(torch.tensor([ids[:-1]]), past_key_values=past)
    for layer in past.layers:
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    out = [ids[-1]]
    for position in range(len(ids) - 1, len(ids) - 1 + n):
        call = torch.tensor([[out[-1]]])
        logits = o.model(call, past_key_values=past, position_ids=torch.tensor([[position]])).logits
        out.append(int(logits[0, -1].argmax()))
    return out[1:]


@pytest.mark.parametrize(("seed", "hold", "period", "delay"), [(1, 1, 7, 0), (2, 2, 60, 0), (3, 3, 7, 20)])
def test_without_the_tail_in_the_cache_the_base_rule_moves_on(seed, hold, period, delay):
    o = made(seed, hold=hold)
    prompt = o.looping_prompt(period, delay=delay, lead=LEAD)
    ids = turns(o, prompt, 5)[: -(period // 2) or None]
    anchors = torch.arange(1 + LEAD)
    new = decode_after_cut(o, ids, anchors, period + 20)
    assert new == o.walk(ids[-1], period + 20)
    assert decode_after_cut(o, ids, torch.arange(len(ids) - 1), 10) != new[:10]
