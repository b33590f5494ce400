"""Algorithm 6 against masks that are written by lists, and the working copy against the cache it stands for."""

from __future__ import annotations

import pytest
import torch
from covering import each_other
from guard_kit import EAGER, SMALL
from kv_kit import attended, close, decode, dense, prompts, window_of
from kv_kit import shallow_of as model_of
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

from sinkscope.kv.cache import COLUMNS, CacheLayer
from sinkscope.kv.loopguard import LoopGuard
from sinkscope.kv.loopserve import Progressive, tokens_read
from sinkscope.kv.loopserve.progressive import work_on_copy
from sinkscope.opening.live import target_of

IDS, MASK = prompts([30, 21], 14)
PROMPT = 30


def reference_masks(model, ids: Tensor, mask: Tensor, policy: Progressive, prompt: int = PROMPT) -> list[Tensor]:
    """What each query may see, from the attention of whole passes: per layer, bool `[row kv_head query key]`."""
    target, total = target_of(model), ids.shape[1]
    column = torch.arange(total)
    whole = []
    for layer in range(target.n_layers):
        causal = (column <= column[:, None]) & (mask[:, None] > 0)
        if (window := window_of(model, layer)) is not None:
            causal &= column > column[:, None] - window
        whole.append(causal[:, None].repeat(1, target.n_kv_heads, 1, 1))
    sees = [layer.clone() for layer in whole]
    for now in range(prompt + policy.after, total, policy.interval):
        evicted = policy.mode == "evict" and now > prompt + policy.after
        passed = attended(model, ids[:, :now], mask[:, :now], [layer[..., :now, :now] for layer in sees])
        for layer, (query, key, _, scaling) in enumerate(passed):
            groups = query.shape[1] // key.shape[1]
            later = sees[layer][..., now:, :now]
            held = (mask[:, None, :now] > 0).expand(later[:, :, 0].shape)
            free = whole[layer][..., :now, :now]
            if evicted:
                held = later[:, :, 0]
                free = free & held[:, :, None]
            free = free.repeat_interleave(groups, 1)
            scores = query @ key.repeat_interleave(groups, 1).mT * scaling
            probs = scores.masked_fill(~free, -1e9).softmax(-1) * free
            votes = probs[:, :, -policy.interval :].sum(2).unflatten(1, (-1, groups)).mean(2)
            order = votes.masked_fill(~held, -1).sort(descending=True, stable=True).indices
            keep = torch.zeros_like(held).scatter(-1, order[..., : int(policy.budget)], True) & held
            if policy.mode == "select":  # what was hidden before may come back
                later |= whole[layer][..., now:, :now]
            later &= keep[:, :, None]
    return sees


POLICIES = {
    "text": Progressive(budget=12, every=4, after=4),
    "at once": Progressive(budget=9, every=4, after=0),
    "evicting": Progressive(budget=12, every=4, after=0, mode="evict"),
    "odd": Progressive(budget=10, every=3, after=2),
}


@pytest.mark.parametrize(
    ("name", "family"), each_other(POLICIES, ["llama", "gpt2", "mistral", "qwen3"], 4, always=["llama"])
)
def test_decoding_equals_a_pass_under_the_masks_of_the_algorithm(family, name):
    if family == "mistral" and name == "evicting":
        pytest.skip("the masks here do not tell what is held beyond the window from what was evicted")
    model, policy = model_of(family), POLICIES[name]
    sees = reference_masks(model, IDS, MASK, policy)
    with policy.on(model) as run:
        ours = decode(model, IDS, MASK, PROMPT)
        read = tokens_read(run)
    close(ours, dense(model, IDS, MASK, sees)[:, PROMPT - 1 :])
    if window_of(model, 0) is None:
        counts = torch.stack([layer[:, :, PROMPT:].sum(-1).float().mean((1, 2)) for layer in sees]).mean(0)
        assert_close(torch.tensor(read), counts[None])


def test_steps_hold_the_copy_and_turns_see_everything(model):
    """Between selections a layer is as long as the copy; a second turn and the time after see all tokens."""
    policy = Progressive(budget=8, every=4, after=0)
    ids, mask = prompts([20], 16)
    cache, slots, logits = DynamicCache(config=model.config), [], []
    with policy.on(model), torch.no_grad():
        for at, step in [(0, 20), *[(i, 1) for i in range(20, 27)], (27, 5), *[(i, 1) for i in range(32, 36)]]:
            out = model(input_ids=ids[:, at : at + step], past_key_values=cache, use_cache=True)
            slots.append(cache.layers[0].keys.shape[2])
            logits.append(out.logits)
        assert cache.get_seq_length() == 36
    assert slots == [20, 9, 10, 11, 12, 9, 10, 11, 32, 9, 10, 11, 12]
    assert all(layer.keys.shape[2] == 36 for layer in cache.layers)
    with torch.no_grad():
        keys = DynamicCache(config=model.config)
        model(input_ids=ids, past_key_values=keys, use_cache=True)
        assert_close(cache.layers[0].keys, keys.layers[0].keys)  # layer 0 depends on no attention
        more = model(input_ids=ids[:, :2], past_key_values=cache, use_cache=True)  # outside, as a plain cache
        assert more.logits.shape[1] == 2
    # The second turn's queries see all: a pass in which only the single tokens were restricted.
    sees = reference_masks(model, ids[:, :27], mask[:, :27], policy, 20)
    wide = [torch.ones(36, 36, dtype=torch.bool).tril().expand(*layer.shape[:2], 36, 36).clone() for layer in sees]
    for layer, part in zip(wide, sees, strict=True):
        layer[:, :, :27, :27] = part
    close(logits[8], dense(model, ids, mask, wide)[:, 27:32])


@pytest.mark.parametrize("change", ["crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices"])
def test_what_else_is_done_to_a_layer_is_done_to_the_whole(change):
    generator = torch.Generator().manual_seed(0)
    argument = {"crop": -5, "batch_repeat_interleave": 2}.get(change, torch.tensor([1, 0]))
    worked, plain = CacheLayer(), CacheLayer()
    for step in (10, 1, 1, 1):
        keys, values = (torch.randn(2, 2, step, 4, generator=generator) for _ in range(2))
        for layer in (worked, plain):
            token = COLUMNS.set(torch.arange(layer.seen + step).expand(2, -1))
            layer.update(keys, values)
            COLUMNS.reset(token)
            layer.numbers.set("seen", layer.extra("seen") + 1)
        if step == 10:
            work_on_copy(worked, torch.rand(2, 2, 10, generator=generator) < 0.5)
            assert worked.slots < 10
    for layer in (worked, plain):
        getattr(layer, change)(argument)
    assert torch.equal(worked.keys, plain.keys) and torch.equal(worked.values, plain.values)  # type: ignore
    assert torch.equal(worked.pos, plain.pos)
    assert worked.seen == plain.seen and worked.edited == plain.edited
    assert not worked.holes().any()
    # Slots in the copy went on counting, the others stood still.
    assert worked.extra("seen").shape == plain.extra("seen").shape
    if change != "crop":
        assert torch.equal(worked.extra("seen")[..., 10:], plain.extra("seen")[..., 10:])


def test_a_loop_guard_cuts_the_whole_cache(model):
    """What the guard takes out never comes back, and the selection goes on at once from what it left."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(5, 96, (1, 40), generator=generator)
    loop = torch.randint(5, 96, (1, 4), generator=generator).repeat(1, 12)
    ids = torch.cat([prompt, loop], 1)
    guard = LoopGuard.paper(**SMALL, variant="tail", monitor=EAGER)
    cache = DynamicCache(config=model.config)
    lengths = []
    with (Progressive(budget=8, every=4, after=0) | guard).on(model) as run, torch.no_grad():
        model(input_ids=ids[:, :40], past_key_values=cache, use_cache=True)
        for at in range(40, 88):
            model(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True)
            lengths.append(cache.layers[0].keys.shape[2])
        cuts = [event for event in run.events if event.kind == "guard"]
    assert cuts
    kept = {p for start, stop in cuts[-1].data["kept"] for p in range(start, stop)}
    last = cuts[-1].position
    for layer in cache.layers:
        held = set(layer.pos[0, 0].tolist())
        assert {p for p in held if p <= last} == kept
    # Right after a cut all that is left is held; one step later it is a copy of 8 again, and the new token.
    step = last - 40
    assert lengths[step] == len(kept) and lengths[step + 1] == 9
