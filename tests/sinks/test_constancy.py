"""Why heads read a place: states and values are those of plain hooks and masks."""

from __future__ import annotations

import plain_hooks as plain
import pytest
import torch
from torch.nn.functional import normalize

from sinkscope.sinks.spikes.conditions import TEXTS, ordinary_positions
from sinkscope.sinks.spikes.constancy import constancy_of
from sinkscope.sinks.spikes.find import sinks_of
from sinkscope.sinks.spikes.why_tables import Cause, ConstancyKey


@pytest.fixture(scope="module")
def read(bundled):
    """The spike, the texts and their ordinary positions, what is said, and the layers before and after the spike."""
    spike = sinks_of(bundled).spikes[0].reported
    ids = spike.survey.ids[:TEXTS]
    found = {row.key: row for row in constancy_of(spike, spike.layers[0], (Cause.ALONE,), 0)}
    state = found[ConstancyKey.STATE]
    return spike, ids, ordinary_positions(ids, 0), found, (state.readers, state.since, state.beside)


@torch.no_grad()
def test_states_are_those_of_plain_masks(bundled, read):
    spike, ids, at, found, (_, after, before) = read
    rows, positions, length = torch.arange(TEXTS), torch.arange(ids.shape[1]), ids.shape[1]
    causal = torch.ones(TEXTS, 1, length, length, dtype=torch.bool).tril()
    alone = causal.clone()
    alone[rows, 0, at] = positions == at[:, None]
    has = None
    for mask, kind in ((alone, ""), (causal, "ordinary_")):
        seen = bundled.target.hf(ids, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states
        states = torch.stack(seen)[:, rows, at]  # what enters each layer
        has = spike.along(states[spike.peak + 1]) >= 0.5 if has is None else has
        unit = normalize(states[:, has], dim=-1)
        count = unit.shape[1]
        assert 1 < count < TEXTS  # some do not become such a place, and are left out
        between = ((unit @ unit.mT).sum((1, 2)) - count) / (count * (count - 1))
        numbers = [found[ConstancyKey.STATE][f"{kind}{when}"].value for when in ("before", "after")]
        assert numbers == pytest.approx(between[[before, after]].tolist(), abs=1e-4)


@torch.no_grad()
def test_values_are_those_of_plain_projections(bundled, read):
    spike, ids, at, found, (said, after, _) = read
    model, rows = bundled.target.hf, torch.arange(TEXTS)
    reads = plain.attention(model, spike.survey.ids)[..., 1:, 0].mean((1, 3)) > 0.3
    heads = [(layer, head) for layer, head in reads.nonzero().tolist() if after <= layer <= spike.layers[1] + 1]
    assert len(heads) == said
    with plain.reading([block.self_attn.v_proj for block in plain.blocks(model)], "output") as values:
        model(ids)
    for where, number in ((0 * at, "after"), (at, "ordinary_after")):
        of_value = []
        for layer, head in heads:
            norms = values[layer].unflatten(-1, (-1, model.config.head_dim)).norm(dim=-1)
            norms = norms[..., head * norms.shape[2] // reads.shape[1]]
            of_value.append((norms[rows, where] / norms[:, 1:].median(1).values).mean())
        assert found[ConstancyKey.VALUE][number].value == pytest.approx(float(sum(of_value)) / said, abs=1e-3)


def test_where_nothing_makes_another_such_place_nothing_is_said(read):
    assert constancy_of(read[0], read[0].layers[0], (), 0) == []
