"""Algorithm 5 as printed, step by step, and MInference's choice."""

from __future__ import annotations

import pytest
import torch
from lines_kit import dense, drawn_scores, lines_of
from torch import Tensor

from sinkscope.sparse.attention import Scores, sample_queries
from sinkscope.sparse.choice import select_bands
from sinkscope.sparse.head_lines import minference_lines, select_lines


def printed(whole: Tensor, rows: Tensor, alpha: float) -> tuple[set[int], set[int]]:
    """Algorithm 5 step by step: at each the best line of both kinds per new cell, slash lines first among equals.

    Of the attention `[query key]` only the sampled rows count; lengths of lines are those of the whole matrix.
    """
    queries, keys = whole.shape
    cells = lines_of(queries, keys)
    probs = torch.zeros_like(whole).index_copy(0, rows, whole[rows])
    weight = {line: float((probs * held).sum()) for line, held in cells.items()}
    largest = {line: float((probs * held).max()) for line, held in cells.items()}
    chosen: dict[str, list[int]] = {"vertical": [], "slash": [0]}
    total = float(probs[cells["slash", 0]].sum())
    while total < alpha * len(rows):
        offers = []
        for kind, other in (("slash", "vertical"), ("vertical", "slash")):
            rest = [line for line in range(keys) if line not in chosen[kind]]
            if rest:  # each list is in order of weight, so only its first line is looked at
                line = max(rest, key=lambda n, kind=kind: weight[kind, n])
                gain = weight[kind, line] - sum(largest[other, crossed] for crossed in chosen[other])
                offers.append((gain / max(1, min(queries, keys - line) - len(chosen[other])), gain, kind, line))
        if not offers:
            return set(range(keys)), set(range(keys))
        _, gain, kind, line = max(offers, key=lambda offer: offer[0])
        total += max(0.0, gain)
        chosen[kind].append(line)
    return set(chosen["vertical"]), set(chosen["slash"])


@pytest.mark.parametrize(
    ("queries", "past", "alpha", "sample"), [(12, 0, 0.5, 48), (9, 6, 0.6, 48), (14, 3, 0.7, 5), (6, 3, 0.999, 48)]
)
def test_it_is_the_printed_algorithm(queries, past, alpha, sample):
    whole = 0
    for seed in range(10):
        scores = drawn_scores(2, queries, queries + past, seed, sharp=3.0)
        lines = select_lines(scores, alpha, sample=sample, seed=seed)
        probs, rows = dense(scores), sample_queries(queries, sample, seed)
        for head in range(2):
            vertical, slash = printed(probs[head], rows, alpha)
            assert set(lines.columns[head].nonzero().flatten().tolist()) == vertical
            assert set(lines.offsets[head].nonzero().flatten().tolist()) == slash
            whole += len(vertical) == queries + past
    assert whole or alpha < 0.9  # with nearly everything asked for, the lists end


def test_of_lines_that_add_the_same_the_slash_line_is_taken():
    """Attention is uniform: the first column and the second diagonal hold 1/2 more each, in one cell."""
    lines = select_lines(Scores(torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), 1.0), 0.8)
    assert not lines.columns.any() and lines.offsets.all()


def test_minference_by_the_last_queries():
    """Of 200 vertical lines 6 are always the first, of 244 slash lines 4 the nearest."""
    scores = drawn_scores(2, 40, 260, 7)
    lines = minference_lines(scores, 200, 244, last=8)
    probs = dense(scores)[:, -8:]
    columns = probs.sum(1)
    # Row r of these eight is position 252 + r; offset o is the diagonal 252 - o of them.
    offsets = torch.stack([probs.diagonal(252 - o, 1, 2).sum(-1) for o in range(260)], 1)
    columns[:, :6] = offsets[:, :4] = torch.inf
    assert torch.equal(lines.columns, columns >= columns.topk(200).values[:, -1:])
    assert torch.equal(lines.offsets, offsets >= offsets.topk(244).values[:, -1:])


@pytest.mark.parametrize("select", [select_lines, select_bands])
def test_attention_that_is_not_a_number_is_dense_as_it_would_be_without(select):
    scores = drawn_scores(4, 140, 160, 7, sharp=9.0)
    scores.key[0, 3] = torch.nan
    attended = select(scores, 0.3).attended()
    assert (attended[:2] == 1).all() and (attended[2:] < 1).all()
