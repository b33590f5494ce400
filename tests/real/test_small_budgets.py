"""What policies lose of a real text at small budgets: one token more never loses much more."""

from __future__ import annotations

import inspect
import textwrap
from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache

from sinkscope.kv import AdaKV, Policy, Pyramid, SnapKV

pytest.importorskip("experiments.real.models")

PROMPT, STEPS = 320, 24


@torch.no_grad()
def predictions(model, ids, way) -> torch.Tensor:
    """Logarithms of the probabilities after given tokens that follow a prompt."""
    cache = DynamicCache(config=model.config)
    logits = []
    with way:
        for part in (slice(0, PROMPT), slice(PROMPT, PROMPT + 1), slice(PROMPT + 1, None)):
            logits.append(model(input_ids=ids[:, part], past_key_values=cache, use_cache=True).logits[0])
    return torch.cat(logits[1:]).log_softmax(-1)


@pytest.fixture(scope="module")
def ids(smollm2) -> torch.Tensor:
    text = inspect.getsource(textwrap)
    return smollm2.tokenizer(text, return_tensors="pt").input_ids[:, : PROMPT + STEPS]


@pytest.fixture(scope="module")
def full(smollm2, ids) -> torch.Tensor:
    """What is predicted with the full cache."""
    return predictions(smollm2.model, ids, nullcontext())


def divergence(model, ids, full: torch.Tensor, policy: Policy) -> float:
    """KL from the full cache's predictions, in nats, mean over the tokens."""
    kept = predictions(model, ids, policy.on(model))
    return float((full.exp() * (full - kept)).sum(-1).mean())


@pytest.mark.parametrize("policy", [SnapKV, AdaKV, Pyramid])
def test_a_window_leaves_room_for_what_it_votes_for(smollm2, ids, full, policy):
    """Where the window was the whole budget, at 64 to about 70 tokens, the text lost five times as much as at 63."""
    below = divergence(smollm2.model, ids, full, policy(budget=63))
    for budget in (64, 66):
        assert divergence(smollm2.model, ids, full, policy(budget=budget)) < 1.3 * below
