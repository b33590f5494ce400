"""Signals of repetition against their definitions, written out another way."""

from __future__ import annotations

import math
import struct
import zlib
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from loop_texts import novelty

from sinkscope.loops import (
    Tail,
    compression_ratio,
    ends_in_loop,
    is_loop,
    tail_period,
    type_token_ratio,
)
from sinkscope.loops.text import signals
from sinkscope.loops.text.signals import WindowNovelty

IDS = st.lists(st.integers(0, 4), max_size=60)
TAILED = st.builds(  # a repetition after anything
    lambda head, piece, copies, cut: head + piece * copies + piece[:cut],
    IDS,
    st.lists(st.integers(0, 3), min_size=1, max_size=9),
    st.integers(0, 6),
    st.integers(0, 8),
)


@given(TAILED)
def test_the_ratios_are_those_of_their_definitions(ids):
    if not ids:
        assert math.isnan(type_token_ratio(ids)) and math.isnan(compression_ratio(ids))
        return
    assert type_token_ratio(ids) == pytest.approx(sum(1 / Counter(ids)[i] for i in ids) / len(ids))
    for form in (np.array(ids), torch.tensor(ids)):
        assert type_token_ratio(form) == type_token_ratio(ids) and compression_ratio(form) == compression_ratio(ids)
        assert tail_period(form) == tail_period(ids) and ends_in_loop(form) == ends_in_loop(ids)
    assert compression_ratio(ids) == len(zlib.compress(struct.pack(f"<{len(ids)}I", *ids), 9)) / (4 * len(ids))


def _brute(ids: list[int], repeats: float, shortest: int, longest: int) -> Tail | None:
    """Every period, counted backwards token by token."""
    tails = []
    for period in range(1, longest + 1):
        equal = 0
        while period + equal < len(ids) and ids[-1 - equal] == ids[-1 - equal - period]:
            equal += 1
        if equal + period >= max(repeats * period, shortest):
            tails.append((equal + period, -period))
    if not tails:
        return None
    covered, period = max(tails)
    return Tail(-period, len(ids) - covered, covered / -period)


@given(TAILED, st.sampled_from([2, 2.5, 3]), st.integers(0, 12), st.integers(1, 40))
@example([1, 2, 3, 3, 3] * 3, 3, 0, 40)
def test_tail_period_is_that_of_brute_force(ids, repeats, shortest, longest):
    found = tail_period(ids, repeats=repeats, shortest=shortest, longest=longest)
    assert found == _brute(ids, repeats, shortest, min(longest, max(len(ids) - 1, 0)))
    if found is not None:
        tail = ids[found.start :]
        assert tail == (tail[: found.period] * len(tail))[: len(tail)]
        assert found.start == 0 or ids[found.start - 1] != ids[found.start - 1 + found.period]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(2, 30), st.integers(1, 4), st.integers(1, 20))
@example([0, 1, 0], 2, 1, 5)
def test_novelty_is_that_of_its_definition(ids, window, n, span):
    window = max(window, n)
    state = WindowNovelty(window, n, span)
    for place, token in enumerate(ids, 1):
        assert state.add(token) == pytest.approx(novelty(ids[:place], window=window, n=n, span=span))


def test_loop_rule_at_its_thresholds(monkeypatch):
    """Eq. 7 has <= and >=; the default length is 2,480 of 2,500."""
    loop = [3, 4, 5, 6] * 625
    assert is_loop(loop) and is_loop(loop[:2480]) and not is_loop(loop[:2479]) and is_loop(loop[:2479], None)
    assert is_loop(loop[:992], 1000) and not is_loop(loop[:991], 1000)
    ids = [*range(20)] * 5
    ratio = compression_ratio(ids)
    monkeypatch.setattr(signals, "THETA_CR", ratio)
    assert type_token_ratio(ids) == 0.2 and is_loop(ids, None)
    for threshold, less in (("THETA_CR", ratio - 1e-9), ("THETA_TTR", 0.19)):
        with monkeypatch.context() as patched:
            patched.setattr(signals, threshold, less)
            assert not is_loop(ids, None)
    assert not is_loop([], None)


def test_only_the_last_tokens_decide_whether_an_output_ends_in_a_loop():
    ids = [*range(2000), *[1, 2] * 128]
    assert ends_in_loop(ids) and not is_loop(ids, None)
    assert not ends_in_loop([*[1, 2] * 128, *range(200)])
