"""Each planted fault breaks the promise that stands beside it, the same cache without it keeps it, and right ones pass.

Rows, positions, budgets and evictions that were not tried are said and are no pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from covering import every_nth
from faulty_caches import FAULTS
from mistaken_policies import Attended, QueriesAreNotWatched, ScoresAreAveragedOverRows, SlotsOfTheFirstRow
from right_caches import RIGHT, static_cache
from transformers import DynamicCache
from versions import OLD_TRANSFORMERS

import sinkscope as ss
from sinkscope.conformance.flow import Flow
from sinkscope.conformance.kit import TOLERANCE, Kit
from sinkscope.conformance.promises import PROMISES
from sinkscope.kv import Policy, SnapKV

ERRORS, CHANGES, ROWS, PLACES, BUDGET, FIRST = PROMISES


def verdict(factory: Any, promise: str) -> str:
    return Kit(factory).checked(PROMISES[promise]).verdict


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_breaks_the_promise_beside_it(name):
    assert verdict(FAULTS[name].factory, FAULTS[name].check) == "fails"


@pytest.mark.parametrize("name", every_nth(FAULTS, 18, 12))
def test_the_cache_without_the_fault_keeps_it(name):
    assert verdict(FAULTS[name].right, FAULTS[name].check) == "passes"


def test_every_promise_is_broken_by_faults():
    assert {fault.check for fault in FAULTS.values()} == set(PROMISES) and len(FAULTS) >= 62


@pytest.mark.parametrize("factory", every_nth(RIGHT, len(RIGHT)), ids=lambda made: getattr(made, "__name__", made))
def test_right_caches_pass(factory):
    name = getattr(factory, "__name__", factory)
    if OLD_TRANSFORMERS:
        pytest.skip("DynamicCache.reset leaves its tokens in transformers before 5.18")
    rounds = name == "quantized_cache"
    if rounds:
        pytest.importorskip("optimum.quanto")
    result = ss.check_cache(factory, tolerance=0.5 if rounds else TOLERANCE)
    failed = [one.key for one in result.checks if one.verdict == "fails"]
    assert failed == [CHANGES] * (rounds or name == "dynamic_cache_without_config"), result.text()  # these raise
    assert result.exit_code == bool(failed)


def test_of_queries_no_more_are_kept_than_the_window_of_a_small_budget():
    assert verdict(SnapKV, BUDGET) == "passes"


def policy(kind: type[Policy], **fields: Any) -> Callable[[int], Policy]:
    return lambda budget: kind(budget=budget, **fields)


def test_one_error_in_use_fails_one_check_and_is_said_with_its_line():
    result = ss.check_cache(policy(QueriesAreNotWatched))
    (failed,) = [one for one in result.checks if one.verdict == "fails"]
    assert failed.key == ERRORS
    assert "Attended.scores (mistaken_policies.py:" in failed.seen and "the latest queries were not seen" in failed.seen
    stuck = [one for one in result.checks if one.verdict == "not judged"]
    assert len(stuck) >= 3 and {one.seen for one in stuck} == {f"the error of {failed.key.words!r}"}


def test_a_cache_that_cannot_crop_refuses():
    assert verdict(static_cache, CHANGES) == "passes"


def test_a_policy_that_needs_larger_budgets_is_tried_with_them():
    of_row_zero = policy(SlotsOfTheFirstRow, first=4, last=16)  # smaller budgets leave nothing to choose
    for factory, budget in ((of_row_zero, None), (of_row_zero, 0.5), (policy(ScoresAreAveragedOverRows, last=8), None)):
        (rows,) = ss.check_cache(factory, only=[ROWS], budget=budget).checks
        assert rows.verdict == "fails"
    right = ss.check_cache(policy(Attended, first=4, last=16), only=[BUDGET, ROWS])
    assert right.verdict == "passes" and right.least == 24, right.text()


def test_a_cache_that_has_to_evict_has_room_beside_what_the_least_budget_protects():
    kit = Kit(policy(Attended, first=4, last=16))
    flow = kit.asking(Flow(lengths=(60,)), 3)
    assert (kit.least, flow.budget) == (24, 48)
    assert flow.prompt >= 3 * 48


class Refusing(Attended):
    def scores(self, at):
        raise NotImplementedError("it serves no such thing")


class OneRow(DynamicCache):
    def update(self, key_states, *args, **kwargs):
        if len(key_states) > 1:
            raise NotImplementedError("it serves no such thing")
        return super().update(key_states, *args, **kwargs)


def one_row(config):
    return OneRow(config=config)


@pytest.mark.parametrize(
    ("factory", "only", "untried", "said"),
    [
        (
            policy(Refusing),
            [CHANGES, PLACES, BUDGET, FIRST],
            ["positions", "budget", "eviction"],
            "is incomplete: positions, budget, eviction not tried; give a budget that it takes",
        ),
        (one_row, [CHANGES, ROWS], ["rows"], "is incomplete: rows not tried; let the factory take batches"),
    ],
)
def test_what_is_refused_is_no_pass(factory, only, untried, said):
    result = ss.check_cache(factory, only=only)
    assert (result.verdict, result.exit_code, [*result.untried()]) == ("incomplete", 1, untried)
    assert said in result.conclusion() and "it serves no such thing" in result.text()
    assert ss.check_cache(factory, only=[CHANGES]).exit_code == 0, "no check of it was asked"
