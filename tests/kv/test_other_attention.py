"""Attention that a module computes itself, and that of indexers: no policy acts on it, and it is said."""

from __future__ import annotations

from functools import partial

import pytest
from organisms.decoders import byte_tokenizer, decoder
from organisms.examine import model_state
from refusals import refused

import sinkscope as ss
from sinkscope.kv import H2O, Full, Observe
from sinkscope.loops.barcode import barcode
from sinkscope.opening.live import target_of
from sinkscope.sparse.shapes import AShape

WAYS = [Full(), H2O(20), ss.LoopGuard(budget=20), ss.LoopServe(20), AShape(), Observe(lambda _: None)]


@pytest.mark.parametrize("model_type", ["bloom", "falcon", "gpt_neo", "deepseek_v32"])
def test_nothing_acts_on_attention_inside_modules(model_type):
    model = decoder(model_type)
    target_of(model)
    before = model_state(model)
    entered = [way.on(model).__enter__ for way in WAYS]
    for act in [*entered, partial(barcode, model, ids=[5, 6, 7], tokenizer=byte_tokenizer())]:
        with refused(f"a model of type '{model_type}' computes attention inside its modules.*: use another model for"):
            act()
        assert model_state(model) == before
