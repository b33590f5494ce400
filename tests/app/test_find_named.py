"""find_sinks on models given by name: one answer from a folder that fits in memory, one that does not, and memory."""

from __future__ import annotations

import pytest
from attack_kit import text_file
from organisms import organism

import sinkscope.measure.setup as setups
import sinkscope.opening.load as opening
from sinkscope.sinks.spikes.find import find_sinks

LAYERS = 9


def test_find_sinks_streams_a_folder_that_does_not_fit(tmp_path, monkeypatch):
    deep = organism("llama", 1, n_layers=LAYERS)
    deep.save(tmp_path / "m")
    text = text_file(deep, tmp_path, 20)
    memory = find_sinks(deep.model, tokenizer=deep.tokenizer, max_repeats=16, text=text)
    assert {neuron.site for neuron in memory.needed} == set(deep.truth.neurons)
    assert opening.fits_in_memory(tmp_path / "m") and not opening.fits_in_memory("llama-2-7b")
    whole = find_sinks(tmp_path / "m", max_repeats=16, text=text)
    monkeypatch.setattr(setups, "fits_in_memory", lambda *_: False)
    target = opening.open_target(tmp_path / "m")
    streamed = find_sinks(target, max_repeats=16, text=text)
    assert max(target.store.reads.values()) <= 20
    for found in (whole, streamed):
        assert found.needed == memory.needed and found.conclusion() == memory.conclusion()
        spike, own = found.spikes[0], memory.spikes[0]
        assert (spike.layers, spike.without_writers.heads) == (own.layers, own.without_writers.heads)
        assert found.first_token_norm == pytest.approx(memory.first_token_norm, rel=1e-4)
    assert whole.spikes[0].without_writers.perplexity == pytest.approx(
        memory.spikes[0].without_writers.perplexity, rel=1e-4
    )
    assert streamed.spikes[0].without_writers.perplexity is None
