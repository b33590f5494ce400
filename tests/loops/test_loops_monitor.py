"""The online monitor against one that computes everything anew at every step, and on planted and honest repetition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_texts import HONEST, novelty

from experiments.loopguard.variants import OneSignal
from experiments.loopset.compare import number
from sinkscope.loops import Monitor, MonitorSettings, PaperSettings, Step, compression_ratio, tail_period
from sinkscope.loops.guard import LoopGuard
from sinkscope.loops.text.outputs import split

SMALL = {
    "window": 20,
    "novelty_n": 2,
    "novelty_span": 5,
    "theta_nov": 0.2,
    "stall": 2,
    "warmup": 10,
    "cooldown": 5,
    "stride": 3,
    "tail_longest": 8,
    "tail_shortest": 8,
    "tail_repeats": 3,
    "tail_hold": 2,
    "streak": 3,
    "theta_ttr": 0.3,
    "theta_cr": 0.4,
}
PAPER = PaperSettings()
VARIANTS = [PaperSettings(**SMALL, votes=votes) for votes in (1, 2, 3)]
# Pieces that repeat, between tokens that do not: what a run looks like, in few tokens.
RUN = st.lists(
    st.tuples(st.lists(st.integers(0, 6), min_size=1, max_size=9), st.integers(1, 12)), min_size=1, max_size=5
).map(lambda parts: [token for piece, copies in parts for token in piece * copies][:150])


def _anew(ids: list[int], p: list[float], s: PaperSettings) -> Iterator[Step]:
    """Section 5.2 read from the beginning of the output for every step."""
    signals = [_signals(ids[:t], p[:t], s) for t in range(1, len(ids) + 1)]
    last = None
    for t, (ttr, cr, streak, _, tail) in enumerate(signals, 1):
        votes = {"ttr": ttr < s.theta_ttr, "cr": cr < s.theta_cr, "p1": streak >= s.streak}
        stall = t >= s.stall and all(n < s.theta_nov for *_, n, _ in signals[t - s.stall : t])
        held = t >= s.tail_hold and all(found is not None for *_, found in signals[t - s.tail_hold : t])
        due = sum(votes.values()) >= s.votes and (stall or held)
        trigger = due and t >= s.warmup and (last is None or t > last + s.cooldown)
        if trigger:
            last = t
        yield Step(t, ttr, cr, tail, trigger)


def _signals(ids: list[int], p: list[float], s: PaperSettings) -> tuple[Any, ...]:
    window = ids[-s.window :]
    whole = ids[: len(ids) // s.stride * s.stride]
    cr = compression_ratio(whole[-s.window :])
    unsure = [i for i, value in enumerate(p) if value <= s.theta_conf]
    streak = len(p) - 1 - unsure[-1] if unsure else len(p)
    new = novelty(ids, window=s.window, n=s.novelty_n, span=s.novelty_span)
    tail = tail_period(ids, repeats=s.tail_repeats, shortest=s.tail_shortest, longest=s.tail_longest)
    return len(set(window)) / len(window), cr, streak, new, tail


def _same(a: Step, b: Step) -> bool:
    return all(x == y or (x != x and y != y) or x == pytest.approx(y, abs=1e-12) for x, y in zip(a, b, strict=True))


@given(RUN, st.randoms(use_true_random=False), st.sampled_from(VARIANTS))
def test_monitor_steps_equal_a_recomputation_from_scratch(ids, rng, settings):
    p = [rng.choice([0.5, 0.9, 0.95, 1.0]) for _ in ids]
    monitor = Monitor(settings)
    for token, p_max, expected in zip(ids, p, _anew(ids, p, settings), strict=True):
        assert _same(monitor.update(token, p_max), expected)


@pytest.mark.parametrize(("asked", "first"), [(0, 100), (30, 30 * 4 + 1)])
def test_a_limit_of_copies_holds_for_data_as_well_unless_more_are_asked_for(asked, first):
    """As for a guard: 20 copies and 100 tokens, which are 25 copies of four."""
    monitor = Monitor(MonitorSettings(most_copies=20), lambda ids: ["="] * len(ids), asked)
    steps = [*map(monitor.update, [*range(100, 400), *[1, 2, 3, 4] * 60])]
    assert next(step.step - 300 for step in steps if step.trigger) == first
    guard, checker = LoopGuard().monitor, MonitorSettings()
    assert (guard.most_copies, guard.data_tokens) == (20, 256)
    assert (checker.most_copies, checker.data_tokens) == (None, 512)


@pytest.mark.parametrize("votes", [2, 3])
def test_without_probabilities_the_other_two_vote(votes):
    """Also where all three had to agree."""
    monitor = Monitor(replace(PAPER, votes=votes))
    steps = [*map(monitor.update, [*range(1000, 1300), *[1, 2, 3] * 200])]
    assert any(step.trigger for step in steps)
    assert not any(step.trigger for step in steps if step.ttr >= 0.2 or not step.cr < 0.12)


def test_the_monitor_ignores_tokens_after_the_end():
    """Padding looks like the tightest of loops."""
    monitor = Monitor(OneSignal(signal="p1"))
    for i in range(64):
        step = monitor.update(i, 1.0)
    assert step.trigger
    monitor.end()
    assert not any(monitor.update(0, 1.0).trigger for _ in range(500))
    assert monitor.ended and monitor.last == step._replace(trigger=False)


@pytest.mark.parametrize("name", sorted(HONEST))
def test_honest_repetition_triggers_nothing(name):
    """Also where the model is sure of every token, so that one vote is always given."""
    ids = number(split(HONEST[name]))
    assert len(ids) > 200, "too short"
    for chosen, p_max in ((PAPER, None), (PAPER, 1.0), (MonitorSettings(), None)):
        monitor = Monitor(chosen)
        assert not any(monitor.update(token, p_max).trigger for token in ids)
