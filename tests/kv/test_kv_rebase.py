"""`positions="rebased"`: with one layer, the cache holds what a fresh run on the kept tokens puts there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kv_kit import Everywhere, close, decode, model_of, prompts, worth
from torch import Tensor
from transformers import DynamicCache

from sinkscope.kv import Full, StreamingLLM
from sinkscope.kv.cache import COLUMNS, CacheLayer
from sinkscope.kv.rotary import Rotary
from sinkscope.opening.live import target_of

_SCALED = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 100.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 100.0},
}
CASES = [
    *(("llama", {"rope_parameters": scaled}) for scaled in _SCALED.values()),
    *((family, {}) for family in ("gpt_neox", "phi", "qwen3")),
    ("phi3", {"sliding_window": None}),
]
POLICY = Everywhere(budget=7, first=1, last=2, positions="rebased")


def held_after(policy: Everywhere, held: list[int], length: int) -> list[int]:
    """What it keeps of `held`: the protected tokens, and those that are worth most."""
    rest = [pos for pos in held if policy.first <= pos < length - policy.last]
    rest.sort(key=lambda pos: -worth(pos, 0, 0, 0))
    sure = [pos for pos in held if pos not in rest]
    return sorted(sure + rest[: int(policy.budget) - len(sure)])


@torch.no_grad()
def fresh(model, row: Tensor, policy: Everywhere, prompt: int, until: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, keys and values of a run on nothing but what is held when token `until` of the row is read."""
    held = list(range(prompt))
    for new in range(prompt, until + 1):
        held = [*held_after(policy, held, new), new]
    cache = DynamicCache()
    logits = model(input_ids=row[None, held], past_key_values=cache).logits[0, -1]
    return logits, cache.layers[0].keys[0], cache.layers[0].values[0]


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_a_fresh_run_on_what_is_kept(family, settings):
    model = model_of(family, num_hidden_layers=1, **settings)
    lengths = [20, 13]
    ids, mask = prompts(lengths, 6)
    cache = DynamicCache()
    with POLICY.on(model):
        got = decode(model, ids, mask, 20, cache)
    for row, length in enumerate(lengths):
        real = ids[row, 20 - length :]
        for step in range(1, 7):
            want, keys, values = fresh(model, real, POLICY, length, length + step - 1)
            close(got[row, step], want)
        close(cache.layers[0].keys[row], keys)
        close(cache.layers[0].values[row], values)
    with replace(POLICY, positions="original").on(model):
        assert float((decode(model, ids, mask, 20) - got).abs().max()) > 1e-3


def _apply_rotary(rotary, keys: Tensor, pos: Tensor) -> Tensor:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = rotary(keys, pos[None])
    return apply_rotary_pos_emb(keys, keys, cos, sin)[0]


def test_positions_that_the_model_makes_itself(model):
    """Without position ids padded rows are numbered from the padding on; distances are the same."""
    ids, mask = prompts([20, 13], 6)
    with POLICY.on(model):
        want = decode(model, ids, mask, 20)
        cache, got = DynamicCache(), []
        with torch.no_grad():
            for at in (slice(0, 20), *(slice(i, i + 1) for i in range(20, 26))):
                out = model(input_ids=ids[:, at], attention_mask=mask[:, : at.stop], past_key_values=cache)
                got.append(out.logits[:, -1])
    close(torch.stack(got, 1), want)


def test_over_turns_runs_and_crops():
    """A later prompt follows closely, in the same run or in another one; so does what comes after a crop."""
    model = model_of("llama", num_hidden_layers=1)
    ids, mask = prompts([16], 12)
    policy = replace(POLICY, every="prefill")
    held = [*held_after(policy, list(range(16)), 16), 16, 17]
    with torch.no_grad():
        want = model(input_ids=ids[:, [*held, *range(18, 24)]]).logits[:, -6:]
        for crop in (0, 3):
            cache = DynamicCache()
            with policy.on(model):
                decode(model, ids[:, :18], mask[:, :18], 16, cache)
                if crop:
                    model(input_ids=ids[:, :crop], past_key_values=cache)
                    cache.crop(-crop)
                if not crop:
                    got = [model(input_ids=ids[:, 18:24], past_key_values=cache).logits]
            if crop:
                with Full().on(model):
                    first = model(input_ids=ids[:, 18:21], past_key_values=cache).logits
                with StreamingLLM(budget=100).on(model):
                    got = [first, model(input_ids=ids[:, 21:24], past_key_values=cache).logits]
            close(torch.cat(got, 1), want)


def test_keys_that_move_at_every_step_stay_exact():
    """Half precision: a key is turned once for every token that comes, and the rounding must not add up."""
    model = model_of("llama", rope_parameters=_SCALED["llama3"]).bfloat16()
    rotary, layer, steps = Rotary(target_of(model)), CacheLayer(), 60
    keys = torch.randn(1, 2, 2 * steps, 8).bfloat16()  # rotated to the position at which each of them comes in
    token = COLUMNS.set(torch.arange(2 * steps)[None])
    layer.update(keys[:, :, :steps], keys[:, :, :steps])
    for new in range(steps, 2 * steps):
        keep = layer.pos > new - steps
        rotary.rebase(layer, keep)
        layer.evict(keep)
        layer.update(keys[:, :, new : new + 1], keys[:, :, new : new + 1])
    COLUMNS.reset(token)
    assert layer.keys is not None and layer.pos[0, 0, 0] == steps
    moved = torch.tensor([-(steps - 1)])
    want = _apply_rotary(model.float().model.rotary_emb, keys[:, :, steps : steps + 1].float(), moved)
    torch.testing.assert_close(layer.keys[:, :, :1].float(), want, atol=1e-4, rtol=0)
