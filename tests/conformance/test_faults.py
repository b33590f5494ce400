"""The first check that a planted fault fails is the one that names it; the same cache without the fault passes it."""

from __future__ import annotations

import pytest
from covering import every_nth
from faulty_caches import FAULTS
from right_caches import RIGHT, ROUNDING, Keeper, cache_of
from versions import OLD_TRANSFORMERS

from sinkscope.conformance.checks import CHECKS
from sinkscope.conformance.kit import TOLERANCE, Kit

LIMITS = {  # of caches that are right otherwise: they raise, or nothing in them could do it
    "dynamic_cache_without_config": ["states_of_a_hybrid_are_kept", "a_cropped_draft_leaves_no_trace_in_states"],
    "quantized_cache": ["a_cropped_draft_leaves_no_trace"],
}


@pytest.mark.parametrize("name", every_nth(FAULTS, 9))
def test_the_first_check_that_fails_names_the_fault(name):
    fault = FAULTS[name]
    checks = list(CHECKS)
    if OLD_TRANSFORMERS:  # resetting does nothing there, in right caches either
        checks.remove("after_a_reset_nothing_is_left")
    if fault.check not in checks:
        pytest.skip("the cache that is compared with has this fault, too")
    kit = Kit(fault.factory)
    assert next(one for one in checks if kit.checked(CHECKS[one]).verdict == "fails") == fault.check
    assert Kit(fault.right).checked(CHECKS[fault.check]).verdict == "passes"


@pytest.mark.parametrize("factory", every_nth(RIGHT, len(RIGHT)), ids=lambda factory: factory.__name__)
def test_right_caches_pass(factory):
    name = factory.__name__
    if OLD_TRANSFORMERS:
        pytest.skip("DynamicCache.reset leaves its tokens in transformers before 5.18")
    if name == "quantized_cache":
        pytest.importorskip("optimum.quanto")
    kit = Kit(factory, ROUNDING.get(name, TOLERANCE))
    verdicts = {name: kit.checked(one).verdict for name, one in CHECKS.items()}
    assert [one for one in verdicts if verdicts[one] == "fails"] == LIMITS.get(name, [])
    assert list(verdicts.values()).count("passes") >= 10


def test_every_check_has_a_fault_that_it_names_and_a_place_in_the_order():
    assert {fault.check for fault in FAULTS.values()} == set(CHECKS) and len(FAULTS) >= 22


def test_an_error_of_a_cache_is_a_failure():
    class Broken(Keeper):
        def update(self, *states, **more):
            raise KeyError("turn 2")

    def broken(config):
        return cache_of(config, lambda: Broken(8))

    found = Kit(broken).checked(CHECKS["a_second_turn_continues_the_first"])
    assert (found.verdict, found.seen) == ("fails", "KeyError: 'turn 2'")


def test_bytes_count_at_every_call_and_not_at_the_last_alone():
    """A cache that frees what it evicts with the third generated token holds too much before."""

    class Late(Keeper):
        def evict(self) -> None:
            if self.seen >= 99:
                super().evict()

    def late(config, budget):
        return cache_of(config, lambda: Late(budget))

    assert Kit(late).checked(CHECKS["the_budget_holds_at_every_step_in_bytes"]).verdict == "fails"
