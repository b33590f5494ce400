"""Sparse attention equals dense attention under the same mask, and says what it computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lines_kit import along, drawn
from refusals import refused
from torch import Tensor
from torch.testing import assert_close

from sinkscope.lines import sparse
from sinkscope.lines.attention import Scores
from sinkscope.lines.choice import select_lines
from sinkscope.lines.sparse import sparse_attention


def inputs(
    heads: int, kv_heads: int, queries: int, keys: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Scores, Tensor]:
    """Queries and keys, and values, which are narrower."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(heads, queries, 16, generator=generator) * 2
    key, value = (torch.randn(kv_heads, keys, width, generator=generator).to(dtype) for width in (16, 12))
    return Scores(query.to(dtype), key, 0.25), value


@given(
    queries=st.integers(1, 70),
    past=st.integers(0, 50),
    vertical=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    slash=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    local=st.sampled_from([1, 6, 40]),
    block=st.sampled_from([4, 7, 32, 256]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 999),
    cost=st.sampled_from([0.0, 1.5, 99.0]),
)
def test_equal_to_dense_attention_under_the_same_mask(queries, past, vertical, slash, local, block, dtype, seed, cost):
    scores, value = inputs(4, 2, queries, queries + past, seed, dtype)
    lines = drawn(4, queries + past, queries, vertical, slash, seed)
    lines.slash[:2, :local] = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "BLOCK", block)
        patch.setattr(sparse, "LONE_COST", cost)
        out, what = sparse_attention(scores, value, lines, dense_above=1e9)
    atol = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert_close(out.double(), along(scores, value, lines), atol=atol, rtol=0)
    assert out.dtype == dtype
    assert what.dense == (False,) * 4
    assert_close(torch.tensor(what.cells), lines.density())
    if cost >= 1:
        assert all(done >= cells - 1e-6 for done, cells in zip(what.computed, what.cells, strict=True))


@pytest.mark.parametrize(("queries", "keys"), [(40, 40), (20, 60)])
def test_dense_where_that_is_faster(queries, keys):
    """Nearly all cells of one head are on lines: it is dense, the other stays sparse."""
    scores, value = inputs(2, 1, queries, keys)
    lines = drawn(2, keys, queries, 0.0, 0.0)
    lines.slash[1] = True
    out, what = sparse_attention(scores, value, lines)
    assert what.dense == (False, True) and what.computed[1] == 1.0
    assert_close(out.double(), along(scores, value, lines), atol=1e-5, rtol=0)
    lines.slash[1, 1::2] = False  # half of the cells are on lines
    out, what = sparse_attention(scores, value, lines, dense_above=0.02)
    assert what.dense == (True, True)
    everything = drawn(2, keys, queries, 1.0, 0.0)
    assert_close(out.double(), along(scores, value, everything), atol=1e-5, rtol=0)


def test_gradients_are_refused_where_they_would_be_lost():
    scores, value = inputs(2, 1, 300, 300)
    scores.query.requires_grad_()
    lines = select_lines(scores, 0.5)
    with refused(r"under torch\.no_grad"):
        sparse_attention(scores, value, lines, dense_above=9.0)


def test_heads_in_threads_are_the_same_and_leave_no_trace():
    scores, value = inputs(4, 2, 300, 300)
    lines = drawn(4, 300, 300, 0.02, 0.03)
    one, _ = sparse_attention(scores, value, lines, dense_above=1.0)
    torch.set_num_threads(3)
    try:
        with torch.inference_mode():
            three, what = sparse_attention(scores, value, lines, dense_above=1.0)
        threads = torch.get_num_threads()
    finally:
        torch.set_num_threads(1)
    assert threads == 3 and not any(what.dense)
    assert_close(three.clone(), one, atol=1e-6, rtol=0)


FITTING = {"kv": 2, "keys": 6, "width": 16, "values": 6, "heads": 4, "line": 6, "queries": 6}


@pytest.mark.parametrize(
    "changed",
    [
        {"kv": 3},
        {"keys": 0, "values": 0, "line": 0},
        {"width": 8},
        {"heads": 1},
        {},
    ],
)
def test_what_does_not_fit_is_refused(changed):
    """Keys, values or lines; or lines that fit, of which one head lacks the main diagonal."""
    sizes = FITTING | changed
    lines = drawn(sizes["heads"], sizes["line"], sizes["queries"], 0.1, 0.1)
    lines.slash[-1, :1] = False
    scores = Scores(torch.rand(4, 6, 16), torch.rand(sizes["kv"], sizes["keys"], 16), 0.25)
    object.__setattr__(scores, "key", scores.key[..., : sizes["width"]])  # without the check of types
    value = torch.rand(sizes["kv"], sizes["values"], 16)
    call = getattr(sparse_attention, "__wrapped__", sparse_attention)  # without the check of types
    words = "expected the same positions" if changed else "main diagonal"
    with refused(words):
        call(scores, value, lines)
