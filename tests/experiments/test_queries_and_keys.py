"""Queries and keys against what rotary must leave alone, and against the model's own attention rows."""

from __future__ import annotations

import pytest
import torch
from covering import every_nth
from organisms import MODEL_TYPES, tiny_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from experiments.queries_and_keys import queries_and_keys
from sinkscope.hooks.trace import attention_rows, trace
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of

LAYERS = [0, 2]
IDS = torch.randint(4, 90, (2, 9), generator=torch.Generator().manual_seed(1))


def _target(model_type: str) -> Target:
    return target_of(*tiny_model(model_type))


def _collect(target: Target, ids: Tensor) -> dict[tuple[int, bool], tuple[Tensor, Tensor]]:
    seen = {}

    def keep(layer: int, rotated: bool, query: Tensor, key: Tensor):
        seen[layer, rotated] = (query.clone(), key.repeat_interleave(query.shape[1] // key.shape[1], 1))

    with queries_and_keys(target, keep, LAYERS):
        target.forward(ids)
    return seen


@pytest.mark.parametrize("model_type", every_nth([m for m in MODEL_TYPES if m != "falcon"], 4))
def test_rotary_keeps_lengths_and_what_stands_at_one_position(model_type):
    target, ids = _target(model_type), IDS
    whole = target.forward(ids).last_hidden_state
    seen = _collect(target, ids)
    assert set(seen) == {(layer, rotated) for layer in LAYERS for rotated in (False, True)}
    for layer in LAYERS:
        (q, k), (rq, rk) = seen[layer, False], seen[layer, True]
        assert q.shape[:3] == (2, target.n_heads, 9)
        assert_close((q * k).sum(-1), (rq * rk).sum(-1), rtol=1e-4, atol=1e-4)
        assert_close(q.norm(dim=-1), rq.norm(dim=-1), rtol=1e-4, atol=1e-4)
        moved = not torch.allclose(q[:, :, 1:], rq[:, :, 1:], atol=1e-3)
        assert moved == (model_type not in ("gpt2", "opt"))  # the others turn every position but the first
        assert_close(q[:, :, 0], rq[:, :, 0], rtol=1e-5, atol=1e-5)
    assert_close(target.forward(ids).last_hidden_state, whole)  # nothing stays behind


def test_before_rotary_is_the_projection_and_after_it_gives_the_attention_rows():
    target, ids = _target("llama"), IDS
    seen = _collect(target, ids)
    rows = []
    with attention_rows(target, lambda _l, _f, probs: rows.append(probs), layers=[2]):
        target.forward(ids)
    query, key = seen[2, True]
    expected = scaled_dot_product_attention(query, key, torch.eye(9).expand(*query.shape[:2], 9, 9), is_causal=True)
    assert_close(rows[0], expected, rtol=1e-4, atol=1e-5)
    projected = trace(target, ids, ["blocks.2.attn.hook_q"])["blocks.2.attn.hook_q"]
    assert_close(seen[2, False][0], projected.transpose(1, 2), rtol=1e-4, atol=1e-5)
