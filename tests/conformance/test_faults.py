"""Each planted fault breaks the promise that stands beside it, the same cache without it keeps it, and right ones pass.

Rows, positions, budgets and evictions that were not tried are said and are no pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from covering import every_nth
from faulty_caches import FAULTS, partial_stock
from mistaken_policies import Attended, QueriesAreNotWatched, ScoresAreAveragedOverRows, SlotsOfTheFirstRow
from right_caches import RIGHT, ROUNDING, Keeper, cache_of
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer
from versions import OLD_TRANSFORMERS

import sinkscope as ss
from sinkscope.conformance.kit import TOLERANCE, Kit
from sinkscope.conformance.promises import PROMISES
from sinkscope.kv import Policy

ERRORS, CHANGES, ROWS, PLACES, BUDGET, FIRST = PROMISES
LIMITS = {  # of caches that are right otherwise: they raise
    "dynamic_cache_without_config": [CHANGES],
    "quantized_cache": [CHANGES],
    "eight_bit_cache": [CHANGES],
}


def verdict(factory: Any, promise: str) -> str:
    return Kit(factory).checked(PROMISES[promise]).verdict


def verdicts(factory: Any, *only: str, **options: Any) -> dict[str, str]:
    found = ss.check_cache(factory, only=only, **options)
    return {one.check.replace(" ", "_"): one.verdict for one in found.checks}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_breaks_the_promise_beside_it(name):
    assert verdict(FAULTS[name].factory, FAULTS[name].check) == "fails"


@pytest.mark.parametrize("name", every_nth(FAULTS, 18))
def test_the_cache_without_the_fault_keeps_it(name):
    assert verdict(FAULTS[name].right, FAULTS[name].check) == "passes"


def test_every_promise_is_broken_by_faults():
    assert {fault.check for fault in FAULTS.values()} == set(PROMISES) and len(FAULTS) >= 60


def name_of(factory) -> str:
    return getattr(factory, "__name__", factory)


@pytest.mark.parametrize("factory", every_nth(RIGHT, len(RIGHT)), ids=name_of)
def test_right_caches_pass(factory):
    name = name_of(factory)
    if OLD_TRANSFORMERS:
        pytest.skip("DynamicCache.reset leaves its tokens in transformers before 5.18")
    if name == "quantized_cache":
        pytest.importorskip("optimum.quanto")
    result = ss.check_cache(factory, tolerance=ROUNDING.get(name, TOLERANCE))
    failed = [one.check.replace(" ", "_") for one in result.checks if one.verdict == "fails"]
    assert failed == LIMITS.get(name, []), result.text()
    assert result.exit_code == bool(failed)


def policy(kind: type[Policy], **fields: Any) -> Callable[[int], Policy]:
    def make(budget):
        return kind(budget=budget, **fields)

    return make


def test_one_error_in_use_fails_one_check_and_is_said_with_its_line():
    result = ss.check_cache(policy(QueriesAreNotWatched))
    (failed,) = [one for one in result.checks if one.verdict == "fails"]
    assert failed.check == ERRORS.replace("_", " ")
    assert "Attended.scores (mistaken_policies.py:" in failed.seen and "the latest queries were not seen" in failed.seen
    stuck = [one for one in result.checks if one.verdict == "not judged"]
    assert len(stuck) >= 3 and {one.seen for one in stuck} == {f"the error of {failed.check!r}"}


@dataclass(frozen=True, kw_only=True)
class Scored(Policy):
    of: Callable[[Any], Any]

    def scores(self, at):
        return self.of(at)


@pytest.mark.parametrize("scores", [lambda pos: pos[:, 0].float(), lambda pos: pos * float("nan")])
def test_an_error_of_sinkscope_in_use_is_a_failure_and_no_refusal(scores):
    """Scores of the wrong shape, and no numbers."""
    result = ss.check_cache(policy(Scored, of=lambda at: scores(at.kv.pos)), only=[PLACES, BUDGET, FIRST])
    assert {one.verdict for one in result.checks} == {"fails", "not judged"} and result.exit_code == 1


def test_bytes_count_at_every_call_and_not_at_the_last_alone():
    """A cache that frees what it evicts with the third generated token holds too much before."""

    class Late(Keeper):
        def evict(self) -> None:
            if self.seen >= 99:
                super().evict()

    def late(config, budget):
        return cache_of(config, lambda: Late(budget))

    assert verdict(late, BUDGET) == "fails"


def test_a_crop_that_crashes_fails_and_a_cache_without_crop_refuses():
    class Crashing(DynamicLayer):
        def crop(self, tokens_to_remove):
            raise RuntimeError("The size of tensor a (3) must match the size of tensor b (2)")

    class Nothing(DynamicLayer):
        def crop(self, tokens_to_remove):
            None.crop(tokens_to_remove)  # type: ignore[attr-defined]

    def static(config, max_cache_len):
        return StaticCache(config=config, max_cache_len=max_cache_len)

    found = [verdict(factory, CHANGES) for factory in (partial_stock(Crashing), partial_stock(Nothing), static)]
    assert found == ["fails", "fails", "passes"]


def test_a_policy_that_needs_larger_budgets_is_tried_with_them():
    of_row_zero = policy(SlotsOfTheFirstRow, first=4, last=16)  # smaller budgets leave nothing to choose
    assert verdicts(of_row_zero, BUDGET, ROWS) == {BUDGET: "passes", ROWS: "fails"}
    assert verdicts(of_row_zero, ROWS, budget=0.5) == {ROWS: "fails"}
    assert verdicts(policy(ScoresAreAveragedOverRows, first=4, last=8), ROWS) == {ROWS: "fails"}
    right = ss.check_cache(policy(Attended, first=4, last=16), only=[BUDGET, ROWS])
    assert right.verdict == "passes" and right.least == 24, right.text()


def refuse(*_):
    raise NotImplementedError("it serves no such thing")


def test_evictions_that_are_all_refused_are_no_pass():
    result = ss.check_cache(policy(Scored, of=refuse), only=[CHANGES, PLACES, BUDGET, FIRST])
    assert result.verdict == "incomplete" and result.exit_code == 1
    assert set(result.untried()) == {"positions", "budget", "eviction"}
    assert "is incomplete: positions, budget, eviction not tried; give a budget that it takes" in result.conclusion()
    assert "it serves no such thing" in result.text() and len(result.conclusion().split()) <= 30
    assert ss.check_cache(policy(Scored, of=refuse), only=[CHANGES]).exit_code == 0, "no check of a budget was asked"


def test_rows_that_are_refused_are_no_pass():
    class OneRow(DynamicCache):
        def update(self, key_states, *args, **kwargs):
            return refuse() if len(key_states) > 1 else super().update(key_states, *args, **kwargs)

    def one_row(config):
        return OneRow(config=config)

    result = ss.check_cache(one_row, only=[CHANGES, ROWS])
    assert result.verdict == "incomplete" and "rows not tried" in result.conclusion() and result.exit_code == 1
    assert "it serves no such thing" in result.text()
