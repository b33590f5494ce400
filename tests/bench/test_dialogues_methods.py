"""Methods of dialogues written with their settings: what they become, at the paper's sizes and at an equal share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sinkscope as ss
from sinkscope.bench.methods import at_settings, check_methods, name_of, read_method
from sinkscope.errors import SinkscopeError
from sinkscope.kv import H2O, AdaKV, AShape, Full, MInference, Progressive, SnapKV, StreamingLLM, TriShape
from sinkscope.kv.shapes import shape_at, share_lines
from sinkscope.lines.choice import HeadLines, minference_lines


def test_methods_with_settings_are_what_they_say() -> None:
    made = {
        text: read_method(text).make(200)
        for text in (
            "loopserve:alpha=0.98:first=0",
            "snapkv:window=32:pooling=max",
            "progressive-0:every=8",
            "h2o:budget=0.5",
            "loopserve-p",
            "loopserve-d:interval=4",
            "loopserve:dense_above=none",
            "progressive:per_head=true",
            "tri-shape:dense_rows=9",
            "loopserve:paper",
            "loopserve-p : paper : recent=3",
        )
    }
    printed: Any = {"alpha": 0.955, "dense_rows": 0, "variant": "faithful", "shortest": 0}
    printed |= {"begin": 1, "local": 1, "sharp": None, "checked": 0}
    assert list(made.values()) == [
        ss.LoopServe(alpha=0.98, first=0, budget=200),
        SnapKV(window=32, pooling="max", budget=200),
        Progressive(every=8, after=0, budget=200),
        H2O(budget=0.5),
        ss.LoopServe(decode=False),
        ss.LoopServe(prefill=False, interval=4, budget=200),
        ss.LoopServe(budget=200),
        Progressive(per_head=True, budget=200),
        TriShape(dense_rows=9),
        ss.LoopServe(**printed, budget=200),
        ss.LoopServe(**printed, decode=False, recent=3),
    ]
    spoken = ("h2o : recent=.5 : budget=64", "progressive:per_head=true", "loopserve :paper: alpha=.9")
    assert [read_method(text).spec for text in spoken] == [
        "h2o:budget=64:recent=0.5",
        "progressive:per_head=true",
        "loopserve:paper:alpha=0.9",
    ]
    assert name_of("loopserve:paper:alpha=0.9") == "loopserve"
    assert [m.spec for m in check_methods(["h2o:recent=0.5:budget=64", "h2o", "h2o:budget=64:recent=0.50"])] == [
        "h2o:budget=64:recent=0.5",
        "h2o",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h2o:recnt=1", "method 'h2o:recnt=1': h2o has no setting 'recnt=1': it has budget, first, last, every, mode"),
        ("h2o:recent", "h2o has no setting 'recent'"),
        ("h2o:paper", "h2o has no setting 'paper'"),
        ("stop-pattern:paper", "stop-pattern has no setting 'paper': it has none"),
        ("loopserve:alpha=0.9:paper", "loopserve has no setting 'paper'"),
        ("h2o:recent=much", "method 'h2o:recent=much': recent='much': expected a number"),
        ("h2o:recent=nan", "recent='nan': expected a number"),
        ("h2o:mode=keep", "mode='keep': expected 'evict' or 'select'"),
        ("progressive:every=x", "every='x': expected a whole number from 1"),
        ("loopserve:prefill=1", "prefill=1: expected True or False"),
        ("h2o:first=1:first=2", "first is given twice"),
        ("loopserve-0:first=2", "loopserve-0 has no setting 'first=2'"),
        ("loopserve-p:budget=9", "loopserve-p has no setting 'budget=9': it has alpha, sample"),
        ("full:budget=9", "full has no setting 'budget=9': it has none"),
        ("a-shape:budget=64", ""),
        ("loopserve:alpha=2", "alpha=2: expected a share"),
        ("a-shape:budget=0.5:first=2", "a share of the context as budget decides the other sizes"),
    ],
)
def test_settings_that_are_none_are_refused(text: str, says: str) -> None:
    with pytest.raises(SinkscopeError) as error:
        read_method(text).make(200)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_settings_of_the_paper_and_at_an_equal_share() -> None:
    methods = [read_method(text) for text in at_settings([], "paper")]
    paper = {method.name + ":paper" * method.paper: method.make(1) for method in methods}
    assert paper == {
        "full": Full(),
        "h2o": H2O(budget=1024),
        "snapkv": SnapKV(budget=1024),
        "adakv": AdaKV(budget=1024),
        "streaming": StreamingLLM(budget=4096),
        "a-shape": AShape(first=128, local=4096),
        "tri-shape": TriShape(first=128, local=4096, dense_rows=128),
        "minference": MInference(),
        "loopserve": ss.LoopServe(budget=1024, interval=16, shortest=0),
        "loopserve:paper": ss.LoopServe.paper(budget=1024, interval=16),
    }
    names = ["loopserve-p:paper", "loopserve-d:interval=8", "tova", "h2o:budget=64", "a-shape:budget=0.5"]
    assert at_settings(names, "paper") == [
        "loopserve-p:paper:shortest=0",
        "loopserve-d:budget=1024:interval=8",
        "tova:budget=1024",
        "h2o:budget=64:recent=0.5",
        "a-shape:budget=0.5",
    ]
    names = "full h2o snapkv:window=8 a-shape tri-shape:first=2 loopserve loopserve-p loopserve-d".split()
    assert at_settings(names, "equal", 0.25) == [
        "full",
        "h2o:budget=0.25",
        "snapkv:budget=0.25:window=8",
        "a-shape:budget=0.25",
        "tri-shape:first=2",
        "loopserve:budget=0.25:shortest=0",
        "loopserve-p:shortest=0",
        "loopserve-d:budget=0.25",
    ]
    for share in (2, 0.0, 1.5):
        with pytest.raises(SinkscopeError, match="expected a share of the context"):
            at_settings(names, "equal", share)


@given(st.integers(4, 5000), st.floats(0.01, 1.0))
def test_first_and_local_tokens_are_the_share(keys: int, share: float) -> None:
    shape = shape_at(share, keys)
    tokens = max(1, int(share * keys))
    assert shape.first + shape.local == tokens and shape.local >= 1
    assert shape.first >= min(4, tokens - 1)
    if tokens >= 200:
        assert shape.first / shape.local == pytest.approx(128 / 4096, rel=0.25)


@given(st.integers(0, 50), st.floats(0.05, 0.9), st.sampled_from([(30, 30), (64, 41), (50, 7)]))
@settings(max_examples=25, deadline=None)
def test_lines_of_a_share_are_as_many_as_fit(seed: int, share: float, size: tuple[int, int]) -> None:
    keys, queries = size
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.randn(4, queries, 8, generator=generator), torch.randn(2, keys, 8, generator=generator)
    lines = share_lines(query, key, share, last=8)
    every = int(lines.lengths().sum())
    for head in range(4):
        slash, vertical = int(lines.slash[head].sum()), int(lines.vertical[head].sum())
        assert vertical == max(1, slash * 1000 // 6096)
        assert bool(lines.slash[head, 0])
        own = HeadLines(lines.vertical[head : head + 1], lines.slash[head : head + 1], queries)
        cells = int(own.rows(torch.arange(keys - queries, keys)).sum())
        assert cells <= share * every or slash == 1
        q, k = query[head : head + 1], key[head // 2 : head // 2 + 1]
        more = minference_lines(q, k, max(1, (slash + 1) * 1000 // 6096), slash + 1, last=8, first=0, local=1)
        assert slash == keys or int(more.cells()) > share * every
