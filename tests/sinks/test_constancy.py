"""Why heads read a place: states and values are those of plain hooks and masks."""

from __future__ import annotations

import re

import pytest
import torch
from plain_hooks import blocks, reading

from sinkscope.results.row import of_table
from sinkscope.sinks.spikes.asked import TEXTS, ordinary_positions
from sinkscope.sinks.spikes.constancy import constancy_of
from sinkscope.sinks.spikes.find import sinks_of


@pytest.fixture(scope="module")
def spike(bundled):
    return sinks_of(bundled).spikes[0].reported


@pytest.fixture(scope="module")
def found(spike):
    return of_table(constancy_of(spike, spike.layers[0], ("alone",), 0), "constant")


@torch.no_grad()
def test_states_are_those_of_plain_masks(spike, found):
    model, ids, rows = spike.survey.target.hf, spike.survey.ids[:TEXTS], torch.arange(TEXTS)
    at, length = ordinary_positions(ids, 0), ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(TEXTS, -1, -1)
    alone = causal.clone()
    alone[rows, at] = torch.arange(length) == at[:, None]
    states = []
    for mask in (alone, causal):
        added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[:, None]
        seen = model(ids, attention_mask=added, output_hidden_states=True, use_cache=False).hidden_states
        states.append(torch.stack(seen)[:, rows, at])  # what enters each layer
    has = spike.along(states[0][spike.peak + 1]) >= 0.5
    assert int(has.sum()) < TEXTS  # some do not become such a place, and are left out
    _, after, before = map(int, re.findall(r"\d+", found["state"].note))
    for own, number in zip(states, ("", "ordinary_"), strict=True):
        unit = torch.nn.functional.normalize(own[:, has], dim=-1)
        pairs = torch.triu_indices(unit.shape[1], unit.shape[1], 1)
        between = (unit[:, pairs[0]] * unit[:, pairs[1]]).sum(-1).mean(1)
        assert found["state"].get(f"{number}before") == pytest.approx(float(between[before]), abs=1e-4)
        assert found["state"].get(f"{number}after") == pytest.approx(float(between[after]), abs=1e-4)


@torch.no_grad()
def test_values_are_those_of_plain_projections(spike, found):
    model, ids, rows = spike.survey.target.hf, spike.survey.ids[:TEXTS], torch.arange(TEXTS)
    reads = spike.survey.received(spike.place.mask).nanmean(-1) > 0.3
    said, after = map(int, re.findall(r"\d+", found["state"].note)[:2])
    last = min(spike.layers[1] + 1, len(reads) - 1)
    heads = [(layer, head) for layer, head in reads.nonzero().tolist() if after <= layer <= last]
    with reading([block.self_attn.v_proj for block in blocks(model)], "output") as values:
        model(ids)
    at = ordinary_positions(ids, 0)
    for where, number in ((torch.zeros_like(at), "after"), (at, "ordinary_after")):
        of_value = []
        for layer, head in heads:
            norms = values[layer].unflatten(-1, (-1, model.config.head_dim)).norm(dim=-1)
            norms = norms[..., head * norms.shape[2] // reads.shape[1]]
            of_value.append(norms[rows, where] / norms[:, 1:].median(1).values)
        assert found["value"].get(number) == pytest.approx(float(torch.stack(of_value).mean()), abs=1e-3)
    assert len(heads) == said


def test_where_nothing_makes_another_such_place_nothing_is_said(spike):
    assert constancy_of(spike, spike.layers[0], (), 0) == []
