"""Each planted fault breaks the promise that stands beside it; the same cache without the fault keeps it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from covering import every_nth
from faulty_caches import FAULTS, Fault
from mistaken_policies import MISTAKES, Mistake
from right_caches import RIGHT, ROUNDING, Keeper, cache_of
from transformers import DynamicCache, StaticCache
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
PLANTED: dict[str, Fault | Mistake] = {**FAULTS, **MISTAKES}


@pytest.mark.parametrize("name", PLANTED)
def test_each_fault_breaks_the_promise_beside_it(name):
    fault = PLANTED[name]
    assert Kit(fault.factory).checked(PROMISES[fault.check]).verdict == "fails"


@pytest.mark.parametrize("name", every_nth(PLANTED, 18))
def test_the_cache_without_the_fault_keeps_it(name):
    fault = PLANTED[name]
    assert Kit(fault.right).checked(PROMISES[fault.check]).verdict == "passes"


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


def test_every_promise_is_broken_by_faults():
    assert {fault.check for fault in PLANTED.values()} == set(PROMISES) and len(PLANTED) >= 60


def test_one_error_in_use_fails_one_check_and_is_said_with_its_line():
    result = ss.check_cache(MISTAKES["queries_are_not_watched"].factory)
    (failed,) = [one for one in result.checks if one.verdict == "fails"]
    assert failed.check == ERRORS.replace("_", " ")
    assert "Attended.scores (mistaken_policies.py:" in failed.seen and "the latest queries were not seen" in failed.seen
    stuck = [one for one in result.checks if one.verdict == "not judged"]
    assert len(stuck) >= 3 and {one.seen for one in stuck} == {f"the error of {failed.check!r}"}


def test_bytes_count_at_every_call_and_not_at_the_last_alone():
    """A cache that frees what it evicts with the third generated token holds too much before."""

    class Late(Keeper):
        def evict(self) -> None:
            if self.seen >= 99:
                super().evict()

    def late(config, budget):
        return cache_of(config, lambda: Late(budget))

    assert Kit(late).checked(PROMISES[BUDGET]).verdict == "fails"


@dataclass(frozen=True, kw_only=True)
class _Scores(Policy):
    """Scores that a mistake spoils."""

    mistake: str = ""

    def scores(self, at):
        if self.mistake == "of the wrong shape":
            return at.kv.pos[:, 0].float()
        if self.mistake == "not a number":
            return at.kv.pos * float("nan")
        if self.mistake == "of queries that were not watched":
            return at.window_rows(4).sum((1, 2))
        raise NotImplementedError("it does not evict")


@pytest.mark.parametrize("mistake", ["of the wrong shape", "not a number", "of queries that were not watched"])
def test_an_error_of_sinkscope_in_use_is_a_failure_and_no_refusal(mistake):

    def policy(budget):
        return _Scores(budget=budget, mistake=mistake)

    result = ss.check_cache(policy, only=[PLACES, BUDGET, FIRST])
    assert {one.verdict for one in result.checks} == {"fails", "not judged"} and result.exit_code == 1


def test_a_crop_that_crashes_fails_and_a_cache_without_crop_refuses():
    class Crashing(DynamicCache):
        def crop(self, tokens_to_remove):
            raise RuntimeError("The size of tensor a (3) must match the size of tensor b (2)")

    class Nothing(Keeper):
        def crop(self, tokens_to_remove):
            None.crop(tokens_to_remove)  # type: ignore[attr-defined]

    def static(config, max_cache_len):
        return StaticCache(config=config, max_cache_len=max_cache_len)

    def verdict(factory):
        return Kit(factory).checked(PROMISES[CHANGES]).verdict

    assert verdict(lambda config: Crashing(config=config)) == "fails"
    assert verdict(lambda config: cache_of(config, lambda: Nothing(99))) == "fails"
    assert verdict(static) == "passes"
