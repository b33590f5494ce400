"""find_sinks on models given by name: the same answer from a folder, a file and memory, and no layer read in vain."""

from __future__ import annotations

import math

import pytest
from attack_kit import text_file
from organisms import organism
from organisms.plan import make_plan

import sinkscope.opening.open as opening
from sinkscope.sinks.find.find import find_sinks

LAYERS = 9


def test_folder_is_read_upward_and_no_further_than_needed(tmp_path):
    """A Llama of 9 layers whose sink is in the first three, so that reading may stop before the end."""
    seed = next(s for s in range(200) if make_plan("llama", s, n_layers=LAYERS).sink_layer in (1, 2))
    deep = organism("llama", seed, n_layers=LAYERS)
    deep.save(tmp_path / "m")
    target = opening.open_target(tmp_path / "m")
    text = text_file(deep, tmp_path, 8)
    result = find_sinks(target, max_repeats=16, text=text)
    assert result.sink_layer == deep.truth.sink_layer
    assert {n.site for n in result.causal} == set(deep.truth.neurons)
    assert result.layers_read == deep.truth.sink_layer + 1 + math.ceil(LAYERS / 3)
    assert result.model.n_layers == LAYERS > len(result.spike_norm) == result.layers_read
    assert result.sink_rate is None
    read = {int(name.split("layers.")[1].split(".")[0]) for name in target.store.source.read if "layers." in name}
    assert read == set(range(result.layers_read))
    assert max(target.store.reads.values()) <= 6  # one walk scans, three repeat, two search from the sink layer on
    whole = find_sinks(tmp_path / "m", max_repeats=16, text=text, all_layers=True)
    assert whole.layers_read == LAYERS and whole.sink_rate is not None
    assert whole.sink_layer == result.sink_layer and whole.neurons == result.neurons
    memory = find_sinks(deep.model, tokenizer=deep.tokenizer, max_repeats=16, text=text)
    assert memory.spike_norm == pytest.approx(whole.spike_norm, rel=1e-4)
