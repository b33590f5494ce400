"""`repeat --tokens all` against planted groups and against one long pass per token; resuming."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from covering import slow
from organisms import Organism, organism
from raw_kit import norms

from sinkscope.models.target import Target
from sinkscope.sinks.repetition.repeat import Repeat, repeat

pytestmark = pytest.mark.few_texts

LIMIT = 160


def measured(o: Organism, **options) -> Repeat:
    return repeat(o.model, tokenizer=o.tokenizer, tokens=["all"], **{"max_repeats": LIMIT, **options})


@cache
def whole() -> Repeat:
    """Every token of a small organism; for those who only read."""
    return measured(organism("qwen2", 1))


def by_hand(o: Organism, first: int, token: int, limit: int) -> float:
    """The whole model on the longest sequence, by plain hooks."""
    norm = norms(o.model, torch.tensor([[first] + [token] * limit]))[o.truth.sink_layer, 0]
    above = (norm[1:] >= norm[0] / 2).nonzero()
    return float(above[0]) + 1 if len(above) else float("nan")


@pytest.mark.parametrize(("family", "seed"), [("llama", 5), slow("gpt_oss", 1)])
def test_repeats_are_those_of_one_whole_pass_per_token(family, seed):
    o = organism(family, seed)
    result = measured(o, sample=6)
    atlas = result.reading
    assert result.sink_layer == o.truth.sink_layer and len(atlas.ids) == 6
    expected = [by_hand(o, o.tokenizer.bos_token_id, token, LIMIT) for token in atlas.ids.tolist()]
    np.testing.assert_array_equal(atlas.repeats, expected)


def test_without_attention_in_layer_0_no_head_serves_a_token(monkeypatch):
    o, other = organism("llama", 5), Target.has_attention
    monkeypatch.setattr(Target, "has_attention", lambda self, layer: layer > 0 and other(self, layer))
    atlas = measured(o, sample=3).reading
    assert len(atlas.repeats) == 3 and np.isnan(atlas.head).all()


def test_every_grouped_token_gets_there_and_no_other():
    o, result = organism("qwen2", 1), whole()
    atlas, expected, bos = result.reading, o.truth.repeats_expected, o.tokenizer.bos_token_id
    assert expected is not None and len(atlas.ids) == o.model.config.vocab_size
    group = np.array([o.truth.groups[token] for token in atlas.ids.tolist()])
    assert ((group < 0) == atlas.resists).all()
    repeats = atlas.repeats[(group >= 0) & (atlas.ids != bos)]
    assert repeats.min() >= 0.6 * expected and repeats.max() <= 1.5 * expected
    assert atlas.repeats[bos] == 1  # after itself it is its own group from the start
    assert (np.isnan(atlas.head) == (group < 0)).all()
    assert {row["id"] for row in result.rows()[: int((group < 0).sum())]} == set(np.flatnonzero(group < 0).tolist())
    (claim,) = result.claims
    assert claim.value > 0.5 and max(contrast.value for contrast in claim.contrasts) < 0.2
