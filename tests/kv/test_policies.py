"""Cache policies against dense references: the same tokens kept, and the same logits, step by step."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import kv_reference as dense
import pytest
from covering import each_other
from kv_kit import prompts, run_policy
from kv_kit import shallow_of as model_of
from organisms.decoders import decoder
from torch.testing import assert_close

from sinkscope.generation.progressive import Progressive
from sinkscope.hooks.edit import Ablate, SinkPatch
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv import H2O, TOVA, Policy, SnapKV, StreamingLLM

PROMPT, STEPS = 26, 12
FAMILIES = ("llama", "gpt2", "mistral", "gemma2", "qwen3", "gpt_oss", "gpt_neox")
SNAP = partial(dense.snapkv, window=8, kernel=3)
CASES = {
    "streaming": (StreamingLLM(budget=12), dense.streaming_llm),
    "h2o": (H2O(budget=12), dense.h2o),
    "tova": (TOVA(budget=12), dense.tova),
    "snapkv": (SnapKV(budget=14, window=8, kernel=3), SNAP),
    "progressive": (Progressive(budget=12, every=4, after=0, mode="evict"), dense.progressive),
}


LENGTHS = [PROMPT, PROMPT - 7]


def check(policy: Policy, choose: dense.Choose, model, steps: int = STEPS, edits: Intervention | None = None):
    """What the policy keeps is what the function keeps, in a batch with padding on the left; under edits, too."""
    ids, mask = prompts(LENGTHS, steps, seed=2)
    found = run_policy(policy if edits is None else edits | policy, model, ids, mask, PROMPT)
    with nullcontext() if edits is None else edits.on(model):
        dense.check_run(found, choose, model, ids, mask, policy, steps)


@pytest.mark.parametrize(("name", "family"), each_other(CASES, FAMILIES, 4, always=["llama"]))
def test_keeps_what_the_dense_reference_keeps(name, family):
    """At prefill and while tokens are decoded."""
    policy, choose = CASES[name]
    model = model_of(family)
    check(policy, choose, model, 4 if name == "snapkv" else STEPS)  # it acts once
    site = (1, 2, 3) if family == "gpt_oss" else (1, 3)
    edits = Ablate(heads="L0.H1") | SinkPatch(sites=[site]) | Ablate(sites=[site], value=2.0, positions=4)
    check(policy, choose, model, 3, edits)


def test_scores_that_the_model_scales_by_layer_and_keys_that_are_latent_vectors():
    check(H2O(budget=12), dense.h2o, model_of("gpt2", scale_attn_by_inverse_layer_idx=True), 4)
    check(CASES["snapkv"][0], SNAP, decoder("deepseek_v2"), 4)


def test_attention_that_a_module_computes_twice_counts_once(monkeypatch):
    """DiffLlama attends to other values with the same queries and keys."""
    seen, add, model = Counter[tuple[int, int]](), H2O._add, decoder("diffllama")

    def counted(policy, rows):
        seen[rows.layer, rows.probs.shape[2]] += 1
        add(policy, rows)

    monkeypatch.setattr(H2O, "_add", counted)
    ids, mask = prompts([PROMPT], 3, seed=2)
    run_policy(H2O(budget=12), model, ids, mask, PROMPT)
    layers = range(model.config.num_hidden_layers)
    assert seen == {(layer, queries): times for layer in layers for queries, times in ((PROMPT, 1), (1, 3))}


WIDE = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
OPTIONS = [
    (SnapKV(budget=14, window=8, kernel=3, every=4), SNAP, {}),
    *((replace(policy, budget=0.55), choose, {}) for policy, choose in CASES.values()),
    # What is protected stays; a row of 19 tokens keeps them all where the budget is 24.
    *((TOVA(budget=budget, first=2, last=3), partial(dense.tova, first=2, last=3), {}) for budget in (6, 12, 24)),
    (H2O(budget=12, first=3), partial(dense.h2o, first=3), {}),
    (H2O(budget=12, recent=0.25), partial(dense.h2o, recent=0.25), WIDE),
    (SnapKV(budget=14, window=6, pooling="max"), partial(dense.snapkv, window=6, pooling="max"), WIDE),
]


@pytest.mark.parametrize(("policy", "choose", "sizes"), OPTIONS)
def test_options_keep_what_the_dense_reference_keeps(policy, choose, sizes):
    """A fraction is of the real tokens of each prompt, rounded down; it does not grow while tokens are generated."""
    check(policy, choose, model_of("llama", **sizes), 10)


@pytest.mark.parametrize("policy", [H2O(budget=6), TOVA(budget=6)], ids=str)
def test_attention_that_a_model_returns_is_returned_of_every_token(policy, model):
    model.set_attn_implementation("eager")
    ids, _ = prompts([9], 1)
    with policy.on(model):
        found = model.generate(
            ids[:, :9], max_new_tokens=4, do_sample=False, output_attentions=True, return_dict_in_generate=True
        )
    assert len(found.attentions) == 4
    assert all(len(of_token) == model.config.num_hidden_layers for of_token in found.attentions)
    assert all(rows is not None and rows.shape[2] == 1 for of_token in found.attentions[1:] for rows in of_token)


@pytest.mark.parametrize("policy", [SnapKV(budget=0.5), StreamingLLM(budget=0.2)], ids=str)
def test_a_window_takes_half_of_a_budget_without_room_for_it(policy, model):
    """Rows of a batch have windows of their own."""
    ids, mask = prompts(LENGTHS, 3)
    both, alone = (run_policy(policy, model, ids[n:, 7 * n :], mask[n:, 7 * n :], PROMPT - 7 * n)[0] for n in (0, 1))
    assert_close(both[1:], alone, atol=5e-5, rtol=0)
    assert [StreamingLLM().always_kept(budget) for budget in (1, 4, 5)] == [(0, 0), (2, 0), (4, 0)]
