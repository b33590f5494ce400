"""LoopServe's latency by context and answer, and the GPU script, on a CPU."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from experiments.loopserve import latency
from sinkscope.kv.loopserve import LoopServe
from sinkscope.models.target import Target

CONTEXT, NEW, BUDGET = 160, 20, 80
WORDS = ["--quick", "--shape", "lines-128", "--out"]


@pytest.fixture(scope="module")
def target() -> Target:
    return latency.shape_of("lines-128", 0)


def test_a_turn_is_timed_call_by_call_and_its_bytes_are_those_of_the_cache(target: Target) -> None:
    ids = latency.text(CONTEXT + NEW, 0, 0.1)
    choices = latency.arms(BUDGET, 0)
    found = {arm: latency.turn(target, edit, ids, CONTEXT, time.thread_time) for arm, edit in choices.items()}
    assert all(len(run["seconds"]) == 1 + NEW and min(run["seconds"]) > 0 for run in found.values())
    size = 2 * 2 * 2 * 32 * 4  # keys and values, layers, kv heads, width, bytes
    for arm in ("full", "loopserve-p", "minference"):  # the cache stays as it is
        assert found[arm]["logical"] == found[arm]["physical"] == found[arm]["answering"] == (CONTEXT + NEW) * size
    # The whole, and the copy that was taken after 16 steps, with the four tokens since.
    for arm in ("loopserve", "loopserve-d"):
        assert found[arm]["logical"] == (CONTEXT + NEW) * size
        assert found[arm]["physical"] == found[arm]["answering"] == (CONTEXT + 16 + BUDGET + 4) * size
        wide = sum(range(CONTEXT + 1, CONTEXT + 17)) + sum(BUDGET + 1 + i for i in range(4))
        assert found[arm]["read"] == pytest.approx(wide / NEW)
    assert found["snapkv"]["answering"] == (BUDGET + NEW) * size and found["snapkv"]["physical"] == CONTEXT * size
    assert found["h2o"]["answering"] == (BUDGET + 1) * size  # chosen before every step
    rows = LoopServe().dense_rows  # the last queries attend to everything, whatever lines are chosen
    dense = sum(range(CONTEXT - rows + 1, CONTEXT + 1)) / sum(range(1, CONTEXT + 1))
    # Beside the dense rows, the printed choice takes the planted lines, and the other keys that are kept come on top.
    lines = replace(LoopServe(decode=False, shortest=0), begin=1, local=1, sharp=None, checked=0)
    planted = latency.turn(target, lines, ids, CONTEXT, time.thread_time)["cells"]
    assert dense < planted < dense + 0.1 and planted < found["loopserve"]["cells"] <= 1
    assert found["full"]["cells"] is None
    assert found["loopserve"]["cells"] == found["loopserve-p"]["cells"] and found["loopserve-d"]["cells"] is None


def test_ratios_are_of_the_same_round() -> None:
    def run(arm: str, number: int, *seconds: float) -> dict[str, Any]:
        noted = dict.fromkeys(latency.NOTED)
        return {"context": 64, "round": number, "arm": arm, "seconds": list(seconds), "peak": 5 + number, **noted}

    runs = [
        run("full", 0, 4, 1, 1),
        run("x", 0, 2, 1, 2),
        run("full", 1, 40, 10, 10),
        run("x", 1, 10, 5, 5),
        run("x", 2, 1, 1, 1),
    ]
    full, row = latency.rows_of(runs, (1, 2))
    assert full["times_faster"] == {"1": 1.0, "2": 1.0}
    assert row["rounds"] == 2 and row["peak"] == 6, "a round without full attention has nothing to be compared with"
    assert row["first_times_faster"] == 3.0 and row["first_seconds"] == 6.0
    assert row["per_token_times_faster"] == pytest.approx((2 / 3 + 2) / 2)
    assert row["times_faster"]["1"] == pytest.approx((5 / 3 + 50 / 15) / 2) and row["seconds"] == {"1": 9.0, "2": 12.5}
