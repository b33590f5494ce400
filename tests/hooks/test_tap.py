"""One tap: measurements, policies and guards on one model at a time, in any order, and nobody else's attention."""

from __future__ import annotations

import pytest
import torch
from kv_kit import Drawn, Ragged, close, decode, masks_of_run, prompts, run_policy
from kv_kit import shallow_of as model_of
from torch import Tensor
from transformers import DynamicCache

from sinkscope.conformance.masked import attending, positions_of
from sinkscope.errors import UnsupportedError
from sinkscope.hooks.trace import attention_rows
from sinkscope.kv import H2O, TOVA, StreamingLLM
from sinkscope.lines.sums import scores_of
from sinkscope.opening.live import target_of
from sinkscope.tap import listeners, stock

PROMPT, LENGTHS, STEPS = 20, [20, 13], 5


@pytest.mark.parametrize(
    ("policy", "family"),
    [(H2O(budget=8), "llama"), (TOVA(budget=9), "gemma2"), (Ragged(budget=6), "gpt_oss"), (Drawn(budget=6), "opt")],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_rows_under_a_policy_are_those_over_what_it_keeps(policy, family):
    """Recomputed by stock modules in one pass over everything, under masks made of the positions that were kept."""
    model = model_of(family)
    target, (ids, mask) = target_of(model), prompts(LENGTHS, STEPS)
    cache, shown = DynamicCache(), []  # without a configuration, no layer drops what left a window

    def show(layer: int, _first: int, rows: Tensor):
        if rows.shape[2] == 1:
            shown.append((layer, rows, cache.layers[layer].pos))

    with attention_rows(target, show):
        logits, kept = run_policy(policy, model, ids, mask, (PROMPT,), cache=cache)
    assert len(shown) == STEPS * target.n_layers and int(kept[-1][0].sum(-1).max()) < PROMPT
    with attending(model, masks_of_run(model, kept, mask, PROMPT)), torch.no_grad():
        given = {"attention_mask": mask, "position_ids": positions_of(mask), "use_cache": False}
        whole = model(input_ids=ids, output_attentions=True, **given)
    close(logits, whole.logits[:, PROMPT - 1 :], 2e-5)
    pad = PROMPT - torch.tensor(LENGTHS)[:, None, None]
    for number, (layer, rows, pos) in enumerate(shown):
        groups = rows.shape[1] // pos.shape[1]
        column = torch.where(pos < 0, PROMPT + STEPS, pos + pad).repeat_interleave(groups, 1)
        spread = torch.zeros(*rows.shape[:2], PROMPT + STEPS + 1).scatter(-1, column, rows[:, :, 0])
        own = whole.attentions[layer][:, :, PROMPT + number // target.n_layers]
        torch.testing.assert_close(spread[..., :-1], own, atol=2e-5, rtol=0)
        assert not spread[..., -1].any()


def test_what_a_measurement_refuses():
    model = model_of("llama")
    target = target_of(model)
    with pytest.raises(UnsupportedError, match="a cache policy has evicted some: measure the prompt"):
        with StreamingLLM(budget=6).on(model), scores_of(target, lambda *_: None, [0]):
            decode(model, *prompts(LENGTHS, STEPS), PROMPT)
    assert model.config._attn_implementation == "sdpa" and listeners.HANDLERS.get() == ()


def test_only_the_model_that_is_tapped_is_seen():
    """Another model under a policy calls the same functions of transformers."""
    one, other = model_of("llama"), model_of("qwen3")
    ids, mask = prompts([9], 2)
    want = decode(one, ids, mask, 9)
    shown = []
    with H2O(budget=5).on(one), attention_rows(target_of(other), lambda *rows: shown.append(rows)):
        assert not torch.allclose(decode(one, ids, mask, 9), want)
        assert not shown
        decode(other, ids, mask, 9)
        assert len(shown) == 3 * target_of(other).n_layers


def test_exits_in_any_order_restore_the_models_attention():
    model = model_of("llama")
    target = target_of(model)
    first, second = (attention_rows(target, lambda *_: None) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert model.config._attn_implementation == stock.NAME and stock.stock_name(model.config) == "sdpa"
    second.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa" and stock.STOCK == {}
