"""Candidates and their controls, on layers whose random neurons matter too."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from attack_kit import text_file
from organisms import SharedSink, organism
from organisms import shared_sink as make_shared_sink
from raw_kit import residuals, zeroed
from torch import Tensor

from sinkscope.hooks.trace.layer_view import view_layer
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.results.parts import Neuron, sites_of
from sinkscope.sinks.find.find import find_sinks
from sinkscope.sinks.find.layer_scan import LayerScan, scan_layers
from sinkscope.sinks.find.neurons import verify_neurons
from sinkscope.sinks.removal.search import random_sets

pytestmark = pytest.mark.few_texts


shared_sink = cache(make_shared_sink)  # no test changes it


def at_layer(target: Target, ids: Tensor, layer: int) -> LayerScan:
    """The first token, with this layer as the sink layer, whatever a scan of these texts says."""

    class Scan(LayerScan):
        sink_layer = layer

    scan = scan_layers(target, ids, whole=True)
    return Scan(target, ids, scan.at, scan.layers)


def scan_of(shared: SharedSink) -> LayerScan:
    """The organism's own layer is the sink layer, whatever a scan of these texts says."""
    return at_layer(target_of(shared.organism.model), shared.organism.natural(), shared.sink[0])


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_cause_takes_more_than_the_strongest_of_twenty_random_neurons(family, tmp_path):
    """The bystander is a candidate and takes a tenth of the norm with it, and some random neurons take more."""
    shared = shared_sink(family)
    o = shared.organism
    result = find_sinks(o.model, tokenizer=o.tokenizer, max_repeats=8, text=text_file(o, tmp_path, 8))
    assert 0.1 < shared.bystander_drop < shared.helper_drop < shared.sink_drop
    by_site = {neuron.site: neuron for neuron in result.neurons}
    for site, drop in ((shared.bystander, shared.bystander_drop), (shared.sink, shared.sink_drop)):
        assert by_site[site].ablation_drop == pytest.approx(drop, abs=0.02)
        assert by_site[site].control_drop == pytest.approx(shared.helper_drop, abs=0.02)
    assert [neuron.site for neuron in result.causal] == [shared.sink]


def test_a_set_is_held_against_the_strongest_of_the_random_sets(monkeypatch, tmp_path):
    """One of the random sets is a neuron of the set itself, which takes a part of the spike away."""
    o = organism("qwen3", 2, kind="spread")
    part, idle = o.truth.neurons[-1], (o.truth.sink_layer, max(site[-1] for site in o.truth.neurons) - 1)
    assert idle not in o.truth.neurons
    sets = [(Neuron.of(site),) for site in [*[idle] * 19, part]]
    monkeypatch.setattr("sinkscope.sinks.find.sets.random_sets", lambda *_: sets)
    found = find_sinks(o.model, tokenizer=o.tokenizer, max_repeats=8, text=text_file(o, tmp_path, 8))
    ids = o.natural(4, 40)
    before = residuals(o.model, ids)[o.truth.sink_layer, :, 0]
    with zeroed(o.model, (part,)):
        after = residuals(o.model, ids)[o.truth.sink_layer, :, 0]
    spike = before.mean(0)
    left = float(((after @ spike) / (before @ spike)).mean())
    assert set(sites_of(found.minimal)) == set(o.truth.neurons)
    assert 0.9 > left == pytest.approx(found.spikes[0].claims[0].control.value, abs=0.03)


def test_a_set_is_held_against_twenty_random_sets_of_other_neurons_of_its_layers():
    target = target_of(organism("llama", 0).model)
    layers, candidates = (0, 1, 1), [(1, neuron) for neuron in range(target.d_mlp - 3)]
    chosen = tuple(map(Neuron.of, [(0, 5), (1, 1), (1, 2)]))
    sets = [sites_of(drawn) for drawn in random_sets(target, chosen, 0, tuple(map(Neuron.of, candidates)))]
    assert len(sets) == 20 and len(set(sets)) > 10
    for drawn in sets:
        assert tuple(layer for layer, _ in drawn) == layers and len(set(drawn)) == 3
        assert not {(0, 5), *candidates} & set(drawn)


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_neutral_values_are_those_of_later_positions(family):
    """Half of the positions of these texts are first tokens, where sink neurons are on: they would move the median."""
    o = organism(family, 3)
    target, ids, layer = target_of(o.model), o.natural(5, 2), o.truth.sink_layer
    scan = at_layer(target, ids, layer)
    everywhere = view_layer(target, layer, ids, torch.ones_like(ids, dtype=torch.bool))
    moved = 0.0
    for neuron in verify_neurons(scan, 6, seed=0):
        values = everywhere.post[:, neuron.neuron + (neuron.expert or 0) * target.d_mlp]
        if everywhere.routing is not None:
            weights = everywhere.routing[:, neuron.expert]
            values = torch.where(weights > 0, values / weights, torch.nan)
        later = values[1::2].nanmedian()
        assert neuron.neutral_post == pytest.approx(float(later.nan_to_num()))  # 0 for an expert that no token chose
        moved = max(moved, float((later - values.nanmedian()).abs()))
    assert moved > 0.01


def test_a_cause_takes_a_tenth_of_the_norm():
    """Random neurons write nothing here, so the bystander takes more than they do, and yet too little."""
    shared = make_shared_sink("llama", aside=0.3, support=0.0)
    sink, bystander = verify_neurons(scan_of(shared), 2, seed=0)
    assert bystander.site == shared.bystander
    assert bystander.control_drop < 0.001 < bystander.ablation_drop == pytest.approx(shared.bystander_drop, abs=0.005)
    assert sink.causal and not bystander.causal


def test_causes_of_another_stage_are_held_against_random_neurons_of_that_stage():
    """The layer after the sink layer stands in for the sink layer, so that the shared sink is an earlier stage."""
    shared = shared_sink("llama")
    scan = scan_of(shared)
    assert scan.stages == [shared.sink[0]]
    verified = verify_neurons(at_layer(scan.target, scan.ids, shared.sink[0] + 1), 2, seed=0)
    earlier = [neuron for neuron in verified if neuron.layer == shared.sink[0]]
    assert {neuron.site for neuron in earlier} == {shared.sink, shared.bystander}
    assert [neuron.control_drop for neuron in earlier] == pytest.approx([shared.helper_drop] * 2, abs=0.02)
    assert [neuron.site for neuron in verified if neuron.causal] == [shared.sink]
