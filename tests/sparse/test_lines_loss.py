"""The loss along lines: own lines are LoopServe's, and each control has as many cells and no line that it can spare."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lines_kit import drawn_scores
from organisms import tiny_model

from experiments.loopserve.lines_loss import heaviest, loss_of, measured, nearest
from sinkscope.opening.live import target_of
from sinkscope.sparse.serve import LoopServe


def test_own_lines_are_those_of_loopserve_and_full_attention_is_the_models():
    target = target_of(*tiny_model("llama"))
    rows = torch.randint(4, 90, (4, 320), generator=torch.Generator().manual_seed(0))
    result = measured(target, rows, 2, [0.3, 0.9])
    for number, ids in enumerate(rows):
        with torch.no_grad():
            plain = target.hf(ids[None], labels=ids[None], use_cache=False).loss
        assert result["full"][number] == pytest.approx(float(plain), abs=1e-5)
        for alpha, value in enumerate(result["alphas"]):
            with LoopServe(alpha=value, decode=False, shortest=0).on(target) as run:
                assert result["loss"][alpha, 0, number] == pytest.approx(loss_of(target, ids), abs=1e-5)
            shares = [event.data["attended"] for event in run.events if event.kind == "prefill"]
            assert result["cells"][alpha, 0, number] == pytest.approx(np.mean(shares), abs=1e-6)
    cells = result["cells"]
    assert (cells >= cells[:, :1] - 1e-6).all() and cells.max() < 1.01
    assert (np.diff(result["loss"], axis=1) != 0).any()


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
