"""One tap: measurements, policies and guards on one model at a time, in any order, and nobody else's attention."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from inspect import signature
from typing import Any

import pytest
import torch
from kv_kit import Drawn, Ragged, close, decode, positions, prompts, under, window_of
from kv_kit import shallow_of as model_of
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

import sinkscope as ss
from sinkscope.errors import UnsupportedError
from sinkscope.kv import H2O, TOVA, AShape, Full, Observe, StreamingLLM
from sinkscope.lines.sums import scores_of
from sinkscope.opening.live import target_of
from sinkscope.tap import internals, listeners, stock
from sinkscope.trace import attention_rows

PROMPT, LENGTHS, STEPS = 20, [20, 13], 5


class Shown:
    """Rows of every call, one tensor per layer, and the positions of the slots after the call."""

    def __init__(self):
        self.calls = []

    def __call__(self, layer: int, first: int, rows: Tensor):
        if not self.calls or (layer == 0 and first == 0):
            self.calls.append({})
        self.calls[-1].setdefault(layer, []).append(rows)

    def rows(self, call: int, layer: int) -> Tensor:
        return torch.cat(self.calls[call][layer], 2)


@torch.no_grad()
def decoded(model, ways: list[AbstractContextManager[Any]]) -> tuple[Tensor, list[list[Tensor]]]:
    """Logits of a prompt and of single tokens after it, and positions `[call][layer]` of the slots after each call."""
    ids, mask = prompts(LENGTHS, STEPS)
    cache, held, logits, at = DynamicCache(), [], [], 0  # without a configuration, no layer drops what left a window
    with ExitStack() as stack:
        for way in ways:
            stack.enter_context(way)
        for step in [PROMPT, *[1] * STEPS]:
            part = slice(at, at + step)
            at += step
            given = {"position_ids": positions(mask)[:, part], "past_key_values": cache}
            logits.append(model(input_ids=ids[:, part], attention_mask=mask[:, :at], **given).logits[:, -1])
            held.append([layer.pos.clone() if hasattr(layer, "pos") else torch.empty(0) for layer in cache.layers])
    return torch.stack(logits, 1), held


def seen_by(model, mask: Tensor, held: list[list[Tensor]], layer: int) -> Tensor:
    """Bool `[batch kv_head query column]`: what each query saw, by the positions that were held after its call."""
    rows, total = mask.shape
    heads = held[0][layer].shape[1]
    sees = torch.ones(total, total, dtype=torch.bool).tril().expand(rows, heads, total, total).clone()
    for row in range(rows):
        pad = int((mask[row] == 0).sum())
        sees[row, :, :, :pad] = False
        for step in range(STEPS):
            for head in range(heads):
                pos = held[step + 1][layer][row, head]
                sees[row, head, PROMPT + step] = False
                sees[row, head, PROMPT + step, pos[pos >= 0] + pad] = True
    if (window := window_of(model, layer)) is not None:
        sees &= ~torch.ones(total, total, dtype=torch.bool).tril(-window)
    return sees


@pytest.mark.parametrize(
    ("policy", "family"),
    [(H2O(budget=8), "llama"), (TOVA(budget=9), "gemma2"), (Ragged(budget=6), "gpt_oss"), (Drawn(budget=6), "opt")],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_rows_under_a_policy_are_those_over_what_it_keeps(policy, family):
    """Recomputed by stock modules in one pass over everything, under masks made of the positions that were kept."""
    model = model_of(family)
    target, (ids, mask) = target_of(model), prompts(LENGTHS, STEPS)
    shown = Shown()
    logits, held = decoded(model, [policy.on(model), attention_rows(target, shown)])
    assert any(int((held[-1][layer] >= 0).sum(-1).max()) < PROMPT for layer in range(target.n_layers))
    own = {}
    hooks = [
        (target.sub(i, target.adapter.attn), "post", lambda _m, _a, _k, out, i=i: own.__setitem__(i, out[1]))
        for i in range(target.n_layers)
    ]
    sees = [seen_by(model, mask, held, layer) for layer in range(target.n_layers)]
    with under(model, sees), target.hooks(*hooks), torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False).logits
    close(logits, whole[:, PROMPT - 1 :], 2e-5)
    for step in range(STEPS):
        for layer in range(target.n_layers):
            rows, pos = shown.rows(step + 1, layer), held[step + 1][layer]
            for row, pad in enumerate((0, PROMPT - LENGTHS[1])):
                for head in range(rows.shape[1]):
                    where = pos[row, head * pos.shape[1] // rows.shape[1]]
                    spread = torch.zeros(PROMPT + STEPS)
                    spread[where[where >= 0] + pad] = rows[row, head, 0, where >= 0]
                    torch.testing.assert_close(spread, own[layer][row, head, PROMPT + step], atol=2e-5, rtol=0)
                    assert not rows[row, head, 0, where < 0].any()


def test_what_a_measurement_refuses():
    model = model_of("llama")
    target = target_of(model)
    with pytest.raises(UnsupportedError, match="a cache policy has evicted some: measure the prompt"):
        decoded(model, [StreamingLLM(budget=6).on(model), scores_of(target, lambda *_: None, [0])])
    assert model.config._attn_implementation == "sdpa" and listeners.HANDLERS.get() == ()


@pytest.mark.parametrize(
    ("first", "second"), [(Drawn(budget=5), AShape()), (AShape(), ss.LoopGuard()), (ss.LoopGuard(), Full())]
)
def test_two_that_act_are_entered_together(first, second):
    model = model_of("llama")
    with first.on(model):
        with pytest.raises(UnsupportedError, match="already inside a `with` that acts on its cache"):
            with second.on(model):
                pass
        with Observe(lambda _: None).on(model):
            decode(model, *prompts([9], 2), 9)
    with second.on(model):
        pass


def test_only_the_model_that_is_tapped_is_seen():
    """Another model under a policy calls the same functions of transformers."""
    one, other = model_of("llama"), model_of("qwen3")
    ids, mask = prompts([9], 2)
    want = decode(one, ids, mask, 9)
    shown = Shown()
    with H2O(budget=5).on(one), attention_rows(target_of(other), shown):
        assert not torch.allclose(decode(one, ids, mask, 9), want)
        assert shown.calls == []
        decode(other, ids, mask, 9)
        assert len(shown.calls) == 3


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


def test_names_of_transformers_that_are_not_public():
    """Where one of them moves, `tap/internals.py` has to follow, and the range in pyproject.toml with it."""
    from transformers import GenerationMixin, LlamaForCausalLM, masking_utils
    from transformers.models.llama import modeling_llama

    model = model_of("llama")
    for name in internals.FOLLOWED:
        assert callable(getattr(GenerationMixin, name)) and hasattr(type(model), name)
    given = ["self", "input_ids", "generation_config", "model_kwargs"]
    assert list(signature(GenerationMixin._prefill).parameters)[:4] == given
    assert callable(LlamaForCausalLM.get_compiled_call)
    assert internals.attention_name(model.config) == "sdpa"
    model.set_attn_implementation("eager")
    assert internals.attention_name(model.config) == "eager"
    assert internals.eager_attention(model.model.layers[0].self_attn) is modeling_llama.eager_attention_forward
    assert AttentionInterface()["sdpa"] is internals.sdpa_attention()
    assert AttentionMaskInterface()["sdpa"] is masking_utils.sdpa_mask
    assert LlamaForCausalLM._supports_sdpa
