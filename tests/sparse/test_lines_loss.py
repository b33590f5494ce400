"""The loss along lines: own lines are LoopServe's, and each control has as many cells and no line that it can spare."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from lines_kit import drawn_scores
from organisms import tiny_model
from refusals import refused
from torch import Tensor

from sinkscope.files.store import json_lines
from sinkscope.measure import Setup
from sinkscope.measure.margin import interval_of
from sinkscope.models.inputs import read_row
from sinkscope.opening.live import target_of
from sinkscope.sparse.bands import Bands, BlockGrid, Copies
from sinkscope.sparse.lines_loss import (
    LinesLoss,
    bands_of_cells,
    equal_rows,
    lines_loss,
    near_bands,
    pair_distances,
    partners,
)
from sinkscope.sparse.serve import LoopServe

LENGTH = 320


def ids_of(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(4, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_own_lines_are_those_of_loopserve_and_full_attention_is_the_models():
    model, tokenizer = tiny_model("llama")
    texts = [ids_of(number) for number in range(3)]
    result = lines_loss(model, texts, length=LENGTH, alphas=[0.3, 0.9], tokenizer=tokenizer)
    assert (result.counted, result.kinds) == (LENGTH - 1, ("", "", ""))
    for number, text in enumerate(texts):
        ids = torch.tensor([read_row(target_of(model, tokenizer=tokenizer), text, special=False)])

        def loss(ids: Tensor = ids) -> float:
            with torch.no_grad():
                return float(model(ids, labels=ids, use_cache=False).loss)

        assert result.full[number] == pytest.approx(loss(), abs=1e-5)
        for alpha, value in enumerate(result.alphas):
            with LoopServe(alpha=value, decode=False, shortest=0).on(model) as run:
                assert result.loss[alpha, 0, number] == pytest.approx(loss(), abs=1e-5)
            shares = [event.data["attended"] for event in run.events if event.kind == "prefill"]
            assert result.cells[alpha, 0, number] == pytest.approx(np.mean(shares), abs=1e-6)
    assert (result.cells >= result.cells[:, :1] - 1e-6).all() and result.cells.max() < 1.01
    assert (np.diff(result.loss, axis=1) != 0).any()


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
        assert isinstance(chosen, Bands) and chosen.dense_rows == served.dense_rows
        assert chosen.columns[:, : served.begin].all() and chosen.bands[:, :8].all()
    near = near_bands(BlockGrid(500, 500), own, served)
    for lines in (near.columns.int(), near.bands.int()):
        assert (lines.diff(dim=1) <= 0).all()  # the first ones, without a gap


def test_lines_of_another_text_are_its_own_where_as_many_are_wanted():
    """Of a sample without copies, the cells of its own choice lead back to nearly that choice."""
    scores, served = drawn_scores(4, 500, 500, 0), LoopServe(alpha=0.6, shortest=0, dense_above=2.0)
    none = Copies.of(torch.arange(500), 500, torch.device("cpu"))
    own = served.lines(scores, 3, none)
    assert isinstance(own, Bands)
    again = bands_of_cells(scores, 3, own.attended(), served, none)
    same = (own.columns == again.columns).float().mean(), (own.bands == again.bands).float().mean()
    assert min(same) > 0.9


def test_the_control_that_costs_least_is_named_and_a_win_is_said():
    loss = np.zeros((1, 3, 4))
    loss[0, 0] = 2.0 + np.array([0.01, 0.02, 0.03, 0.02])
    loss[0, 1], loss[0, 2] = loss[0, 0] + [0.2, 0.3, 0.2, 0.3], loss[0, 0] + [0.1, 0.12, 0.1, 0.12]
    kinds = ("prose", "code", "prose", "code")
    result = LinesLoss(
        alphas=(0.9,), kinds=kinds, tokens=256, counted=255, layers=(0,), full=np.full(4, 2.0), loss=loss,
        cells=np.full((1, 3, 4), 0.22), lost_on=(),
    )  # fmt: skip
    margin = interval_of(loss[0, 2] - loss[0, 0])
    assert margin is not None
    assert result.conclusion() == (
        "Own lines of alpha 0.9 cost 0.020 ± 0.013 nats for 22% of the cells; first columns and nearest bands, the "
        f"strongest control, 0.110 ± {margin.margin:.3f} more."
    )
    loss[0, 1] = loss[0, 0] - [0.01, 0.0, 0.01, 0.0]
    assert "another text's lines, the strongest control, no more: -0.005" in result.conclusion()
    assert [row["kind"] for row in result.rows()] == [name for name in ("all", "prose", "code") for _ in range(3)]
    assert result.rows()[4]["more"] == pytest.approx(-0.01)  # prose, lines of another text
    few = replace(result, loss=loss[..., :2], cells=result.cells[..., :2], kinds=kinds[:2], full=np.full(2, 2.0))
    assert few.row(0, 0)["margin"] is None


def test_a_text_borrows_from_the_next_of_its_kind_and_pairs_are_found_as_by_hand():
    assert partners(("a", "b", "a", "c", "a")) == [2, 2, 4, 4, 0]
    ids = torch.randint(0, 6, (200,), generator=torch.Generator().manual_seed(1))
    pairs = [tuple(ids[at - 1 : at + 1].tolist()) for at in range(1, 200)]
    for at in range(1, 200):
        earlier = [at - 1 - place for place, pair in enumerate(pairs[: at - 1]) if pair == pairs[at - 1]]
        assert int(pair_distances(ids)[at]) == min(earlier, default=0)


def test_a_file_names_kinds_and_short_texts_are_refused(tmp_path, typed):
    file, out = tmp_path / "texts.jsonl", tmp_path / "x.json"
    rows = [{"text": f"one line {number} and another. " * 90, "kind": kind} for number, kind in enumerate("abab")]
    file.write_text(json_lines(rows))
    typed(f"lines-loss --data {file} --count 3 --length 256 --alphas 0.5 --json {out}")
    assert LinesLoss.load(out).kinds == ("a", "b", "a")
    model, tokenizer = tiny_model("llama")
    with refused("--length 100: expected at least 256"):
        lines_loss(model, [ids_of(0)] * 2, length=100, tokenizer=tokenizer)
    for texts in ([ids_of(0)], [ids_of(0), ids_of(1, 200)]):
        with refused("expected two or more of --length 256"):
            lines_loss(model, texts, length=256, tokenizer=tokenizer)
    with refused("a single text was given"):
        lines_loss(model, "one text", tokenizer=tokenizer)


def test_texts_that_are_longer_than_the_context_are_read_from_their_beginning():
    model, tokenizer = tiny_model("llama")
    context = model.config.max_position_embeddings
    texts = [ids_of(number, context + 100) for number in range(2)]
    for length in (LENGTH, context):
        rows = equal_rows(Setup.open(model, tokenizer=tokenizer), texts, None, 2, length)
        for row, text in zip(rows.tolist(), texts, strict=True):
            assert row in (text[:length], [tokenizer.bos_token_id, *text[: length - 1]])
