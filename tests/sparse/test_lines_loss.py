"""The loss along lines: own lines are LoopServe's, and each control has as many cells and no line that it can spare."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from lines_kit import drawn_scores
from organisms import tiny_model
from refusals import refused
from torch import Tensor

from experiments.loopserve.lines_loss import bands_of_cells, main, measured, near_bands, partner
from sinkscope.files.store import json_lines
from sinkscope.measure import Setup
from sinkscope.models.inputs import read_row
from sinkscope.sparse.bands import BlockGrid, Copies, Lines
from sinkscope.sparse.serve import LoopServe

LENGTH = 320


def ids_of(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(4, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_own_lines_are_those_of_loopserve_and_full_attention_is_the_models():
    model, tokenizer = tiny_model("llama")
    texts = [ids_of(number) for number in range(3)]
    setup = Setup.open(model, tokenizer=tokenizer)
    rows = torch.tensor([read_row(setup.target, text, special=False) for text in texts])
    result = measured(setup.target, rows, ("", "", ""), [0.3, 0.9])
    assert result["counted"] == LENGTH - 1
    for number in range(len(texts)):
        ids = rows[number : number + 1]

        def loss(ids: Tensor = ids) -> float:
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


@pytest.mark.parametrize("wanted", [0.6, 0.8, 1.0])
def test_controls_have_at_least_as_many_cells_and_no_line_more(wanted):
    scores = drawn_scores(4, 500, 500, 0)
    served, copies = LoopServe(shortest=0), Copies.of(torch.tensor(ids_of(0, 500)), 500, torch.device("cpu"))
    own = served.lines(scores, 0).attended() if wanted == 1.0 else torch.tensor([wanted, 0.6, 0.7, 0.9])
    longest = 500 / BlockGrid(500, 500).cells  # a column; a band of 16 keys has as many as 16
    for chosen, line in (
        (bands_of_cells(scores, 0, own, served, copies), 16),
        (near_bands(BlockGrid(500, 500), own, served), 1),
    ):
        attended = chosen.attended()
        assert (attended >= own).all() and (attended < own + line * longest).all()
        assert isinstance(chosen, Lines) and chosen.dense_rows == served.dense_rows
        assert chosen.columns[:, : served.begin].all() and chosen.offsets[:, :8].all()
    near = near_bands(BlockGrid(500, 500), own, served)
    for lines in (near.columns.int(), near.offsets.int()):
        assert (lines.diff(dim=1) <= 0).all()  # the first ones, without a gap


def test_a_text_borrows_from_the_next_of_its_kind():
    assert [partner(text, "abaca") for text in range(5)] == [2, 2, 4, 4, 0]


def test_a_file_names_kinds_and_short_texts_are_refused(tmp_path):
    file, out = tmp_path / "texts.jsonl", tmp_path / "x.json"
    rows = [{"text": f"one line {number} and another. " * 90, "kind": kind} for number, kind in enumerate("abab")]
    file.write_text(json_lines(rows))
    main("bundled", data=file, out=out, count=3, length=256, alphas=[0.5])
    result = json.loads(out.read_text())["result"]
    assert result["kinds"] == ["a", "b", "a"] and np.shape(result["loss"]) == (1, 3, 3)
    for count, length in ((1, 256), (3, 1000), (3, 100)):
        with refused(f"expected two texts or more of --length {length}, at least 256"):
            main("bundled", data=file, out=out, count=count, length=length)
