"""Nothing of a model stays in memory when its measurement is over: objects are counted, and the process weighed."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
from kv_kit import prompts, shallow_of
from organisms import organism

import sinkscope as ss
from sinkscope.engine.tap import attention_rows
from sinkscope.kv import H2O, Observe, SnapKV
from sinkscope.loops.guard import LoopGuard
from sinkscope.opening.load import target_of
from sinkscope.sparse.serve import LoopServe


@pytest.mark.slow
def test_a_measurement_leaves_no_object_of_its_model(tmp_path):
    """Modules, tensors and hooks of one call are gone before the next one, also of a live model that goes away."""
    folder = organism("llama", 2, n_layers=4).save(tmp_path / "model")

    def counted():
        gc.collect()
        return Counter(type(one) for one in gc.get_objects() if isinstance(one, torch.nn.Module | torch.Tensor))

    def measure():
        ss.find_sinks(folder)
        made = organism("llama", 2, n_layers=4)
        ss.find_sinks(made.model, tokenizer=made.tokenizer)

    measure()
    before = counted()
    measure()
    assert counted() - before == Counter()


def test_a_run_is_gone_when_nobody_holds_it():
    """Before Python looks for circles: in those that stayed were queries, keys and values of every layer."""
    ways = SnapKV(budget=8), H2O(budget=8), LoopGuard(40), LoopServe(8, shortest=0)
    model = shallow_of("llama")
    ids = prompts([20])[0]

    def circles():
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for way in ways:
                reading = attention_rows(target_of(model), lambda *_: None)
                with way.on(model), Observe(lambda rows: None).on(model), reading:
                    model.generate(ids, max_new_tokens=4, do_sample=False)
                del reading
            gc.collect()
            return [one for one in gc.garbage if type(one).__module__.startswith(("sinkscope", "torch"))]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()

    gc.disable()
    try:
        circles()
        assert circles() == []
    finally:
        gc.enable()
