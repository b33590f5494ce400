"""Algorithm 5 as printed, step by step, and MInference's choice."""

from __future__ import annotations

import inspect
import re
from pkgutil import resolve_name

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lines_kit import dense, drawn_scores, lines_of, on_lines
from repository import ROOT
from torch import Tensor

from sinkscope.sparse import recovered
from sinkscope.sparse.attention import Scores, sample_queries
from sinkscope.sparse.choice import select_bands
from sinkscope.sparse.head_lines import minference_lines, select_lines


@given(
    queries=st.integers(1, 24),
    past=st.integers(0, 16),
    alpha=st.floats(0.05, 0.999) | st.just(1.0),
    sample=st.sampled_from([1, 5, 48]),
    sharp=st.sampled_from([0.0, 1.0, 4.0]),
    seed=st.integers(0, 999),
)
def test_a_choice_holds_alpha_of_the_sample(queries, past, alpha, sample, sharp, seed):
    keys = queries + past
    scores = drawn_scores(4, queries, keys, seed, sharp)
    lines = select_lines(scores, alpha, sample=sample, seed=seed)
    rows = sample_queries(queries, sample, seed)
    assert len(set(rows.tolist())) == min(sample, queries)
    assert lines.offsets[:, 0].all()
    found = on_lines(lines)
    assert torch.equal(found.sum((1, 2)), lines.cells())  # no cell twice
    assert torch.equal(found, lines.rows(past + torch.arange(queries)))
    held = (dense(scores) * found).sum(2)
    assert (held[:, rows].sum(1) >= alpha * len(rows) - 1e-4).all()
    torch.testing.assert_close(recovered(scores, lines).double(), held.mean(1), atol=1e-5, rtol=0)


def printed(probs: Tensor, alpha: float) -> tuple[set[int], set[int]]:
    """Algorithm 5 step by step: at each the best line of both kinds per new cell, slash lines first among equals."""
    queries, keys = probs.shape
    cells = lines_of(queries, keys)
    weight = {line: float((probs * held).sum()) for line, held in cells.items()}
    largest = {line: float((probs * held).max()) for line, held in cells.items()}
    chosen: dict[str, list[int]] = {"vertical": [], "slash": [0]}
    total = float(probs[cells["slash", 0]].sum())
    while total < alpha * queries:
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


@pytest.mark.parametrize(("queries", "past", "alpha"), [(12, 0, 0.5), (9, 6, 0.6), (14, 3, 0.7), (6, 3, 0.999)])
def test_it_is_the_printed_algorithm(queries, past, alpha):
    whole = 0
    for seed in range(10):
        scores = drawn_scores(2, queries, queries + past, seed, sharp=3.0)
        lines = select_lines(scores, alpha)
        probs = dense(scores)
        for head in range(2):
            vertical, slash = printed(probs[head], alpha)
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
    for head in range(2):
        columns = probs[head].sum(0)
        columns[:6] = torch.inf
        assert set(lines.columns[head].nonzero().flatten().tolist()) == set(columns.topk(200).indices.tolist())
        # Row r of these eight is position 252 + r; offset o is the diagonal 252 - o of them.
        offsets = torch.stack([probs[head].diagonal(252 - o).sum() for o in range(260)])
        offsets[:4] = torch.inf
        assert set(lines.offsets[head].nonzero().flatten().tolist()) == set(offsets.topk(244).indices.tolist())


@pytest.mark.parametrize("select", [select_lines, select_bands])
def test_attention_that_is_not_a_number_is_dense_as_it_would_be_without(select):
    scores = drawn_scores(4, 140, 160, 7, sharp=9.0)
    scores.key[0, 3] = torch.nan
    attended = select(scores, 0.3).attended()
    assert (attended[:2] == 1).all() and (attended[2:] < 1).all()


@pytest.mark.parametrize(
    ("page", "numbers"),
    [("loopguard", {"section 5.3", *(f"Eq. {number}" for number in range(5, 12))}), ("loopserve", {"4", "5", "6"})],
)
def test_the_table_of_a_paper_names_a_function_for_each_equation(page, numbers):
    text = (ROOT / f"docs/papers/{page}.md").read_text()
    rows = re.findall(r"^\| (Eq\. \d+|section 5\.3|[456]), [^|]+ \| `([\w.]+)` \|$", text, re.MULTILINE)
    assert {number for number, _ in rows} == numbers
    for number, name in rows:
        found = resolve_name(name)
        assert page == "loopserve" or number.rpartition(" ")[2] in inspect.getsource(found), f"{name}: no {number}"
