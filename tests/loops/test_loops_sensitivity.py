"""The sweep over the monitor's settings: its loops are loops, its scores are counts, real runs are read right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.loopguard.sensitivity import FORMS, PERIODS, VOCABULARY, Recorded, recorded, score, sequences, watch
from sinkscope.errors import SinkscopeError
from sinkscope.loops import Monitor, MonitorSettings, tail_period

LOOP = [*range(1000, 1600), *[1, 2, 3, 4] * 150]


def test_sequences_hold_what_they_say() -> None:
    made = sequences(1)
    loops = [one for one in made if one.onset is not None]
    assert len(loops) == 2 * len(FORMS) * len(PERIODS) and all(len(one.ids) == len(one.p_max) for one in made)
    share: dict[str, list[float]] = {}
    for one in loops:
        tail, piece = tail_period(one.ids), one.ids[one.onset :]
        changed = sum(a != b for a, b in zip(piece, piece[one.period :], strict=False)) / len(piece)
        if one.form == "exact":
            assert changed == 0 and tail is not None and one.period % tail.period == 0 and tail.start <= one.onset
        elif one.form == "counting":
            assert sum(token >= VOCABULARY for token in piece) == -(-len(piece) // one.period)
        else:
            share.setdefault(one.form, []).append(changed)
    for form, changes in share.items():  # a replaced token differs from the copy before and the copy after
        assert sum(changes) / len(changes) == pytest.approx(2 * FORMS[form], rel=0.25)
    assert {one.form for one in made if one.onset is None} == {"prose", "honest"}


def test_scores_are_counts() -> None:
    """A loop that is found, one with too long a period, a false alarm, and a quiet text."""
    sure = [0.5] * 600 + [1.0] * 600
    wide = [*range(1000, 1600), *[*range(100)] * 6]
    data = [
        Recorded("exact", 4, LOOP, list(sure), 600),
        Recorded("exact", 100, wide, list(sure), 600),
        Recorded("counting", 4, wide, list(sure), 600),
        Recorded("honest", None, LOOP, list(sure), None),
        Recorded("honest", None, list(range(700)), [1.0] * 700, None),
    ]
    found = score(data, MonitorSettings.paper())
    monitor = Monitor(MonitorSettings.paper())
    steps = (monitor.update(*pair) for pair in zip(LOOP, sure, strict=True))
    first = next(step.step for step in steps if step.trigger)
    assert watch(data[0], MonitorSettings.paper()) == (False, first)
    assert (found["detected"], found["median_delay"]) == (0.5, first - 600)
    assert found["detected_by_form"] == {"exact": 0.5, "counting": 0.0}
    assert found["detected_by_period"] == {"4": 1.0, "100": 0.0}
    assert found["alarms"] == {"before a loop": 0.0, "honest": 0.5}
    assert score(data[:1], MonitorSettings.variant("p1"))["alarms"] == {"before a loop": 0.0}
    assert score(data[:1], MonitorSettings.variant("always"))["alarms"] == {"before a loop": 1.0}


def test_real_runs_are_read(tmp_path: Path) -> None:
    """`top1` is of the token at its place, the monitor takes that of the next; the loop begins where the tail does."""
    path = tmp_path / "runs.jsonl"
    top1 = [i / len(LOOP) for i in range(len(LOOP))]
    path.write_text(json.dumps({"tokens": LOOP, "top1": top1}) + "\n" + json.dumps({"tokens": [1, 2, 3]}) + "\n")
    loop, other = recorded([path])
    assert (loop.onset, loop.period, loop.p_max) == (600, 4, [*top1[1:], 0.0])
    assert (other.onset, other.p_max) == (None, [None] * 3)
    path.write_text('{"tokens": [1]}\n{"text": "a"}\n')
    with pytest.raises(SinkscopeError, match=r"runs.jsonl line 2 is no run"):
        recorded([path])
