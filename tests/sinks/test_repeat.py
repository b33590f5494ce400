"""`repeat` of norms and of attention: against planted truth and against the long way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attack_kit import setup_of, text_file
from organisms import Organism, organism
from plain_hooks import attention, residuals

from sinkscope.models.text import text_rows
from sinkscope.sinks.repeat import TAIL, contrasts, half_reached, repeat, stopped_after
from sinkscope.sinks.spikes.find import spike_of

pytestmark = pytest.mark.few_texts


def word_of(o: Organism, group: int) -> str:
    return str(o.tokenizer.decode([o.tokens_of(group)[0]]))


def test_a_marked_word_gets_the_spike_where_it_crosses_half_of_it():
    """As many repetitions alone, and one fewer, stand on both sides of it; a word of no group never gets there."""
    o = organism(seed=2)
    setup, expected = setup_of(o), o.truth.repeats_expected
    result = repeat.on(setup, tokens=[word_of(o, 0), word_of(o, -1)], max_repeats=4 * expected)
    marked, spike = int(result.repeats[0, 0]), spike_of(setup).spike
    assert 0.6 * expected <= marked <= 1.5 * expected and np.isnan(result.repeats[0, 1])
    for count in (marked - 1, marked):
        alone = spike.along(residuals(o.model, o.repeated(count, result.ids[0]))[spike.peak])[0]
        assert (alone[-1] >= 0.5 * alone[0]) == (count == marked)
    assert result.values[0, 1].max() < 0.1
    assert [row["repeats"] for row in result.rows()] == [marked, None]
    said = f"by 1 of 2 tokens in {result.conditions[0]} within {4 * expected:,} copies ({result.effects[0].note}: "
    assert said in result.conclusion()


def test_a_single_position_that_stands_out_is_not_made_by_repetition():
    shares = torch.tensor([0.1, 0.1, 0.9, 0.1, 0.9, 0.9, 0.9])
    assert [half_reached(shares[:end]) for end in (4, 6, 7)] == [None, 5, 5]


def test_attention_of_each_place_is_that_of_whole_matrices(tmp_path):
    """In natural text, with copies, and with one copy; and what the copies get together."""
    o, count = organism(seed=2), 60
    text = text_file(o, tmp_path, 1, length=900)
    setup = setup_of(o, text=text)
    result = repeat.on(setup, quantity="attention", tokens=[word_of(o, 0)], max_repeats=count)
    natural = text_rows(o.tokenizer, text.read_text(), 1, count + 1 + TAIL, setup.bos)
    copies = o.repeated(count, result.ids[0])
    single, _ = contrasts(setup, copies, count)
    ids = torch.cat([torch.cat([natural[:, :-TAIL], copies, single]), natural[:, -TAIL:].expand(3, -1)], 1)
    every = attention(o.model, ids).mean(2)[..., -TAIL:, :]  # layer sequence query key
    fair = float((1 / torch.arange(count + 2, ids.shape[1] + 1)).mean())
    there = every[..., 1 : count + 1].sum(-1).mean(-1)
    own = torch.stack([every[..., 0].mean(-1), there / count]).permute(2, 0, 1).numpy() / fair
    assert result.values == pytest.approx(own, rel=1e-3, abs=1e-5)
    layer = o.truth.sink_layer + 1
    assert [row["attention"] for row in result.rows()[1::2]] == result.values[:, 1, layer].tolist()
    controls = {row.name: row.get("share") for row in result.effects if row.table == "controls"}
    values = [controls["other tokens"], result.effects[0].get("share"), controls["one copy"]]
    assert values == pytest.approx(there[layer].tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("likely", "expected"),
    [
        ([False, True, False, True, True], None),  # it comes back, so it has not stopped
        ([True, False, True, False, False], 4),
        ([False, False], None),
    ],
)
def test_repetition_has_stopped_only_where_it_never_comes_back(likely, expected):
    assert stopped_after(torch.where(torch.tensor(likely), 0.6, 0.4)) == expected
