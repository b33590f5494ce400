"""The online monitor at every step of planted repetition, and on honest texts."""

from __future__ import annotations

import random
from typing import Any

import pytest
from loop_texts import HONEST

from experiments.loopset.compare import number
from sinkscope.loops import Monitor, MonitorSettings, PaperSettings
from sinkscope.loops.text.outputs import split

PAPER = PaperSettings()
SMALL: dict[str, Any] = {"window": 20, "novelty_n": 2, "novelty_span": 5, "theta_nov": 0.2, "stall": 2, "warmup": 10}
SMALL |= {"cooldown": 5, "stride": 3, "tail_longest": 8, "tail_shortest": 8, "tail_repeats": 3, "tail_hold": 2}
SMALL |= {"streak": 3, "theta_ttr": 0.3, "theta_cr": 0.4}


@pytest.mark.parametrize(
    ("seed", "alarms", "ttr", "cr", "periods"),
    [
        (0, (4798, 4775, 2379), 60.372, 83.1, 778),
        (3, (5951, 5721, 2675), 71.91, 102.517, 1372),
    ],
)
def test_alarms_come_when_section_5_2_says(seed, alarms, ttr, cr, periods):
    """Pieces that repeat; the numbers were read anew from the beginning of the output for every step.

    Args:
        alarms: Sum of the steps that trigger, with one, two and three votes.
        ttr: Sum of the type-token ratios, and so for the compression ratios and the periods of repetitions.
    """
    rng, ids = random.Random(seed), list[int]()
    while len(ids) < 240:
        piece = [rng.randrange(7) for _ in range(rng.randint(1, 9))]
        ids += piece * rng.randint(1, 12)
    sure = [rng.choice([0.5, 0.9, 0.95, 0.97, 0.99, 1.0]) for _ in ids]
    for votes, wanted in enumerate(alarms, 1):
        monitor = Monitor(PaperSettings(**SMALL, votes=votes))
        steps = [*map(monitor.update, ids, sure)]
        assert sum(step.step for step in steps if step.trigger) == wanted
        sums = sum(step.ttr for step in steps), sum(step.cr for step in steps[2:])
        assert sums == pytest.approx((ttr, cr), abs=1e-3)
        assert sum(step.tail.period for step in steps if step.tail) == periods


def test_without_probabilities_both_other_votes_are_needed_and_enough():
    monitor = Monitor(PaperSettings(votes=3))
    assert any([monitor.update(token, None).trigger for token in [1, 2, 3] * 100])


@pytest.mark.parametrize(("asked", "first"), [(0, 100), (30, 30 * 4 + 1)])
def test_a_limit_of_copies_holds_for_data_as_well_unless_more_are_asked_for(asked, first):
    """As for a guard: 20 copies and 100 tokens, which are 25 copies of four."""
    monitor = Monitor(MonitorSettings(most_copies=20), lambda ids: ["="] * len(ids), asked)
    steps = [*map(monitor.update, [*range(100, 400), *[1, 2, 3, 4] * 60])]
    assert next(step.step - 300 for step in steps if step.trigger) == first


@pytest.mark.parametrize("name", sorted(HONEST))
def test_honest_repetition_triggers_nothing(name):
    """Also where the model is sure of every token, so that one vote is always given."""
    ids = number(split(HONEST[name]))
    assert len(ids) > 200, "too short"
    for chosen, p_max in ((PAPER, None), (PAPER, 1.0), (MonitorSettings(), None)):
        monitor = Monitor(chosen)
        assert not any(monitor.update(token, p_max).trigger for token in ids)
