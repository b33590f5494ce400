"""The latest queries of each layer, by which SnapKV and others choose: their size, and that they follow their rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from kv_kit import decode, prompts
from kv_kit import shallow_of as model_of
from transformers import DynamicCache

from sinkscope.engine.actor import Actor
from sinkscope.engine.run import Run
from sinkscope.engine.step import Step
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv import SnapKV
from sinkscope.kv.keeper import LATEST_QUERIES
from sinkscope.sparse.serve import LoopServe


@dataclass(frozen=True)
class Looking(Intervention):
    """Notes what is known about the cache after each call."""

    states: list[Any] = field(default_factory=list)

    def enter(self, run: Run, key: int) -> None:
        run.act(Note(self.states))


@dataclass
class Note(Actor):
    """Notes the state of the rows after each call."""

    states: list[Any]

    def after(self, step: Step) -> None:
        self.states.append(step.state)


@pytest.mark.parametrize(
    ("voter", "family"),  # GPT-2 makes queries, keys and values in one tensor
    [(SnapKV(budget=12), "gpt2"), (SnapKV(budget=900), "llama"), (LoopServe(12), "gpt2")],
    ids=repr,
)
def test_only_the_latest_queries_stay_and_they_are_counted(voter, family):
    model = model_of(family)
    ids, mask = prompts([600], 3)
    looking, cache = Looking(), DynamicCache(config=model.config)
    with (voter | looking).on(model) as run:
        decode(model, ids, mask, 600, cache)
        queries = looking.states[-1].known[LATEST_QUERIES].by_layer.values()
        kept = sum(latest.query.nbytes for latest in queries)
        stored = sum(one.untyped_storage().nbytes() for latest in queries for one in (latest.query,))
        assert len(queries) == 2 and kept == stored
        assert all(latest.query.shape[2] <= 64 for latest in queries)
        layers = [part for layer in cache.layers for part in (layer, layer.whole_layer) if part is not None]
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        assert run.usage[0].decoding_bytes >= held + sum(latest.query.nbytes for latest in queries)
