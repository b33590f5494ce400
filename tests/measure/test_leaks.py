"""Nothing of a model stays in memory when its measurement is over: objects are counted, and the process weighed."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
from organisms import organism

import sinkscope as ss


@pytest.mark.slow
def test_a_measurement_leaves_no_object_of_its_model(tmp_path):
    """Modules, tensors and hooks of one call are gone before the next one, also of a live model that goes away."""
    folder = organism("llama", 2, n_layers=4).save(tmp_path / "model")

    def counted():
        gc.collect()
        found = (type(one) for one in gc.get_objects())
        kept = (kind for kind in found if issubclass(kind, torch.nn.Module | torch.Tensor))
        return Counter(kind.__name__ for kind in kept)

    def measure():
        ss.find_sinks(folder, max_repeats=8)
        made = organism("llama", 2, n_layers=4)
        ss.find_sinks(made.model, tokenizer=made.tokenizer, max_repeats=8)

    measure()
    before = counted()
    measure()
    assert counted() - before == Counter()
