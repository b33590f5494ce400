"""Copies in a text: found as a loop over it finds them, drawn into the sample, seen by all heads, also across turns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kv_kit import model_of
from torch import Tensor
from transformers import DynamicCache

from sinkscope.sparse import bands as rule
from sinkscope.sparse.bands import Copies, copies_in
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
