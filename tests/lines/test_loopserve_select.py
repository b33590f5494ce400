"""Algorithm 5: mass on the sample, cells counted once, beside the exhaustive optimum and MInference's choice."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lines_kit import dense, lines_of, on_lines
from refusals import refused
from torch import Tensor

from sinkscope.lines import choice
from sinkscope.lines.attention import Scores, recovered
from sinkscope.lines.choice import select_lines
from sinkscope.lines.exact import exact_lines, least_share
from sinkscope.lines.head_lines import HeadLines
from sinkscope.lines.sample import sample_queries
from sinkscope.lines.votes import minference_lines

VARIANTS = ("exact", "faithful")


def drawn(heads: int, queries: int, keys: int, seed: int, sharp: float = 3.0) -> Scores:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(heads, queries, 8, generator=generator) * sharp
    return Scores(query, torch.randn(max(1, heads // 2), keys, 8, generator=generator), 8**-0.5)


@given(
    queries=st.integers(1, 24),
    past=st.integers(0, 16),
    alpha=st.floats(0.05, 0.999) | st.just(1.0),
    variant=st.sampled_from(VARIANTS),
    sample=st.sampled_from([1, 5, 48]),
    sharp=st.sampled_from([0.0, 1.0, 4.0]),
    seed=st.integers(0, 999),
)
def test_a_choice_holds_alpha_of_the_sample(queries, past, alpha, variant, sample, sharp, seed):
    keys = queries + past
    scores = drawn(4, queries, keys, seed, sharp)
    lines = select_lines(scores, alpha, sample=sample, variant=variant, seed=seed)
    rows = sample_queries(queries, sample, seed)
    assert len(set(rows.tolist())) == min(sample, queries)
    assert lines.vertical.shape == lines.slash.shape == (4, keys)
    assert lines.vertical[:, 0].all() and lines.slash[:, 0].all()
    found = on_lines(lines)
    assert torch.equal(found.sum((1, 2)), lines.cells())  # no cell twice
    assert torch.equal(found, lines.rows(past + torch.arange(queries)))
    held = (dense(scores) * found).sum(2)
    assert (held[:, rows].sum(1) >= alpha * len(rows) - 1e-4).all()
    torch.testing.assert_close(recovered(scores, lines).double(), held.mean(1), atol=1e-5, rtol=0)
    assert (lines.density() <= 1).all()


def as_on_a_gpu(scores: Scores, alpha: float, **settings: Any) -> HeadLines:
    """The choice in few rounds, and of all heads at once."""

    def few(*given: Any, **named: Any) -> Tensor:
        return exact_lines(*given, **{**named, "few_rounds": True})

    with patch.object(choice, "exact_lines", few):
        return select_lines(scores, alpha, **settings)


@given(
    keys=st.integers(1, 4) | st.integers(30, 200),
    alpha=st.floats(0.05, 0.99),
    sharp=st.sampled_from([1.0, 4.0]),
    dense_above=st.sampled_from([0.0, 0.5, inf]),
    seed=st.integers(0, 99),
)
def test_few_rounds_hold_alpha_too_with_little_more_cells(keys, alpha, sharp, dense_above, seed):
    scores = drawn(4, keys, keys, seed, sharp)
    settings = {"dense_above": dense_above, "begin": 2, "local": 3, "sharp": 0.5, "checked": 4}
    many, few = select_lines(scores, alpha, **settings), as_on_a_gpu(scores, alpha, **settings)
    rows = sample_queries(keys, 48)
    found = on_lines(few)
    assert torch.equal(found.sum((1, 2)), few.cells())
    held = (dense(scores) * found).sum(2)[:, rows].sum(1)
    assert (held >= alpha * len(rows) - 1e-4).all()
    assert ((few.cells() <= 1.5 * many.cells()) | (few.density() == 1)).all()
    assert few.vertical[:, :2].all() and few.slash[:, :3].all()


@pytest.mark.parametrize("settings", [{"begin": 0}, {"sharp": 0.0}, {"dtype": torch.bfloat16}])
def test_sought_keys_without_first_ones_no_sharp_lines_and_keys_of_another_dtype(settings):
    scores = drawn(4, 40, 60, 0)
    scores = replace(scores, query=scores.query.to(settings.pop("dtype", torch.float32)))
    lines = select_lines(scores, 0.9, checked=4, **settings)
    assert (recovered(scores, lines, sample_queries(40, 48)) >= 0.9 - 1e-4).all()


def optimum(probs: Tensor, past: int, alpha: float) -> int:
    """Fewest cells of any choice of lines with the first of both kinds, by trying them all."""
    queries, keys = probs.shape
    at = past + torch.arange(queries)
    bits = torch.tensor(list(product([False, True], repeat=2 * keys - 2)))
    ones = torch.ones(len(bits), 1, dtype=torch.bool)
    vertical, slash = (torch.cat([ones, some], 1) for some in bits.chunk(2, 1))
    covered = HeadLines.of(vertical, slash, queries).rows(at)
    enough = (covered * probs).sum((1, 2)) >= alpha * queries - 1e-6
    return int(covered.sum((1, 2))[enough].min())


@pytest.mark.parametrize(("queries", "past"), [(7, 0), (4, 3)])
def test_against_the_exhaustive_optimum(queries, past):
    over = {"exact": [], "faithful": []}
    for seed in range(12):
        scores = drawn(1, queries, queries + past, seed)
        best = optimum(dense(scores)[0], past, 0.9)
        for variant in VARIANTS:
            cells = int(select_lines(scores, 0.9, variant=variant).cells()[0])
            assert cells >= best
            over[variant].append(cells / best)
    means = {name: sum(values) / len(values) for name, values in over.items()}
    assert means["exact"] < 1.12
    assert means["exact"] < means["faithful"]  # it subtracts overlaps that are not there


def printed(probs: Tensor, alpha: float) -> tuple[set[int], set[int]]:
    """Algorithm 5 step by step: at each the best line of both kinds per new cell, slash lines first among equals."""
    queries, keys = probs.shape
    cells = lines_of(queries, keys)
    weight = {line: float((probs * held).sum()) for line, held in cells.items()}
    largest = {line: float((probs * held).max()) for line, held in cells.items()}
    chosen = {"vertical": [0], "slash": [0]}
    total = float(probs[cells["vertical", 0] | cells["slash", 0]].sum())
    while total < alpha * queries:
        offers = []
        for kind, other in (("slash", "vertical"), ("vertical", "slash")):
            rest = [line for line in range(keys) if line not in chosen[kind]]
            if rest:  # each list is in order of weight, so only its first line is looked at
                line = max(rest, key=lambda n, kind=kind: weight[kind, n])
                gain = weight[kind, line] - sum(largest[other, crossed] for crossed in chosen[other])
                offers.append((gain / max(1, min(queries, keys - line) - len(chosen[other])), gain, kind, line))
        if not offers:
            return set(range(keys)), {0}
        _, gain, kind, line = max(offers, key=lambda offer: offer[0])
        total += max(0.0, gain)
        chosen[kind].append(line)
    return set(chosen["vertical"]), set(chosen["slash"])


@pytest.mark.parametrize(("queries", "past", "alpha"), [(12, 0, 0.5), (9, 6, 0.6), (14, 3, 0.7), (6, 0, 1.0 - 1e-9)])
def test_the_faithful_variant_is_the_printed_algorithm(queries, past, alpha):
    whole = 0
    for seed in range(10):
        scores = drawn(2, queries, queries + past, seed, sharp=3.0)
        lines = select_lines(scores, alpha, variant="faithful")
        probs = dense(scores)
        for head in range(2):
            vertical, slash = printed(probs[head], alpha)
            assert set(lines.vertical[head].nonzero().flatten().tolist()) == vertical
            assert set(lines.slash[head].nonzero().flatten().tolist()) == slash
            whole += len(vertical) == queries + past
    assert (whole == 20) == (alpha > 0.9)  # with everything asked for, the lists end


def test_of_lines_that_add_the_same_the_slash_line_is_taken():
    """Attention is uniform: after the first lines of both kinds, the second ones hold 1/2 + 1/3 + 1/4 each."""
    lines = select_lines(Scores(torch.zeros(1, 4, 8), torch.zeros(1, 4, 8), 1.0), 0.8, variant="faithful")
    assert lines.vertical.tolist() == [[True, False, False, False]]
    assert lines.slash.tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("beyond", [{"window": 4}, {"softcap": 1.0}, {"sinks": torch.zeros(2)}], ids=str)
def test_scores_with_more_than_lines_have_are_refused(beyond):
    scores = replace(drawn(2, 20, 20, 0), **beyond)
    for use in (lambda: select_lines(scores, 0.9), lambda: recovered(scores, select_lines(drawn(2, 20, 20, 0), 0.9))):
        with refused("which lines do not have"):
            use()


def test_minference_by_the_last_queries():
    scores = drawn(2, 40, 60, 7)
    lines = minference_lines(scores, 12, 9, last=8, first=3, local=4)
    probs = dense(scores)[:, -8:]
    for head in range(2):
        columns = probs[head].sum(0)
        columns[:3] = torch.inf
        assert set(lines.vertical[head].nonzero().flatten().tolist()) == set(columns.topk(12).indices.tolist())
        # Row r of these eight is position 52 + r; offset o is the diagonal 52 - o of them.
        offsets = torch.stack([probs[head].diagonal(52 - o).sum() for o in range(60)])
        offsets[:4] = torch.inf
        assert set(lines.slash[head].nonzero().flatten().tolist()) == set(offsets.topk(9).indices.tolist())


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_that_is_not_a_number_is_dense_as_it_would_be_without(variant):
    scores = drawn(4, 40, 60, 7, sharp=9.0)
    scores.key[0, 3] = torch.nan
    for lines in (select_lines(scores, 0.3, variant=variant), as_on_a_gpu(scores, 0.3, variant=variant)):
        assert (lines.density()[:2] == 1).all() and (lines.density()[2:] < 1).all()


@pytest.mark.parametrize("sharp", [0.0, 0.5, 2.0])
def test_flat_attention_is_known_before_lines_are_chosen(sharp):
    """No set of cells of the sample does with fewer than the bound says, and for flat attention it says nearly all."""
    scores = drawn(4, 120, 120, 4, sharp)
    probs = dense(scores)
    at = torch.arange(120)
    for alpha in (0.3, 0.9):
        bound = least_share(probs, at, alpha)
        for head in range(4):
            falling = probs[head].flatten().sort(descending=True).values.double().cumsum(0)
            needed = int((falling < alpha * 120).sum()) + 1  # the heaviest cells, wherever they are
            assert 0 < float(bound[head]) <= needed / (120 * 121 / 2) + 1e-6
    if not sharp:
        assert (least_share(probs, at, 0.955) > 0.85).all()
        assert (select_lines(scores, 0.955, dense_above=0.75).density() == 1).all()


@pytest.mark.parametrize("part", ["sharp", "checked", "shared"])
def test_rows_that_alpha_lets_fall_keep_the_key_that_they_search_for(part):
    """A mark for each third of the text, of which alpha drops one; and one query in the middle that seeks one key."""
    n = 900
    query, key = torch.zeros(1, n, 8), torch.zeros(1, n, 8)
    rows, wanted, settings = torch.tensor([500]), [123], {"checked": 8}
    if part == "sharp":
        rows, wanted, settings = torch.tensor([250, 550, 850]), [40, 340, 640], {"sharp": 0.1}
        query[0, torch.arange(n), torch.arange(n) // 300] = 60.0
        key[0, wanted, [0, 1, 2]] = 1.0
    else:
        query[..., 3] = key[:, 0, 3] = 8.0  # all attend to the first token
        query[0, 500], key[0, 123, 4] = 0.0, 1.0
        query[0, 500, 4] = 60.0
        if part == "shared":  # two more queries prefer that key a little, and are checked after the one that seeks it
            query[0, 500, 3], query[0, [499, 501], 3], query[0, [499, 501], 4] = -1.0, 0.0, 1.0
        assert 500 not in sample_queries(n, 48).tolist()
    plain, ours = (select_lines(Scores(query, key, 1.0), 0.3, **more) for more in ({}, settings))
    places = torch.arange(len(rows)), wanted
    assert not plain.rows(rows)[0][places].all() and ours.rows(rows)[0][places].all()
    assert float(ours.density()) < 0.05
