"""Cache policies against dense references: the same tokens kept, and the same logits, step by step."""

from __future__ import annotations

from dataclasses import replace

import kv_reference as dense
import pytest
import torch
from covering import each_other
from hypothesis import given, settings
from hypothesis import strategies as st
from intervention_kit import bridge_of
from kv_kit import run_policy
from kv_kit import shallow_of as model_of
from organisms.tiny import tiny_model
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.interventions import Ablate, SinkPatch
from sinkscope.kv import H2O, TOVA, Full, Policy, SnapKV, StreamingLLM, make_policy

PROMPT, STEPS = 26, 12
FAMILIES = ("llama", "gpt2", "mistral", "gemma2", "qwen3", "gpt_oss", "gpt_neox")
CASES = {
    "streaming": (StreamingLLM(budget=12), dense.streaming_llm()),
    "h2o": (H2O(budget=12), dense.h2o()),
    "tova": (TOVA(budget=12), dense.tova()),
    "snapkv": (SnapKV(budget=14, window=8, kernel=3), dense.snapkv(8, 3)),
}


def batch(rows: int = 2, pad: int = 7, prompt: int = PROMPT, steps: int = STEPS) -> tuple[Tensor, Tensor]:
    """Ids `[row token]`, and which prompt tokens are real: the last row begins with padding."""
    ids = torch.randint(5, 90, (rows, prompt + steps), generator=torch.Generator().manual_seed(rows))
    real = torch.ones(rows, prompt, dtype=torch.long)
    real[-1, :pad] = 0
    return ids, real


def run(policy, model, ids: Tensor, real: Tensor) -> tuple[list[list[Tensor]], Tensor]:
    """Kept columns `[step][layer]` bool `[batch kv_head column]` before each token after the prompt, and logits."""
    prompt = real.shape[1]
    mask = torch.cat([real, torch.ones(len(ids), ids.shape[1] - prompt, dtype=torch.long)], 1)
    logits, kept = run_policy(policy, model, ids, mask, (prompt,))
    return [[layer[..., : prompt + step] for layer in layers] for step, layers in enumerate(kept)], logits


def assert_same(got: tuple[list[list[Tensor]], Tensor], reference: dense.Reference):
    assert len(got[0]) == len(reference.kept)
    for step, (ours, theirs) in enumerate(zip(got[0], reference.kept, strict=True)):
        for layer, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(a, b), f"step {step}, layer {layer}"
    assert_close(got[1], reference.logits, atol=5e-5, rtol=0)


def reference_of(
    policy: Policy, choose: dense.Choose, model, ids: Tensor, real: Tensor, budgets: list[int] | None = None
) -> dense.Reference:
    every = None if policy.every == "prefill" else int(policy.every)
    return dense.dense_run(model, ids, real.shape[1], budgets or [int(policy.budget)] * len(ids), choose, real, every)


@pytest.mark.parametrize(("name", "family"), each_other(CASES, FAMILIES, 4, always=["llama"]))
def test_keeps_what_the_dense_reference_keeps(name, family):
    """At prefill and while tokens are decoded, in a batch with padding on the left; under edits, too."""
    policy, choose = CASES[name]
    model = model_of(family)
    ids, real = batch(steps=4 if name == "snapkv" else STEPS)  # it acts once
    assert_same(run(policy, model, ids, real), reference_of(policy, choose, model, ids, real))
    ids, real = batch(steps=3)
    site = (1, 2, 3) if family == "gpt_oss" else (1, 3)
    edits = Ablate(heads="L0.H1") | SinkPatch(sites=[site]) | Ablate(sites=[site], value=2.0, positions=4)
    with edits.on(model):
        expected = reference_of(policy, choose, model, ids, real)
    assert_same(run(edits | policy, model, ids, real), expected)


def test_snapkv_goes_on_choosing_while_tokens_are_generated():
    model = model_of("llama")
    ids, real = batch(pad=3)
    policy = SnapKV(budget=14, window=8, kernel=3, every=4)
    assert_same(run(policy, model, ids, real), reference_of(policy, dense.snapkv(8, 3), model, ids, real))


@pytest.mark.parametrize("policy", [H2O(budget=8, mode="select"), StreamingLLM(budget=8, mode="select")], ids=str)
def test_what_is_hidden_is_still_held(policy):
    """The usage under `mode="select"` is that of the full cache, and eight tokens and the new one are read."""
    model = model_of("llama")
    ids, real = batch(steps=4)
    usages = []
    for each in (policy, Full()):
        cache = DynamicCache()
        with each.on(model) as run_:
            model.generate(ids[:, :PROMPT], attention_mask=real, max_new_tokens=5, past_key_values=cache)
            usages.append(run_.usage)
        read = {int(tokens) for layer in cache.layers for tokens in layer.readable.sum(-1).flatten()}
        assert read == ({9} if each is policy else {PROMPT + 4, PROMPT - 3})
    assert usages[0] == usages[1] and usages[0][0].peak_tokens == [PROMPT + 4, PROMPT - 7 + 4]


@pytest.mark.parametrize("name", CASES)
def test_fraction_of_each_prompt(name):
    """Rounded down, of the real tokens of a row, and not growing while tokens are generated."""
    policy, choose = CASES[name]
    policy = replace(policy, budget=0.55)
    model = model_of("llama")
    ids, real = batch(steps=10)
    budgets = [int(0.55 * int(n)) for n in real.sum(1)]
    assert budgets == [14, 10]
    assert_same(run(policy, model, ids, real), reference_of(policy, choose, model, ids, real, budgets))


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_heads_of_a_kv_head_are_joined_as_asked(reduce):
    """H2O: per query before the sum. SnapKV: after pooling, here by the maximum."""
    model = model_of("llama", num_attention_heads=8, num_key_value_heads=2, head_dim=4)
    ids, real = batch(steps=8)
    policies = [
        (H2O(budget=12, reduce=reduce, recent=0.25), dense.h2o(reduce, 0.25)),
        (
            SnapKV(budget=14, window=6, kernel=5, pooling="max", reduce=reduce),
            dense.snapkv(6, 5, "max", reduce),
        ),
    ]
    for policy, choose in policies:
        assert_same(run(policy, model, ids, real), reference_of(policy, choose, model, ids, real))


def test_snapkv_says_where_a_bridge_hides_its_queries():
    bridge = bridge_of(*tiny_model("phi3"))
    ids, real = batch(steps=0)
    with pytest.raises(UnsupportedError, match=r"phi3.*backend='hf'"), CASES["snapkv"][0].on(bridge):
        bridge.original_model.generate(ids, attention_mask=real, max_new_tokens=3, pad_token_id=3)
    gpt2, tokenizer = tiny_model("gpt2")  # no rotary positions: its projection is what attends
    other = bridge_of(gpt2, tokenizer)
    texts = []
    for kind in (gpt2, other.original_model):
        with CASES["snapkv"][0].on(gpt2 if kind is gpt2 else other):
            texts.append(kind.generate(ids, attention_mask=real, max_new_tokens=8, pad_token_id=3, do_sample=False))
    assert torch.equal(*texts)


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(["streaming", "h2o", "tova"]),
    budget=st.integers(6, 20),
    first=st.integers(0, 3),
    last=st.integers(0, 3),
    pad=st.integers(0, 22),
)
def test_budget_and_protected_positions(name, budget, first, last, pad):
    """After every step: never more than the budget, never less than there is, and the protected ones always."""
    model, _ = tiny_model("llama", num_hidden_layers=1)
    ids, real = batch(pad=pad, steps=5)
    kept, _ = run(make_policy(name, budget=budget, first=first, last=last), model, ids, real)
    for step, layers in enumerate(kept):
        for row, real_tokens in enumerate((real.sum(1) + step).tolist()):
            held = layers[0][row]
            assert (held.sum(-1) == min(budget, real_tokens)).all()
            sure = held[:, held.shape[1] - real_tokens :]
            assert sure[:, :first].all() and sure[:, max(0, real_tokens - last) :].all()


def test_two_policies_and_too_small_a_fraction():
    model, _ = tiny_model("llama")
    with pytest.raises(UnsupportedError, match="StreamingLLM and H2O"), (StreamingLLM() | H2O()).on(model):
        pass
    ids, real = batch(steps=1)
    with pytest.raises(SinkscopeError, match=r"budget=0\.2 of a prompt of 19 tokens, 3, is below the 4"):
        run(H2O(budget=0.2, first=4), model, ids, real)


@pytest.mark.parametrize(
    ("policy", "same", "windows"),
    [
        (SnapKV(budget=0.5), (SnapKV(budget=13, window=6), SnapKV(budget=9, window=4)), [6, 4]),
        (StreamingLLM(budget=0.2), (StreamingLLM(budget=5), StreamingLLM(budget=3, first=1)), [2]),
    ],
    ids=["snapkv", "streaming"],
)
def test_a_window_takes_half_of_a_budget_without_room_for_it(policy, same, windows):
    """Padded rows with windows of their own equal single prompts with these windows given."""
    model = model_of("llama")
    ids, real = batch(steps=3)
    mask = torch.cat([real, torch.ones(2, 3, dtype=torch.long)], 1)
    with policy.on(model) as run_:
        model.generate(ids[:, :PROMPT], attention_mask=real, max_new_tokens=3)
    assert [event.data["window"] for event in run_.events if event.kind == "window"] == windows
    kept, logits = run(policy, model, ids, real)
    for row, alone in enumerate(same):
        pad = int((real[row] == 0).sum())
        part = slice(row, row + 1)
        expected, steps = run_policy(alone, model, ids[part, pad:], mask[part, pad:], (PROMPT - pad,))
        assert_close(logits[part], expected, atol=5e-5, rtol=0)
        for step, layers in enumerate(steps):
            for layer, columns in enumerate(layers):
                assert torch.equal(kept[step][layer][part, :, pad:], columns[..., : PROMPT - pad + step])
    assert SnapKV(budget=64).window_at(64) == 64 and SnapKV(budget=32, first=4).window_at(32) == 14
    assert [StreamingLLM().always_kept(budget) for budget in (1, 4, 5)] == [(0, 0), (2, 0), (4, 0)]
