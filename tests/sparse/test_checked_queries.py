"""Queries that are checked for a single key, and queries held out that say what lines hold: controls of the choice."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sinkscope.errors import SinkscopeWarning
from sinkscope.sparse.attention import Scores, attention_of, sample_queries
from sinkscope.sparse.bands import BlockGrid
from sinkscope.sparse.choice import kept_columns, select_bands
from sinkscope.sparse.serve import HELD_OUT, LoopServe
from sinkscope.sparse.sparse import recovered

SOUGHT_BY, SOUGHT_KEY = 150, 37


def single_key() -> Scores:
    """Queries that all attend to the sink, token 0, but one that seeks key 37."""
    query, key = torch.zeros(1, 200, 8), torch.zeros(1, 200, 8)
    query[:, :, 0], key[:, 0, 0] = 12.0, 12.0
    query[:, SOUGHT_BY, 0], query[:, SOUGHT_BY, 1], key[:, SOUGHT_KEY, 1] = -12.0, 12.0, 12.0
    return Scores(query, key, 0.1)


@pytest.mark.parametrize(("checked", "columns"), [(0, [0]), (1, [0, SOUGHT_KEY])])
def test_a_query_that_scores_the_sink_lowest_keeps_the_key_that_it_seeks(checked, columns):
    kept = kept_columns(single_key(), 200, begin=1, checked=checked)
    assert kept[0].nonzero().flatten().tolist() == columns


def test_checked_queries_lose_nothing_that_the_others_do_not_see():
    """Without the check the share of the sum over all queries is held, and this query has lost its key."""
    scores, row = single_key(), torch.tensor([SOUGHT_BY])
    options = {"alpha": 0.9, "sample": 16, "seed": 3, "begin": 1}
    assert SOUGHT_BY not in sample_queries(200, 16, 3).tolist()
    held = [recovered(scores, select_bands(scores, **options, checked=checked), row).item() for checked in (0, 1)]
    assert held[0] < 0.1 and held[1] > 0.9


def test_queries_that_measure_are_none_of_those_that_chose():
    serve = LoopServe(sample=20, dense_rows=8, seed=5)
    scores = Scores(torch.randn(2, 300, 8), torch.randn(1, 300, 8), 0.3)
    sample = sample_queries(BlockGrid(300, 300).sparse_queries(8), 20, serve.seed_of(scores, 0))
    measured = serve.held_out(scores, 0).tolist()
    assert len(measured) == HELD_OUT and not {*measured} & {*sample.tolist()}
    assert serve.held_out(scores, 1).tolist() == [], "one layer of eight is measured"


def test_the_share_that_is_recovered_is_that_of_the_queries_held_out():
    serve = LoopServe(alpha=0.6, sample=20, dense_rows=8, shortest=0, dense_above=9.0)
    scores = Scores(torch.randn(2, 300, 8) * 3, torch.randn(1, 300, 8), 0.3)
    _, data = serve.read(scores, torch.randn(1, 300, 8), 0)
    rows = serve.held_out(scores, 0)
    on_lines = attention_of(scores, rows) * serve.lines(scores, 0).rows(rows)
    torch.testing.assert_close(torch.tensor(data()["recovered"]), on_lines.sum((1, 2)) / len(rows), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ([0.9, 0.9, 0.99, 0.99], "in 2 of 4 heads that were measured"),
        ([0.9, 0.99, 0.99, 0.99], ""),  # a quarter may be low
        ([0.99, 0.99, 0.99, 0.99], ""),
    ],
)
def test_lines_that_hold_less_of_other_queries_are_warned_of(shares, says):
    measured, others, later = {"recovered": shares[:2]}, {}, {"recovered": shares[2:]}
    run: Any = SimpleNamespace(events=[SimpleNamespace(data=data) for data in (measured, others, later)])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", SinkscopeWarning)
        LoopServe(alpha=0.99)._warn(run)
    assert [says in str(one.message) for one in told] == [True] * bool(says)
