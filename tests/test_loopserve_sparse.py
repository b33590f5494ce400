"""Sparse attention equals dense attention under the same mask, and says what it computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.kv.loopserve import sparse
from sinkscope.kv.loopserve.lines import HeadLines
from sinkscope.kv.loopserve.select import select_lines
from sinkscope.kv.loopserve.sparse import sparse_attention


def inputs(heads: int, kv_heads: int, queries: int, keys: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(heads, queries, 16, generator=generator) * 2
    return query, *(torch.randn(kv_heads, keys, width, generator=generator) for width in (16, 12))


def drawn(heads: int, keys: int, queries: int, vertical: float, slash: float, seed: int = 0) -> HeadLines:
    generator = torch.Generator().manual_seed(seed)
    lines = HeadLines(torch.rand(heads, keys, generator=generator) < vertical,
                      torch.rand(heads, keys, generator=generator) < slash, queries)  # fmt: skip
    lines.slash[:, 0] = True
    return lines


def masked(query: Tensor, key: Tensor, value: Tensor, lines: HeadLines) -> Tensor:
    """The same by a mask that is written cell by cell."""
    heads, queries, _ = query.shape
    keys = key.shape[1]
    at = keys - queries + torch.arange(queries)
    offset = at[:, None] - torch.arange(keys)
    ok = torch.zeros(heads, queries, keys, dtype=torch.bool)
    for head in range(heads):
        ok[head] = torch.isin(offset, lines.slash[head].nonzero()) | lines.vertical[head]
    scores = query.double() @ key.double().repeat_interleave(heads // len(key), 0).mT / 4
    probs = scores.masked_fill(~(ok & (offset >= 0)), -torch.inf).softmax(-1)
    return probs @ value.double().repeat_interleave(heads // len(key), 0)


@settings(max_examples=40, deadline=None)
@given(
    queries=st.integers(1, 70), past=st.integers(0, 50), vertical=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    slash=st.sampled_from([0.0, 0.03, 0.3, 1.0]), blocks=st.sampled_from([(4,), (7,), (16, 32), (128,)]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), seed=st.integers(0, 999),
    lone=st.sampled_from([0, 2, 99]),
)  # fmt: skip
def test_equal_to_dense_attention_under_the_same_mask(
    queries: int, past: int, vertical: float, slash: float, blocks: Any, dtype: Any, seed: int, lone: int
) -> None:
    query, key, value = (t.to(dtype) for t in inputs(4, 2, queries, queries + past, seed))
    lines = drawn(4, queries + past, queries, vertical, slash, seed)
    before, sparse.BLOCKS, sparse.LONE = (sparse.BLOCKS, sparse.LONE), blocks, lone
    try:
        out, what = sparse_attention(query, key, value, lines, dense_above=1e9)
    finally:
        sparse.BLOCKS, sparse.LONE = before
    atol = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), masked(query, key, value, lines), atol=atol, rtol=0)
    assert out.dtype == dtype
    assert what.dense == (False,) * 4
    torch.testing.assert_close(torch.tensor(what.cells), lines.density())
    if lone:
        assert all(done >= cells - 1e-6 for done, cells in zip(what.computed, what.cells, strict=True))


@pytest.mark.parametrize(("queries", "keys"), [(600, 600), (300, 700)])
def test_equal_over_several_blocks_of_the_usual_size(queries: int, keys: int) -> None:
    query, key, value = inputs(2, 1, queries, keys)
    lines = drawn(2, keys, queries, 0.02, 0.0)
    lines.slash[:, :9] = lines.slash[:, 100] = lines.slash[1, 400:420] = True
    lines.slash[0, 170::80] = True  # lone lines, across the vertical ones
    assert sparse.plan_of(lines, 0).lone
    out, what = sparse_attention(query, key, value, lines)
    assert not any(what.dense)
    torch.testing.assert_close(out.double(), masked(query, key, value, lines), atol=1e-5, rtol=0)
    assert max(what.computed) < 0.6


@pytest.mark.parametrize(("queries", "keys"), [(40, 40), (20, 60)])
def test_dense_where_that_is_faster(queries: int, keys: int) -> None:
    """Scattered offsets would be computed nearly all: those heads are dense, the other stays sparse."""
    query, key, value = inputs(2, 1, queries, keys)
    lines = drawn(2, keys, queries, 0.0, 0.0)
    lines.slash[1] = True
    before, sparse.BLOCKS, part, sparse._PART = sparse.BLOCKS, (4,), sparse._PART, 0
    try:
        out, what = sparse_attention(query, key, value, lines)
    finally:
        sparse.BLOCKS, sparse._PART = before, part
    assert what.dense == (False, True) and what.computed[1] == 1.0
    torch.testing.assert_close(out.double(), masked(query, key, value, lines), atol=1e-5, rtol=0)
    lines.slash[1, 1::2] = False  # half of the cells are on lines, and all are computed
    out, what = sparse_attention(query, key, value, lines, dense_above=0.3)
    assert what.dense == (True, True)
    everything = drawn(2, keys, queries, 1.0, 0.0)
    torch.testing.assert_close(out.double(), masked(query, key, value, everything), atol=1e-5, rtol=0)


def test_only_the_parts_that_are_needed_are_computed() -> None:
    """Cells computed, counted in the matrix products themselves, are what is reported (less overheads)."""
    query, key, value = inputs(1, 1, 512, 1024)
    lines = drawn(1, 1024, 512, 0.03, 0.0)
    lines.slash[0, :5] = lines.slash[0, 300] = True
    counted, real = [0], torch.mm

    def mm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        counted[0] += a.shape[0] * b.shape[1]
        return real(a, b, out=out)

    torch.mm = mm  # pyright: ignore
    try:
        _, what = sparse_attention(query, key, value, lines)
    finally:
        torch.mm = real
    every = int(lines.lengths().sum())
    plan = sparse.plan_of(lines, 0)
    overhead = sum(
        min(plan.block, 1024 - s) * sparse._PART * len(plan.parts(s, min(1024, s + plan.block)))
        for s in range(512, 1024, plan.block)
    )
    overhead += sparse.LONE * 512  # line 300 lies apart
    assert counted[0] + overhead == round(what.computed[0] * every)
    assert counted[0] < 0.35 * every
    assert counted[0] + 512 >= int(lines.cells()[0])


def test_with_lines_that_were_selected() -> None:
    """Output under alpha of the attention differs from the whole by little, and not at all at alpha = 1."""
    query, key, value = inputs(4, 2, 200, 260)
    full = drawn(4, 260, 200, 1.0, 1.0)
    whole = masked(query, key, value, full)
    errors = []
    for alpha in (0.8, 0.95, 1.0):
        out, what = sparse_attention(query, key, value, select_lines(query, key, alpha), dense_above=1e9 if alpha < 1 else 0.6)  # fmt: skip  # noqa: E501
        errors.append(float((out - whole).norm() / whole.norm()))
        assert all(what.dense) == (alpha == 1)
    assert errors[0] > errors[1] > 10 * errors[2] and errors[2] < 1e-5


def test_lines_that_do_not_fit() -> None:
    query, key, value = inputs(2, 1, 10, 20)
    for lines in (drawn(2, 19, 10, 0.1, 0.1), drawn(2, 20, 9, 0.1, 0.1), drawn(1, 20, 10, 0.1, 0.1)):
        with pytest.raises(SinkscopeError, match="expected lines of this shape"):
            sparse_attention(query, key, value, lines)
    lines = drawn(2, 20, 10, 0.1, 0.1)
    lines.slash[1, 0] = False
    with pytest.raises(SinkscopeError, match="main diagonal"):
        sparse_attention(query, key, value, lines)
