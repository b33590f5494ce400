"""The latest queries of each layer, by which SnapKV and others choose, are no part of a prompt that stays in memory."""

from __future__ import annotations

import pytest
from kv_kit import decode, prompts
from kv_kit import shallow_of as model_of
from transformers import DynamicCache

from sinkscope.engine.step import ROWS
from sinkscope.kv import SnapKV
from sinkscope.kv.keeper import LATEST_QUERIES
from sinkscope.sparse.serve import LoopServe


@pytest.mark.parametrize(
    ("voter", "family"),  # GPT-2 makes queries, keys and values in one tensor
    [(SnapKV(budget=12), "gpt2"), (SnapKV(budget=900), "llama"), (LoopServe(12), "gpt2")],
    ids=repr,
)
def test_only_the_latest_queries_stay_and_they_are_counted(voter, family):
    model, cache = model_of(family), DynamicCache()
    with voter.on(model) as run:
        decode(model, *prompts([600], 3), 600, cache)
        queries = [one.query for one in getattr(cache, ROWS)[run.number].known[LATEST_QUERIES].by_layer.values()]
        kept = sum(query.nbytes for query in queries)
        assert len(queries) == 2 and kept == sum(query.untyped_storage().nbytes() for query in queries)
        assert all(query.shape[2] <= 64 for query in queries)
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert run.usage[0].decoding_bytes >= held + kept
