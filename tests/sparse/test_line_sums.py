"""Streamed sums of lines against the matrix written out, and against models' own attention."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lines_kit import dense, offsets
from organisms import tiny_model
from refusals import refused
from torch import Tensor
from torch.testing import assert_close

from sinkscope.hooks.edit.knockout import Knockout
from sinkscope.sparse.attention import Scores, line_sums
from sinkscope.sparse.lines import lines


def _summed(weights: Tensor, since: int = 0) -> Tensor:
    _, queries, keys = weights.shape
    kept = weights * (torch.arange(keys) >= since)
    slash = [(kept * (offsets(queries, keys) == offset)).sum((1, 2)) for offset in range(keys - since)]
    return torch.stack([kept.sum(1)[:, since:], torch.stack(slash, 1)], 1)


@st.composite
def _cases(draw: st.DrawFn) -> Scores:
    kv = draw(st.integers(1, 2))
    groups = draw(st.integers(1, 3))
    keys = draw(st.integers(1, 40))
    queries = draw(st.integers(1, keys))
    g = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    sinks = torch.randn(kv * groups, generator=g) if draw(st.booleans()) else None
    return Scores(
        3 * torch.randn(kv * groups, queries, 8, generator=g),
        torch.randn(kv, keys, 8, generator=g),
        0.4,
        draw(st.none() | st.integers(1, keys)),
        draw(st.none() | st.just(2.0)),
        sinks,
    )


@given(_cases(), st.floats(0, 1))
@settings(max_examples=40)
def test_sums_equal_the_matrix(scores, part):
    since = int(part * scores.past)
    sums = line_sums(scores, since=since)
    assert_close(sums.double(), _summed(dense(scores), since), atol=2e-5, rtol=1e-4)
    assert_close(sums[:, 0].sum(1), sums[:, 1].sum(1), atol=1e-4, rtol=1e-4)


def test_a_mask_that_is_neither_causal_nor_a_window_is_refused():
    model, tokenizer = tiny_model("llama")
    with refused("neither"):
        lines(model, [list(range(4, 30))], tokenizer=tokenizer, interventions=Knockout([3]))
    assert model.config._attn_implementation == "sdpa"
