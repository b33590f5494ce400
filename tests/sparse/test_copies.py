"""Copies in a text: found as a loop over it finds them, drawn into the sample, seen by all heads, also across turns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kv_kit import model_of
from lines_kit import drawn_scores
from torch import Tensor
from transformers import DynamicCache

from sinkscope.sparse import bands as rule
from sinkscope.sparse.attention import sample_queries
from sinkscope.sparse.bands import BAND, TILE, BlockGrid, Copies, copies_in
from sinkscope.sparse.choice import select_bands, unsampled_queries
from sinkscope.sparse.serve import LoopServe

CPU = torch.device("cpu")


def by_hand(ids: list[int], far: int) -> list[tuple[int, int]]:
    """Copies and their originals: the latest place of the same three tokens, if that is far enough."""
    latest: dict[tuple[int, ...], int] = {}
    found: list[tuple[int, int]] = []
    for place in range(2, len(ids)):
        phrase = tuple(ids[place - 2 : place + 1])
        if min(phrase) >= 0:
            if phrase in latest and place - latest[phrase] >= far:
                found.append((place, latest[phrase]))
            latest[phrase] = place
    return found


def repeated(length: int, back: int) -> Tensor:
    """Random ids whose second half repeats what stood `back` tokens before."""
    ids = torch.randint(5, 96, (length,), generator=torch.Generator().manual_seed(0))
    for place in range(length // 2, length):
        ids[place] = ids[place - back]
    return ids


@given(ids=st.lists(st.integers(-1, 3) | st.sampled_from([2**21 - 1]), min_size=1, max_size=80), far=st.integers(1, 30))
@example(ids=[0, 2, -1, 0, 1, 2**21 - 1], far=1)  # an unknown id, and one that has the same bits
def test_copies_are_those_that_a_loop_over_the_text_finds(ids, far):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rule, "FAR", far)
        at, original = copies_in(torch.tensor(ids, dtype=torch.int64))
    assert list(zip(at.tolist(), original.tolist(), strict=True)) == by_hand(ids, far)


@pytest.mark.parametrize("queries", [700, 230, 7])
def test_every_head_sees_the_tokens_around_the_original_from_the_tile_of_a_copy(queries):
    ids = repeated(700, 300)
    found, grid = Copies.of(ids, queries, CPU), BlockGrid(queries, 700)
    pairs = [(place - grid.past, original) for place, original in by_hand(ids.tolist(), rule.FAR)]
    pairs = [(query, original) for query, original in pairs if query >= 0]
    assert pairs and found.at.tolist() == [query for query, _ in pairs]
    chosen = select_bands(drawn_scores(4, queries, 700, 0), 0.2, copies=found)
    sees = chosen.rows(grid.past + torch.arange(queries))
    wanted: set[tuple[int, int]] = set()
    for query, original in pairs:
        assert sees[:, query, original - 1 : original + 3].all()
        wanted |= {(query // TILE, (key + grid.lead) // BAND) for key in range(original - 1, original + 3)}
    assert set(zip(found.tile.tolist(), found.block.tolist(), strict=True)) == wanted
    assert found.start.tolist() == [sum(tile < n for tile, _ in wanted) for n in range(grid.tiles + 1)]


def test_half_of_the_sample_is_drawn_among_copies_and_the_rest_among_all_others():
    copies = torch.arange(100, 200)
    rows = sample_queries(1000, 64, 3, copies)
    at_copies = int(((rows >= 100) & (rows < 200)).sum())
    assert len(rows.unique()) == 64 and rows.tolist() == sorted(rows.tolist()) and 32 <= at_copies < 45
    assert not torch.equal(rows, sample_queries(1000, 64, 4, copies))
    few = sample_queries(1000, 64, 3, torch.tensor([5, 999, 1000, 2000]))  # some are in rows that see everything
    assert len(few) == 64 and {5, 999} <= set(few.tolist())
    assert torch.equal(sample_queries(1000, 64, 3, torch.tensor([], dtype=torch.int64)), sample_queries(1000, 64, 3))
    assert len(sample_queries(10, 64, 3, torch.arange(10))) == 10
    assert not set(unsampled_queries(1000, rows, 3).tolist()) & set(rows.tolist())


@pytest.fixture
def told(monkeypatch):
    """The copies with which lines were chosen, by call and row."""
    seen: list[Copies] = []
    made = LoopServe.lines

    def lines(self, scores, layer, copies=None):
        if layer == 0:
            seen.append(copies)
        return made(self, scores, layer, copies)

    monkeypatch.setattr(LoopServe, "lines", lines)
    return seen


SERVE = LoopServe(alpha=0.5, shortest=0, sample=12, decode=False)


def test_copies_of_a_later_turn_reach_into_the_cache(told):
    ids, model = repeated(900, 400), model_of("llama")
    cache = DynamicCache()
    with SERVE.on(model), torch.no_grad():
        model(ids[None, :450], past_key_values=cache)
        for at in (450, 451):  # as in decoding
            model(ids[None, at : at + 1], past_key_values=cache)
        model(ids[None, 452:], past_key_values=cache)
    assert not len(told[0].at)
    assert torch.equal(told[1].at, Copies.of(ids, 448, CPU).at) and len(told[1].at) > 400


def test_tokens_that_were_taken_back_are_no_originals(told):
    ids, model = repeated(900, 400), model_of("llama")
    cache = DynamicCache()
    with SERVE.on(model), torch.no_grad():
        model(ids[None, :450], past_key_values=cache)
        cache.crop(20 - 450)
        model(ids[None, 450:], past_key_values=cache)
    whole = torch.cat([ids[:20], ids[450:]])
    assert torch.equal(told[1].at, Copies.of(whole, 450, CPU).at)


def test_rows_have_their_own_copies_and_padding_is_none(told):
    ids, model = repeated(900, 400), model_of("llama")
    mask = torch.ones(2, 900, dtype=torch.int64)
    mask[1, :30] = 0
    both = torch.stack([torch.arange(900) % 91 + 5, torch.cat([ids[:30], ids[:870]])])
    with SERVE.on(model), torch.no_grad():
        model(both, attention_mask=mask)
    assert torch.equal(told[1].at, Copies.of(ids[:870], 870, CPU).at) and len(told[1].at)
    assert torch.equal(told[0].at, Copies.of(both[0], 900, CPU).at)


def test_embeddings_and_tokens_from_before_have_no_copies(told):
    ids, model = repeated(900, 400), model_of("llama")
    cache = DynamicCache()
    with torch.no_grad():
        model(ids[None, :450], past_key_values=cache)
        with SERVE.on(model):
            model(ids[None, 450:], past_key_values=cache)
        with SERVE.on(model):
            model(inputs_embeds=model.get_input_embeddings()(ids[None]))
    assert torch.equal(told[0].at, Copies.of(torch.cat([torch.full((450,), -1), ids[450:]]), 450, CPU).at)
    assert not len(told[1].at)
