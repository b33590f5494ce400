"""The choice of columns and bands: cells counted once, sums beside plain masks, the threshold, planted lines."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lines_kit import dense, drawn_scores
from torch import Tensor
from torch.testing import assert_close

from sinkscope.sparse import choice, recovered
from sinkscope.sparse.attention import Scores, sample_queries
from sinkscope.sparse.bands import BAND, NEAR, PER, TILE, BlockGrid, Lines
from sinkscope.sparse.choice import StoredRows, select_bands

LENGTHS = st.tuples(st.integers(1, 300), st.integers(0, 200))


def random_bands(heads: int, queries: int, keys: int, seed: int, dense_rows: int = 0) -> Lines:
    """A tenth of the columns, a fifth of the bands; head 1 is dense."""
    grid, generator = BlockGrid(queries, keys), torch.Generator().manual_seed(seed)
    bands = torch.rand(heads, grid.blocks, generator=generator) < 0.2
    bands[:, :NEAR] = True
    bands[1:2] = True
    columns = torch.rand(heads, keys, generator=generator) < 0.1
    return Lines(columns, bands, grid, dense_rows)


def seen(chosen: Lines) -> Tensor:
    """The cells `[head query key]`, from the definition: tiles of 64 queries, bands of 16 keys that end with them."""
    queries, keys = chosen.grid.queries, chosen.grid.keys
    key, query = torch.arange(keys), torch.arange(queries)[:, None]
    stop = (query // TILE + 1) * TILE  # one past the last query of the tile, which may not exist
    band = (keys - queries + stop - 1 - key) // BAND
    cells = chosen.offsets[:, band.clamp(min=0)] | chosen.columns[:, None]
    if chosen.dense_rows:
        cells |= stop > queries - chosen.dense_rows
    return cells & (key <= keys - queries + query)


@given(
    lengths=LENGTHS,
    alpha=st.floats(0.05, 0.999) | st.just(1.0),
    sharp=st.sampled_from([0.0, 1.0, 4.0]),
    begin=st.sampled_from([0, 4]),
    seed=st.integers(0, 99),
)
@settings(max_examples=12)
def test_a_choice_holds_alpha_of_the_sample(lengths, alpha, sharp, begin, seed):
    queries, past = lengths
    scores = drawn_scores(4, queries, queries + past, seed, sharp)
    chosen = select_bands(scores, alpha, sample=20, seed=seed, begin=begin)
    rows = sample_queries(queries, 20, seed)
    assert len(set(rows.tolist())) == min(20, queries)
    held = (dense(scores) * chosen.rows(past + torch.arange(queries))).sum(2)
    assert (held[:, rows].mean(1) >= alpha - 1e-4).all()
    assert_close(recovered(scores, chosen).double(), held.mean(1), atol=1e-5, rtol=0)
    assert chosen.offsets[:, :NEAR].all() and (alpha == 1 or chosen.columns[:, :begin].all())


@pytest.mark.parametrize("thresholds", [32, 512])  # as on a GPU, in two rounds, and as on a CPU, in one
def test_the_threshold_is_the_highest_to_four_percent(thresholds, monkeypatch):
    monkeypatch.setattr(StoredRows, "thresholds", thresholds)
    scores = drawn_scores(4, 400, 400, 3, 1.0)
    sample = StoredRows(scores, torch.arange(0, 400, 7))
    grid = BlockGrid(400, 400)
    columns, bands = torch.rand(4, 400) ** 9 * 0.1, torch.rand(4, grid.blocks) ** 9 * 0.1
    for alpha in (0.2, 0.6, 0.9):
        least, reached = choice._threshold(sample, columns, bands, alpha)
        limits = torch.cat([least, least * 1.043], 1)
        held = sample.held(columns, bands, limits) / sample.rows
        assert reached.all() and (held[:, 0] >= alpha).all() and (held[:, 1] < alpha).all()


def test_planted_lines_are_found_and_little_else():
    """Head 0 attends to two marked keys, head 1 to the key 200 positions before, in two bands; head 2 to everything."""
    n, marked, turns = 2000, [0, 700], 0.7 ** torch.arange(8)
    here, before = torch.arange(n)[:, None] * turns, (torch.arange(n)[:, None] - 200) * turns
    query, key = torch.zeros(3, n, 17), torch.zeros(3, n, 17)
    key[0, marked, 16], query[0, :, 16] = 1.0, 30.0
    key[1, :, :16], query[1, :, :16] = (torch.cat([angle.cos(), angle.sin()], 1) for angle in (here, before))
    query[1] *= 8
    chosen = select_bands(Scores(query, key, 1.0), 0.9, begin=0)
    assert chosen.columns[0].nonzero().flatten().tolist() == marked and not chosen.offsets[0, NEAR:].any()
    wanted = {*range(200 // BAND, (200 + TILE) // BAND + 2)}  # bands that offset 200 crosses
    found = {*chosen.offsets[1].nonzero().flatten().tolist()} - {*range(200 // BAND)}
    assert found <= wanted and len(found) >= PER
    shares = chosen.attended()
    assert shares[2] > 0.8 and (shares[:2] < 0.2).all()


def test_heads_above_the_limit_are_dense_and_others_are_not():
    scores = drawn_scores(4, 600, 600, 1, 0.0)
    scores.query[2:] = drawn_scores(4, 600, 600, 2, 12.0).query[2:]
    shares = select_bands(scores, 0.8).attended()
    limit = float(shares.sort().values[1:3].mean())
    limited = select_bands(scores, 0.8, dense_above=limit)
    assert torch.equal(limited.dense, shares > limit)
    assert torch.equal(limited.attended(), torch.where(shares > limit, 1.0, shares))
