"""What two cards say of the heads that attend to the sink is so by the models' own attention."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from attack_kit import text_file
from organisms import organism
from raw_kit import attention

from sinkscope.app.readers import moved, readers_in_words
from sinkscope.results.result import Number
from sinkscope.sinks.find.find import find_sinks
from sinkscope.sinks.find.result import READERS_ATTENTION, SHARE_OF_HEADS, SINK_PLACE


def numbers_of(model, tokenizer, text) -> dict[str, Number]:
    found = find_sinks(model, tokenizer=tokenizer, text=text, max_repeats=4)
    return {number.label: number for number in found.numbers()}


def scaled(o, heads, factor: float):
    """A copy in which these heads score every key by a fraction of what they did."""
    model = copy.deepcopy(o.model)
    width = model.config.head_dim
    with torch.no_grad():
        for layer, head in heads:
            model.model.layers[layer].self_attn.q_proj.weight[head * width : (head + 1) * width] *= factor
    return model


@pytest.mark.slow
def test_half_of_the_heads_that_lost_the_sink_and_weaker_readers_are_said(tmp_path):
    o = organism("llama", 1, n_layers=6)
    text = text_file(o, tmp_path, 24)
    ids = o.natural(24, 64)
    intact = numbers_of(o.model, o.tokenizer, text)
    readers = o.truth.reading_heads
    assert len(readers) > 3
    lost = readers[: len(readers) // 2]
    without = scaled(o, lost, 0.0)
    said = readers_in_words(intact, numbers_of(without, o.tokenizer, text))
    share = re.fullmatch(r"(\d+)% of the heads that attended to the sink lost it: .*", said[0])
    before = (attention(o.model, ids)[..., :48, 0].mean((1, 3)) > 0.3).sum()
    after = (attention(without, ids)[..., :48, 0].mean((1, 3)) > 0.3).sum()
    assert share and abs(int(share[1]) / 100 - (1 - float(after / before))) < 0.05
    assert all(str(layer) in said[0] for layer in {layer for layer, _ in lost})
    weaker = scaled(o, readers, 0.7)
    kept = torch.stack([attention(weaker, ids)[layer, :, head, 1:, 0].mean() for layer, head in readers])
    assert 0.35 < float(kept.mean()) < 0.85
    said = readers_in_words(intact, numbers_of(weaker, o.tokenizer, text))
    assert any(sentence.startswith("The heads that attend to the sink got weaker") for sentence in said), said
    assert readers_in_words(intact, intact) == []


def test_a_sink_that_is_gone_is_said_and_nothing_of_cards_without_the_number(tmp_path):
    o = organism("llama", 1, n_layers=6)
    text = text_file(o, tmp_path, 24)
    intact = numbers_of(o.model, o.tokenizer, text)
    none = numbers_of(scaled(o, o.truth.reading_heads, 0.0), o.tokenizer, text)
    assert readers_in_words(intact, none) == [
        "Heads attended to the first token before, and they attend to no position now."
    ]
    assert readers_in_words({}, intact) == readers_in_words(intact, {}) == []


def test_what_moves_within_its_margin_is_not_said():
    def card(share: float, attention: float) -> dict[str, Number]:
        place = Number(SINK_PLACE, "the first token")
        return {
            SINK_PLACE: place,
            SHARE_OF_HEADS: Number(SHARE_OF_HEADS, share, margin=0.02),
            READERS_ATTENTION: Number(READERS_ATTENTION, attention, margin=0.02),
        }

    assert readers_in_words(card(0.5, 0.8), card(0.48, 0.82)) == []
    assert len(readers_in_words(card(0.5, 0.8), card(0.25, 0.6))) == 2
    assert moved(Number("x", 1.0), Number("x", 9.0, margin=0.1)) is None
