"""Every policy keeps what the plain reference keeps, and gives the logits of a stock pass under its masks."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from kv_kit import prompts, run_policy
from kv_kit import shallow_of as model_of
from kv_reference import check_run
from organisms.decoders import decoder
from transformers import DynamicCache

from sinkscope.kv import H2O, SnapKV, StreamingLLM, policies

FAMILIES = ("llama", "mistral", "gpt2", "gemma2", "qwen3", "gpt_oss", "opt", "gemma3_text", "gpt_neox")
PAGE = Path(__file__).parents[2] / "docs/policies.md"
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
PROMPT = 26


OUR_POLICIES = [name for name, policy in policies().items() if policy.__module__.startswith("sinkscope.")]
CHECKED = [name for name in OUR_POLICIES if name != "progressive"]
"""Policies that drop what they do not keep. Algorithm 6 only selects, and has tests of its own."""
VOTES = {"window": [None, 3, 6], "kernel": [3, 5], "pooling": ["avg", "max"]}
SETTINGS: dict[str, dict[str, list[Any]]] = {
    "h2o": {"recent": [0.5, 0.25, 0.9]},
    "snapkv": VOTES,
    "adakv": {"floor": [0.2, 0.0, 1.0], **VOTES},
    "pyramid": {**VOTES, "beta": [20, 2]},
}
"""Values of which one is drawn, as many of them the defaults as others."""


def check(name: str, policy: Any, model: Any, lengths: list[int], steps: int, **how):
    """A batch with padding on the left."""
    ids, mask = prompts(lengths, steps, seed=2)
    prompt = max(lengths)
    check_run(run_policy(policy, model, ids, mask, prompt, **how), name, policy, model, ids, mask, prompt)


SEEDS = [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 40))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CHECKED)
def test_a_policy_keeps_what_the_reference_keeps(name, seed):
    """Budgets in tokens or as a fraction, rows of other lengths, prompts in chunks, windows, soft caps and sinks."""
    draw = Random(f"{name} {seed}")
    family = FAMILIES[(CHECKED.index(name) + seed) % len(FAMILIES)]
    model = model_of(family, **WIDE) if family == "llama" and seed % 2 else model_of(family)
    choices = {"every": [1, 3, "prefill"], "first": [0, 2], "last": [0, 3], **SETTINGS.get(name, {})}
    choices["budget"] = [12, 14, 20, 0.55, 0.8]
    settings = {setting: draw.choice(values) for setting, values in choices.items()}
    if family == "gpt_oss" and "window" in settings:  # weights of learned sinks do not say what a smaller cache gives
        settings["every"] = "prefill"
    policy = policies()[name](**settings)
    lengths = draw.choice([[PROMPT], [PROMPT, 19], [22, PROMPT, 24]])
    chunks = draw.choice([None, [7, 9, 7, max(lengths) - 23]])
    check(name, policy, model, lengths, draw.randint(3, 8), chunks=chunks)


@pytest.mark.parametrize("name", OUR_POLICIES)
def test_a_policy_has_a_row_on_its_page(name):
    shown = policies()[name].__name__
    rows = re.findall(r"^\| `(?:ss\.)?(\w+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.M)
    assert shown in rows, f"docs/policies.md has no row of `{shown}`: what it keeps, and the paper"


def test_scores_that_the_model_scales_by_layer_and_keys_that_are_latent_vectors():
    check("h2o", H2O(budget=12), model_of("gpt2", scale_attn_by_inverse_layer_idx=True), [PROMPT, 19], 4)
    check("snapkv", SnapKV(budget=14, window=8), decoder("deepseek_v2"), [PROMPT, 19], 4)


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


def test_a_budget_that_is_a_fraction_is_one_of_all_that_each_turn_has_read():
    model, cache, held = model_of("llama"), DynamicCache(), []
    ids, _ = prompts([30], 4)
    with torch.no_grad(), StreamingLLM(0.5, first=2).on(model):
        for start, stop in ((0, 12), (12, 13), (13, 14), (14, 30), (30, 31)):
            model(ids[:, start:stop], past_key_values=cache)
            held.append(cache.layers[0].keys.shape[-2])
    assert held == [12, 6 + 1, 6 + 1, 7 + 16, 15 + 1]
