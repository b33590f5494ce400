"""Streamed sums of lines against the matrix written out, and against models' own attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lines_kit import dense, offsets
from organisms import tiny_model
from refusals import refused
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sinkscope.lines import sums
from sinkscope.lines.attention import Scores
from sinkscope.lines.head_lines import HeadLines
from sinkscope.lines.sums import crossings, line_sums, scores_of
from sinkscope.opening.live import target_of


def _summed(weights: Tensor, since: int = 0) -> tuple[Tensor, Tensor]:
    _, queries, keys = weights.shape
    kept = weights * (torch.arange(keys) >= since)
    slash = [(kept * (offsets(queries, keys) == offset)).sum((1, 2)) for offset in range(keys)]
    return kept.sum(1), torch.stack(slash, 1)


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


@pytest.fixture(scope="module", autouse=True)
def _small_chunks():
    """Sixteen queries at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "CHUNK_BYTES", 0)
        yield


@given(_cases(), st.integers(0, 42))
@settings(max_examples=40)
def test_sums_equal_the_matrix(scores, since):
    vertical, slash = line_sums(scores, since=since).unbind(1)
    plain_vertical, plain_slash = _summed(dense(scores), since)
    assert_close(vertical.double(), plain_vertical, atol=2e-5, rtol=1e-4)
    assert_close(slash.double(), plain_slash, atol=2e-5, rtol=1e-4)
    assert_close(vertical.sum(1), slash.sum(1), atol=1e-4, rtol=1e-4)
    if scores.sinks is None and since == 0:
        assert_close(vertical.sum(1), torch.full((len(vertical),), float(scores.query.shape[1])), atol=1e-3, rtol=0)


@given(_cases(), st.floats(0, 1), st.integers(0, 1 << 30))
@settings(max_examples=40)
def test_crossings_are_counted_cell_by_cell(scores, share, seed):
    heads = scores.query.shape[0]
    keys = scores.key.shape[1]
    g = torch.Generator().manual_seed(seed)
    vertical, slash = (torch.rand(2, heads, keys, generator=g) < share for _ in range(2))
    back = offsets(scores.query.shape[1], keys)
    crossed = vertical[:, :, None] & slash[:, :, back.clamp(min=0)]
    expected = (dense(scores) * crossed).sum((2, 3))
    assert_close(
        crossings(scores, HeadLines.of(vertical, slash, scores.queries)).double(), expected, atol=2e-5, rtol=1e-4
    )


def test_nothing_of_query_times_key_is_kept():
    n = 1024
    heads = 2
    chunk = 16
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max([largest, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
            return out

    scores = Scores(torch.randn(heads, n, 8), torch.randn(1, n, 8), 0.4)
    chosen = torch.rand(2, heads, n) < 0.1
    with Sizes():
        line_sums(scores)
        crossings(scores, HeadLines.of(chosen, chosen, n))
    assert chunk * heads * n <= largest <= chunk * heads * (n + chunk) < n * n / 20


def test_refused_where_lines_cannot_be_had():
    falcon, tokenizer = tiny_model("falcon")
    with refused("falcon"), scores_of(target_of(falcon, tokenizer), print, [0]):
        pass
    model, tokenizer = tiny_model("llama")
    target = target_of(model, tokenizer)
    ids = torch.randint(4, 90, (1, 12))
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[0, :3] = 0
    with scores_of(target, lambda *_: None, [0]), refused("neither"):
        target.forward(ids, mask)
    assert model.config._attn_implementation == "sdpa"
