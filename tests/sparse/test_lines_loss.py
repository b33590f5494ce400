"""The loss along lines: each control has as many cells as own lines, and no line that it can spare."""

from __future__ import annotations

import pytest
from lines_kit import drawn_scores

from experiments.papers.loopserve.lines_loss import heaviest, nearest
from sinkscope.sparse.serve import LoopServe


@pytest.mark.parametrize("alpha", [0.4, 0.8, 0.99])
def test_controls_have_at_least_as_many_cells_and_no_line_more(alpha):
    scores, served = drawn_scores(4, 500, 500, 0), LoopServe(shortest=0, alpha=alpha)
    own = served.lines(drawn_scores(4, 500, 500, 1, 6.0), 0)
    more = 16 * 500 / own.grid.cells  # a band of 16 keys
    heavy, near = (choose({0: own}, served, scores, 0) for choose in (heaviest, nearest))
    for chosen in (heavy, near):
        extra = chosen.attended() - own.attended()
        assert (extra >= 0).all() and (extra < more).all() and chosen.dense_rows == served.dense_rows
        assert chosen.columns[:, : served.begin].all() and chosen.offsets[:, :8].all()
    for lines in (near.columns.int(), near.offsets.int()):
        assert (lines.diff(dim=1) <= 0).all()  # the first ones, without a gap
