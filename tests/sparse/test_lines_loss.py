"""The loss along lines: own lines are LoopServe's, and each control has as many cells and no line that it can spare."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from lines_kit import drawn_scores
from organisms import tiny_model

from experiments.loopserve.lines_loss import heaviest, main, measured, nearest
from sinkscope.files.store import json_lines
from sinkscope.opening.live import target_of
from sinkscope.sparse.serve import LoopServe

LENGTH = 320


def test_own_lines_are_those_of_loopserve_and_full_attention_is_the_models():
    model, tokenizer = tiny_model("llama")
    rows = torch.randint(4, 90, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    result = measured(target_of(model, tokenizer), rows, 2, [0.3, 0.9])
    for number in range(len(rows)):
        ids = rows[number : number + 1]

        def loss(ids: torch.Tensor = ids) -> float:
            with torch.no_grad():
                return float(model(ids, labels=ids, use_cache=False).loss)

        assert result["full"][number] == pytest.approx(loss(), abs=1e-5)
        for alpha, value in enumerate(result["alphas"]):
            with LoopServe(alpha=value, decode=False, shortest=0).on(model) as run:
                assert result["loss"][alpha, 0, number] == pytest.approx(loss(), abs=1e-5)
            shares = [event.data["attended"] for event in run.events if event.kind == "prefill"]
            assert result["cells"][alpha, 0, number] == pytest.approx(np.mean(shares), abs=1e-6)
    cells = result["cells"]
    assert (cells >= cells[:, :1] - 1e-6).all() and cells.max() < 1.01
    assert (np.diff(result["loss"], axis=1) != 0).any()


@pytest.mark.parametrize("alpha", [0.4, 0.8, 0.99])
def test_controls_have_at_least_as_many_cells_and_no_line_more(alpha):
    scores, served = drawn_scores(4, 500, 500, 0), LoopServe(shortest=0, alpha=alpha)
    own = served.lines(drawn_scores(4, 500, 500, 1, 6.0), 0)
    longest = 16 * 500 / own.grid.cells  # a band of 16 keys
    for choose in (heaviest, nearest):
        chosen = choose({0: own}, served, scores, 0)
        attended = chosen.attended()
        assert (attended >= own.attended()).all() and (attended < own.attended() + longest).all()
        assert chosen.dense_rows == served.dense_rows
        assert chosen.columns[:, : served.begin].all() and chosen.offsets[:, :8].all()
    near = nearest({0: own}, served, scores, 0)
    for lines in (near.columns.int(), near.offsets.int()):
        assert (lines.diff(dim=1) <= 0).all()  # the first ones, without a gap


def test_the_script_writes_the_loss_of_each_kind(tmp_path):
    talk, out = tmp_path / "talk.jsonl", tmp_path / "x.json"
    talk.write_text(json_lines([{"turns": ["one line and another. " * 400]}]))
    main("bundled", out=out, dialogue_files=[talk], count=1, length=256, alphas=[0.5])
    result = json.loads(out.read_text())["result"]
    assert np.shape(result["loss"]) == (1, 3, 4)
