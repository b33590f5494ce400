"""One tap: measurements, policies and guards on one model at a time, in any order, and nobody else's attention."""

from __future__ import annotations

import torch
from kv_kit import decode, prompts
from kv_kit import shallow_of as model_of

from sinkscope.engine import attention
from sinkscope.engine.tap import attention_rows
from sinkscope.kv import H2O, StreamingLLM
from sinkscope.opening.load import target_of
from sinkscope.opening.parts import structure_of

PROMPT, LENGTHS, STEPS = 20, [20, 13], 5


def test_only_the_model_that_is_tapped_is_seen():
    """Another model under a policy calls the same functions of transformers."""
    one, other = model_of("llama"), model_of("qwen3")
    given, shown = (*prompts([9], 2), 9), list[int]()
    want = decode(one, *given)
    with H2O(budget=5).on(one), attention_rows(target_of(other), lambda rows: shown.append(rows.layer)):
        assert not torch.allclose(decode(one, *given), want)
        assert not shown
        decode(other, *given)
        assert shown == 3 * [*range(target_of(other).n_layers)]
    twin = type(one)(one.config).eval()  # other weights, and the same configuration object
    want = decode(twin, *given)
    with H2O(budget=5).on(one):
        assert torch.equal(decode(twin, *given), want)


def test_exits_in_any_order_restore_the_models_attention():
    model = model_of("llama")
    target = target_of(model)
    first, second = (attention_rows(target, lambda *_: None) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert model.config._attn_implementation == attention.NAME and attention.stock_of(model.config).kind == "sdpa"
    second.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa" and attention.STOCK == {}


def test_a_block_replaces_nothing_that_a_model_is_made_of():
    """Else it would be proved again, on the model that another thread runs."""
    model = model_of("llama")
    before = structure_of(model)
    with StreamingLLM(budget=6).on(model):
        assert structure_of(model) == before
