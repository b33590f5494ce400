"""Why heads read a place: states, values and scores are those of plain hooks, masks and attention."""

from __future__ import annotations

import re

import pytest
import torch
from plain_constancy import cosine_between, in_heads, plain
from test_spikes import bundled  # noqa: F401  (a fixture)

from sinkscope.results.row import of_table
from sinkscope.sinks.spikes.asked import LAST, TEXTS, ordinary_positions
from sinkscope.sinks.spikes.constancy import constancy_of
from sinkscope.sinks.spikes.find import sinks_of

CAUSES = ("alone",)


@pytest.fixture(scope="module")
def spike(bundled):  # noqa: F811
    return sinks_of(bundled).spikes[0].reported


@pytest.fixture(scope="module")
def found(spike):
    return constancy_of(spike, spike.layers[0], CAUSES, 0)


def positions(spike) -> torch.Tensor:
    """Where an ordinary position was drawn in each text."""
    return ordinary_positions(spike.survey.ids[:TEXTS], 0)


def test_states_are_those_of_plain_masks(bundled, spike, found):  # noqa: F811
    ids = spike.survey.ids[:TEXTS]
    at, rows, length = positions(spike), torch.arange(TEXTS), ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(TEXTS, -1, -1)
    alone = causal.clone()
    alone[rows, at] = torch.arange(length) == at[:, None]
    alone[rows, at, at] = True
    states = plain(bundled.target.hf, ids, alone)[0][:, rows, at]
    has = spike.along(states[spike.peak + 1]) >= 0.5
    assert int(has.sum()) < TEXTS  # some do not become such a place, and are left out
    row = of_table(found, "constant")["state"]
    _, after, before = map(int, re.findall(r"\d+", row.note))
    for mask, number in ((alone, ""), (causal, "ordinary_")):
        between = cosine_between(plain(bundled.target.hf, ids, mask)[0][:, rows, at][:, has])
        assert row.get(f"{number}before") == pytest.approx(float(between[before]), abs=1e-4)
        assert row.get(f"{number}after") == pytest.approx(float(between[after]), abs=1e-4)


def test_values_and_scores_are_those_of_plain_attention(bundled, spike, found):  # noqa: F811
    ids, model = spike.survey.ids[:TEXTS], bundled.target.hf
    at, length = positions(spike), ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(TEXTS, -1, -1)
    _, scores, values = plain(model, ids, causal)
    heads = spike.survey.received(spike.place.mask).nanmean(-1) > 0.3
    table = of_table(found, "constant")
    heads_said, after = map(int, re.findall(r"\d+", table["state"].note)[:2])
    layers = range(after, min(spike.layers[1] + 2, len(values)))
    of_value, of_score = in_heads(model, scores, values, {layer: heads[layer] for layer in layers}, at, LAST)
    assert len(of_value[0]) == heads_said
    for name, numbers in (("value", of_value), ("score", of_score)):
        assert table[name].get("after") == pytest.approx(float(torch.stack(numbers[0]).mean()), abs=1e-3)
        assert table[name].get("ordinary_after") == pytest.approx(float(torch.stack(numbers[1]).mean()), abs=1e-3)


def test_where_nothing_makes_another_such_place_nothing_is_said(spike):
    assert constancy_of(spike, spike.layers[0], (), 0) == []
