"""A cache that lacks tokens against the whole one under a mask, which an independent attention applies."""

from __future__ import annotations

from typing import Any

import pytest
from kv_kit import Drawn, Ragged, close, decode, dense, masks_of, prompts
from kv_kit import shallow_of as model_of
from transformers import DynamicCache


@pytest.mark.parametrize(("family", "every"), [("llama", 3), ("gemma2", "prefill")])
def test_when_a_policy_acts_and_what_it_protects(family: str, every: Any) -> None:
    model = model_of(family)
    ids, mask = prompts([20, 14], 8)
    policy = Drawn(budget=9, first=2, last=3, every=every)
    with policy.on(model):
        got = decode(model, ids, mask, 20)
    sees = masks_of(model, policy, mask, 20, every=None if every == "prefill" else every)
    close(got, dense(model, ids, mask, sees)[:, 19:])


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_second_turn_sees_what_the_first_one_left(family: str) -> None:
    """Evict in the first turn, read another prompt in chunks on top, evict again."""
    model = model_of(family)
    ids, mask = prompts([20, 15], 14)
    policy = Ragged(budget=9, every="prefill")
    cache = DynamicCache()
    with policy.on(model):
        decode(model, ids[:, :24], mask[:, :24], 20, cache)
        got = decode(model, ids, mask, 30, cache, chunks=[4, 2])
    # The mask of it: before columns 20 and 30 the policy acted, and all that a query saw of what was held then stays.
    first, second = (masks_of(model, policy, mask, n, every=None) for n in (20, 30))
    sees = []
    for layer, both in zip(first, second, strict=True):
        see = layer.clone()
        see[:, :, 30:] &= both[:, :, 30:]
        sees.append(see)
    close(got, dense(model, ids, mask, sees)[:, 29:])
