"""Attention on columns and bands, or on lines, equals dense attention under the same mask."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lines_kit import dense, drawn, on_lines, per_head
from refusals import refused
from test_bands import random_bands, seen
from torch import Tensor
from torch.testing import assert_close

from sinkscope.sparse.attention import Scores
from sinkscope.sparse.bands import Lines
from sinkscope.sparse.choice import select_bands
from sinkscope.sparse.sparse import line_attention


def inputs(
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    width: int = 16,
) -> tuple[Scores, Tensor]:
    """Queries and keys, and values, which are narrower, all as a model gives them, not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((queries, heads, width), (keys, kv_heads, width), (keys, kv_heads, 3 * width // 4))
    query, key, value = (torch.randn(size, generator=generator).to(dtype).transpose(0, 1) for size in sizes)
    return Scores(2 * query, key, width**-0.5), value


@given(
    queries=st.integers(1, 200),
    past=st.integers(0, 150),
    dense_rows=st.sampled_from([0, 1, 16, 70]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_on_bands_it_equals_attention_under_the_mask(queries, past, dense_rows, dtype, seed):
    """The mask is that of the definition, of which each cell counts once."""
    scores, value = inputs(4, 2, queries, queries + past, seed, dtype)
    bands = random_bands(4, queries, queries + past, seed, dense_rows)
    cells, without = seen(bands), replace(bands, dense_rows=0)
    assert torch.equal(bands.rows(past + torch.arange(queries)), cells)
    assert_close(bands.attended(), cells.sum((1, 2)) / bands.grid.cells)
    assert torch.equal(without.cells(), seen(without).sum((1, 2)))
    out = line_attention(scores, value, bands)
    wanted = dense(scores, cells) @ per_head(value, 4)
    assert_close(out.double(), wanted, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0)
    assert out.dtype == dtype


@given(
    queries=st.integers(1, 70),
    past=st.integers(0, 50),
    vertical=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    slash=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    dense_rows=st.sampled_from([0, 3, 100]),
    seed=st.integers(0, 999),
)
def test_on_lines_it_equals_attention_under_the_mask(queries, past, vertical, slash, dense_rows, seed):
    scores, value = inputs(4, 2, queries, queries + past, seed)
    lines = replace(drawn(4, queries + past, queries, vertical, slash, seed), dense_rows=dense_rows)
    at = past + torch.arange(queries)
    cells = on_lines(lines)
    cells[:, max(0, queries - dense_rows) :] = True
    cells &= at[:, None] >= torch.arange(queries + past)
    assert torch.equal(lines.rows(at), cells)
    out = line_attention(scores, value, lines)
    assert_close(out.double(), dense(scores, cells) @ per_head(value, 4), atol=1e-5, rtol=0)
    assert_close(lines.attended(), cells.sum((1, 2)) / cells.new_ones(queries, queries + past).tril(past).sum())


def test_heads_in_threads_are_the_same_and_leave_no_trace():
    scores, value = inputs(4, 2, 300, 300)
    bands = random_bands(4, 300, 300, 0)
    one = line_attention(scores, value, bands)
    torch.set_num_threads(3)
    try:
        with torch.inference_mode():
            three = line_attention(scores, value, bands)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    assert_close(three.clone(), one, atol=1e-6, rtol=0)


def chosen(kind: str, heads: int, keys: int) -> Lines:
    return drawn(heads, keys, 6, 0.1, 0.1) if kind == "lines" else random_bands(heads, 6, keys, 0)


@pytest.mark.parametrize("kind", ["lines", "bands"])
def test_what_lines_do_not_fit_is_refused(kind):
    scores, value = inputs(4, 2, 6, 6)
    for kv, values, heads, keys in ((3, 6, 4, 6), (2, 5, 4, 6), (2, 6, 3, 6), (2, 6, 4, 7)):
        with refused("expected the same positions"):
            line_attention(scores, torch.rand(kv, values, 12), chosen(kind, heads, keys))
    without = chosen(kind, 4, 6)
    without.offsets[-1, :1] = False
    with refused("main diagonal"):
        line_attention(scores, value, without)
    for beyond in ({"window": 4}, {"softcap": 1.0}, {"sinks": torch.zeros(4)}):
        more = replace(scores, **beyond)
        for use in (partial(select_bands, more, 0.9), partial(line_attention, more, value, chosen(kind, 4, 6))):
            with refused("which lines do not have"):
                use()
    scores.query.requires_grad_()
    with refused(r"under torch\.no_grad"):
        line_attention(scores, value, chosen(kind, 4, 6))
