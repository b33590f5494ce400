"""Nothing of a model stays in memory when its measurement is over: objects are counted, and the process weighed."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from organisms import organism

import sinkscope as ss
from sinkscope.measure import Setup


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_process_that_opens_models_again_and_again_does_not_grow():
    """Memory outside Python: what the tokenizer's library remembers of a text would be 0.8 MB for every model."""

    def weight():
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def opened():
        setup = Setup.open()
        setup.tokenizer(setup.text, verbose=False)

    for _ in range(2):
        opened()
    before = weight()
    for _ in range(3):
        opened()
    assert (weight() - before) / 3 < 0.2e6


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
