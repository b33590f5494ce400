"""Why heads read a place: states, values and scores are those of plain hooks, masks and attention."""

from __future__ import annotations

import pytest
import torch
from plain_constancy import cosine_between, in_heads, plain
from test_spikes import bundled  # noqa: F401  (a fixture)

from sinkscope.sinks.spikes.conditions import LAST, TEXTS, ordinary_positions
from sinkscope.sinks.spikes.constancy import constancy_of
from sinkscope.sinks.spikes.find import sinks_of

CAUSES = ("sight",)


@pytest.fixture(scope="module")
def spike(bundled):  # noqa: F811
    return sinks_of(bundled).spikes[0].reported


@pytest.fixture(scope="module")
def found(spike):
    return constancy_of(spike, spike.layers[0], CAUSES, 0)


def test_states_are_those_of_plain_masks(bundled, spike, found):  # noqa: F811
    ids = spike.survey.ids[:TEXTS]
    at, rows, length = ordinary_positions(ids, 0).at, torch.arange(TEXTS), ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(TEXTS, -1, -1)
    alone = causal.clone()
    alone[rows, at] = torch.arange(length) == at[:, None]
    alone[rows, at, at] = True
    states = plain(bundled.target.hf, ids, alone)[0][:, rows, at]
    has = spike.along(states[spike.peak + 1]) >= 0.5
    assert int(has.sum()) == found.texts < TEXTS  # some do not become such a place, and are left out
    for mask, said in ((alone, found.by_layer), (causal, found.ordinary_by_layer)):
        between = cosine_between(plain(bundled.target.hf, ids, mask)[0][:, rows, at][:, has])
        torch.testing.assert_close(torch.tensor(said[:-1]), between[: len(said) - 1], atol=1e-4, rtol=1e-4)


def test_values_and_scores_are_those_of_plain_attention(bundled, spike, found):  # noqa: F811
    ids, model = spike.survey.ids[:TEXTS], bundled.target.hf
    at, length = ordinary_positions(ids, 0).at, ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(TEXTS, -1, -1)
    _, scores, values = plain(model, ids, causal)
    heads = spike.survey.received(spike.place.mask).nanmean(-1) > 0.3
    layers = range(found.after, min(spike.layers[1] + 2, len(values)))
    of_value, of_score = in_heads(model, scores, values, {layer: heads[layer] for layer in layers}, at, LAST)
    assert len(of_value[0]) == found.heads
    for number, numbers in ((found.numbers[1], of_value), (found.numbers[2], of_score)):
        assert number.after == pytest.approx(float(torch.stack(numbers[0]).mean()), abs=1e-3)
        assert number.ordinary_after == pytest.approx(float(torch.stack(numbers[1]).mean()), abs=1e-3)


def test_a_spike_makes_a_constant_of_its_place(found):
    state, value, score = found.numbers
    assert state.after > 0.999 > state.before and state.ordinary_after < 0.8
    assert value.after < 0.1 and 0.8 < value.ordinary_after < 1.2
    assert score.after > 0.9 and score.ordinary_after < 0.7


def test_where_nothing_makes_another_such_place_nothing_is_said(spike):
    assert constancy_of(spike, spike.layers[0], (), 0) is None
