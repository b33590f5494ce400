"""find_sinks says the same of a folder that does not fit in memory and of the model in memory."""

from __future__ import annotations

from collections import Counter

import pytest
from attack_kit import text_file
from organisms import organism

import sinkscope.opening.load as opening
from sinkscope.sinks.spikes.find import find_sinks


def test_find_sinks_streams_a_folder_that_does_not_fit(tmp_path, monkeypatch):
    deep = organism("llama", 1, n_layers=7)
    text = text_file(deep, tmp_path, 20)
    memory = find_sinks(deep.model, tokenizer=deep.tokenizer, text=text)
    monkeypatch.setattr(opening, "LAYER_BYTES", 0)  # no layer stays in memory
    target = opening.open_target(deep.save(tmp_path / "m"))
    reads, tensors = Counter[str](), target.store.source.tensors
    monkeypatch.setattr(target.store.source, "tensors", lambda names: reads.update(names) or tensors(names))
    streamed = find_sinks(target, text=text)
    assert max(reads.values()) <= 15 and streamed.needed == memory.needed
    assert streamed.first_token_norm == pytest.approx(memory.first_token_norm, rel=1e-4)
    at_place, other = (one.spikes[0].named("effects", "at place") for one in (streamed, memory))
    assert at_place.get("heads") == other.get("heads")
    assert "loss" not in at_place.numbers and "loss" in other.numbers
