"""Calls of torch for a generated token: where a GPU is faster than its host, they are what a policy costs."""

from __future__ import annotations

import pytest
import torch
from kv_kit import model_of
from launches import Launches
from transformers import DynamicCache

from sinkscope.hooks.edit.base import under
from sinkscope.kv import H2O, TOVA, Full, SnapKV, StreamingLLM
from sinkscope.loops.guard import LoopGuard
from sinkscope.opening.load import target_of

BUDGET, PROMPT = 16, 24


def launches(edit, layers: int) -> int:
    """Of the eighth token after a prompt."""
    target, cache = target_of(model_of("llama", num_hidden_layers=layers)), DynamicCache()
    ids = torch.arange(5, 5 + PROMPT + 8)[None]
    with torch.no_grad(), under(edit, target):
        target.hf(ids[:, :PROMPT], past_key_values=cache)
        for at in range(PROMPT, PROMPT + 7):
            target.hf(ids[:, at : at + 1], past_key_values=cache)
        with Launches() as seen:
            target.hf(ids[:, -1:], past_key_values=cache)
    return seen.count.total()


@pytest.mark.parametrize(
    ("edit", "most"),
    # On a CPU two of TOVA and H2O look at the smallest score, to find NaN.
    [
        (Full(), 0),
        (LoopGuard(BUDGET), 0),
        (SnapKV(BUDGET, window=4), 0),
        (StreamingLLM(BUDGET, first=2), 7),
        (TOVA(BUDGET), 11),
        (H2O(BUDGET), 15),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else "",
)
def test_a_layer_takes_so_many_calls_more_than_without_a_policy(edit, most):
    of_layer = (launches(edit, 4) - launches(edit, 2)) / 2
    assert of_layer - (launches(None, 4) - launches(None, 2)) / 2 <= most
