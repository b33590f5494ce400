"""Recomputed attention rows against the model's own, and a model left as it was."""

from __future__ import annotations

import copy
from contextlib import suppress

import pytest
import torch
from covering import every_nth
from organisms.tiny import MODEL_TYPES, tiny_model
from torch.testing import assert_close

from sinkscope.errors import SinkscopeWarning, UnsupportedError
from sinkscope.opening.live import target_of
from sinkscope.tap.observers import attention_rows
from sinkscope.tap.rows import attention_probs


def _reference(model, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    eager = copy.deepcopy(model)
    for module in eager.modules():  # Falcon refuses set_attn_implementation but reads its config
        if hasattr(module, "config"):
            module.config._attn_implementation = "eager"
    return eager(ids, attention_mask=mask, output_attentions=True).attentions


@pytest.mark.parametrize("model_type", every_nth(MODEL_TYPES, 6, 2))
def test_rows_equal_the_models_own_on_a_left_padded_batch(model_type):
    model, tokenizer = tiny_model(model_type)
    ids = torch.randint(3, 90, (2, 37), generator=torch.Generator().manual_seed(1))  # longer than the windows of 16
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    target = target_of(model, tokenizer)
    before = model.config._attn_implementation
    plain = target.forward(ids, mask).last_hidden_state
    seen = []
    with attention_rows(target, lambda *chunk: seen.append(chunk), layers=[0, 2], rows_per_chunk=7):
        target.forward(ids, mask)
    assert [chunk[:2] for chunk in seen] == [(layer, first) for layer in (0, 2) for first in range(0, 37, 7)]
    for layer, own in zip((0, 2), _reference(model, ids, mask)[::2], strict=True):
        rows = torch.cat([chunk for of, _, chunk in seen if of == layer], 2)
        assert_close(rows[:, :, 5:], own[:, :, 5:], atol=2e-6, rtol=0)
        assert (rows[0, :, 5:, :5] == 0).all()  # padding is never attended to
    assert model.config._attn_implementation == before
    assert_close(target.forward(ids, mask).last_hidden_state, plain, atol=0, rtol=0)


def test_a_soft_cap_that_sdpa_drops_is_said():
    model, _ = tiny_model("gemma2", attn_logit_softcapping=0.3)
    model.config._attn_implementation = "sdpa"
    with pytest.warns(SinkscopeWarning, match="soft cap of 0.3"), suppress(UnsupportedError):
        target_of(model)  # some versions of transformers drop the cap in silence, others refuse to run


def test_rows_are_float32_where_a_model_runs_in_mixed_precision():
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 1, 2, 9, 16, generator=generator).bfloat16()
    expected = (query.double() @ key.double().mT).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        rows = attention_probs(query, key, None, scaling=1.0, first_query=0)
    assert rows.dtype == torch.float32
    assert_close(rows, expected.float(), atol=1e-6, rtol=1e-5)
