"""Caches of somebody else's as methods: any function that check-cache takes."""

from __future__ import annotations

import pytest
from bench_kit import tiny
from refusals import refused

from sinkscope.bench.answer import answer_rows
from sinkscope.bench.methods import read_method
from sinkscope.kv import StreamingLLM
from sinkscope.opening.live import target_of

MINE = """
from contextlib import contextmanager
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer
from sinkscope.kv import StreamingLLM

class Latest(DynamicLayer):
    def __init__(self, budget):
        super().__init__()
        self.budget, self.seen = budget, 0

    def update(self, keys, values, *args, **kwargs):
        keys, values = super().update(keys, values)
        self.seen += keys.shape[2]
        self.keys, self.values = keys[:, :, -self.budget :].clone(), values[:, :, -self.budget :].clone()
        return keys, values

def latest(budget, config):
    return Cache(layers=[Latest(budget) for _ in range(config.num_hidden_layers)])

def whole():
    return DynamicCache()

def policy(budget):
    return StreamingLLM(budget)

@contextmanager
def nothing():
    yield

def press(model):
    return nothing()

def needs(x):
    return whole()

def number():
    return 5

def refuses(model):
    raise ValueError("no such model here")

three = 3
"""
ROWS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8]]


@pytest.fixture(autouse=True)
def _mine(tmp_path, monkeypatch):
    (tmp_path / "mine_caches.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)


def answered(method: str):
    return answer_rows(target_of(*tiny()), ROWS, 8, read_method(method).make())


def told(method: str) -> list[tuple[list[int], object, object]]:
    return [(one.tokens, one.costs["read"], one.costs["cached_peak"]) for one in answered(method)]


def test_a_cache_a_context_manager_and_a_policy_are_methods():
    full = told("full")
    assert told("mine_caches:whole") == told("mine_caches:press") == full
    assert told("mine_caches:policy:6") == told("streaming:6")
    assert str(read_method("mine_caches:latest", 0.5)) == "mine_caches:latest:0.5"
    of_three = told("mine_caches:latest:0.5")
    assert [(read, peak) for _, read, peak in of_three] == [(3.0, 3.0)] * 2, "half of the longest prompt"
    assert read_method("mine_caches:policy:6").make()(target_of(*tiny()), 8) == StreamingLLM(6)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("mine_caches:needs", "mine_caches:needs needs x=: expected a function of a model"),
        ("mine_caches:three", "mine_caches:three is no policy and no module:function"),
        ("mine_caches:missing", "has no attribute 'missing'"),
        ("mine_caches:whole:3", "'budget=3' is no setting, or is given twice: it has none"),
        ("mine_caches:number", "the factory gave a int"),
        ("mine_caches:refuses", "method 'mine_caches:refuses' cannot be made for"),
    ],
)
def test_what_is_no_cache_is_refused_in_a_line(method, says):
    with refused(words=[says]):
        answered(method)
