"""Algorithm 6 against masks that are written by lists, and the working copy against the cache it stands for."""

from __future__ import annotations

import pytest
import torch
from kv_kit import attended, close, masks_of_run, prompts, run_policy
from kv_kit import shallow_of as model_of
from lines_kit import dense
from torch import Tensor
from transformers import DynamicCache

from sinkscope.conformance.masked import plain_logits, window_of
from sinkscope.sparse.attention import Scores
from sinkscope.sparse.progressive import Progressive

IDS, MASK = prompts([30, 21], 14)
PROMPT = 30


def assert_chosen(model, policy: Progressive, kept: list[list[Tensor]]):
    """What is read from each choice on has the most votes: attention of the latest queries, of whole passes."""
    passed = attended(model, IDS, MASK, masks_of_run(model, kept, MASK, PROMPT))
    for layer, (query, key, _, scaling) in enumerate(passed):
        for row, real in enumerate(MASK.bool()):
            scores = Scores(query[row], key[row], scaling, window_of(model.config, layer))
            probs = dense(scores, real).unflatten(0, (key.shape[1], -1)).mean(1)
            for now in range(PROMPT + policy.after, IDS.shape[1], policy.every):
                votes = probs[:, now - policy.every : now, :now].sum(1)
                best = votes.topk(int(policy.budget)).indices
                keep = torch.zeros_like(votes, dtype=torch.bool).scatter(-1, best, True)
                assert torch.equal(kept[now - PROMPT][layer][row, :, :now], keep), f"layer {layer}, column {now}"


POLICIES = {
    "text": Progressive(budget=12, every=4, after=4),
    "at once": Progressive(budget=9, every=4, after=0),
    "odd": Progressive(budget=10, every=3, after=2),
}


@pytest.mark.parametrize(("name", "family"), [("text", "mistral"), ("at once", "gpt2"), ("odd", "llama")])
def test_decoding_equals_a_pass_under_the_masks_of_the_algorithm(family, name):
    model, policy = model_of(family), POLICIES[name]
    logits, kept = run_policy(policy, model, IDS, MASK, PROMPT)
    close(logits, plain_logits(model, IDS, MASK, masks_of_run(model, kept, MASK, PROMPT))[:, PROMPT - 1 :])
    assert_chosen(model, policy, kept)


def test_steps_hold_the_copy_and_turns_see_everything(model):
    """Between selections a layer is as long as the copy; a second turn and the time after see all tokens."""
    (ids, _), cache, slots = prompts([36]), DynamicCache(config=model.config), list[int]()
    with Progressive(budget=8, every=4, after=0).on(model) as run, torch.no_grad():
        for part in ids.split([20, *[1] * 7, 5, *[1] * 4], 1):
            model(input_ids=part, past_key_values=cache, use_cache=True)
            slots.append(cache.layers[0].keys.shape[2])
    steps = [9, 10, 11, 12, 9, 10, 11], [9, 10, 11, 12]
    assert slots == [20, *steps[0], 32, *steps[1]]
    assert run.usage[0].mean_read == [pytest.approx(sum(map(sum, steps)) / 11)]
    assert all(layer.keys.shape[2] == 36 for layer in cache.layers)
