"""Recomputed attention rows against the model's own, and a model left as it was."""

from __future__ import annotations

from contextlib import nullcontext, suppress

import pytest
import torch
from organisms.tiny import tiny_model
from torch.testing import assert_close

from sinkscope.engine.attention import attention_probs
from sinkscope.errors import SinkscopeWarning, UnsupportedError
from sinkscope.opening.live import target_of


def test_a_soft_cap_that_sdpa_drops_is_said():
    model, _ = tiny_model("gemma2", attn_logit_softcapping=0.3)
    model.config._attn_implementation = "sdpa"
    try:  # some versions of transformers drop the cap in silence, others refuse to run
        model(torch.arange(3, 9)[None])
    except Exception:
        refused = suppress(UnsupportedError)
    else:
        refused = nullcontext()
    with pytest.warns(SinkscopeWarning, match="soft cap of 0.3"), refused:
        target_of(model)


def test_rows_are_float32_where_a_model_runs_in_mixed_precision():
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 1, 2, 9, 16, generator=generator).bfloat16()
    seen = torch.ones(1, 1, 9, 9).tril().bool()
    expected = (query.double() @ key.double().mT).masked_fill(~seen, -torch.inf).softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        rows = attention_probs(query, key, seen, scaling=1.0)
    assert rows.dtype == torch.float32
    assert_close(rows, expected.float(), atol=1e-6, rtol=1e-5)
