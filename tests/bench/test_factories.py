"""Policies of somebody else's as methods: a class, or a function of the budget."""

from __future__ import annotations

import pytest
from bench_kit import tiny
from refusals import refused

from sinkscope.bench.answer import answer_rows
from sinkscope.bench.methods import make_method, read_method
from sinkscope.kv import StreamingLLM
from sinkscope.opening.live import target_of

MINE = """
from transformers import DynamicCache
from sinkscope.kv import StreamingLLM

class Mine(StreamingLLM):
    pass

def policy(budget):
    return StreamingLLM(budget)

def whole():
    return DynamicCache()

def needs(x):
    return policy(x)

three = 3
"""
ROWS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8]]


@pytest.fixture(autouse=True)
def _mine(tmp_path, monkeypatch):
    (tmp_path / "mine_policies.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)


def told(method: str) -> list[tuple[object, ...]]:
    answers = answer_rows(target_of(*tiny()), ROWS, 8, make_method(method))
    return [(one.tokens, one.metrics["read"], one.metrics["cached_peak"]) for one in answers]


def test_a_class_and_a_function_of_the_budget_are_methods():
    assert told("mine_policies:policy:6") == told("mine_policies:Mine:6") == told("streaming:6") != told("full")
    assert read_method("mine_policies:policy", 0.5) == "mine_policies:policy:0.5"
    assert make_method("mine_policies:policy:6") == StreamingLLM(6)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("mine_policies:needs:3", "method mine_policies:needs:3 cannot be made: needs() got an unexpected"),
        ("mine_policies:three", "method mine_policies:three cannot be made: 'int' object is not callable"),
        ("mine_policies:missing", "has no attribute 'missing'"),
        (
            "mine_policies:whole",
            "method mine_policies:whole is a DynamicCache, no policy: check-cache",
        ),
    ],
)
def test_what_is_no_policy_is_refused_in_a_line(method, says):
    with refused(words=[says]):
        told(method)
