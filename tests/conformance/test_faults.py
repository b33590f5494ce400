"""Each planted fault is caught by the check that names it, which the same cache without the fault passes."""

from __future__ import annotations

import pytest
from covering import every_nth

from experiments.check_cache.faulty import FAULTS
from experiments.check_cache.keepers import Keeper, cache_of
from experiments.check_cache.right import RIGHT, ROUNDING
from sinkscope.conformance.kit import TOLERANCE, Kit, all_checks

LIMITS = {  # of caches that are right otherwise: they raise, or nothing in them could do it
    "dynamic_cache_without_config": ["states_of_a_hybrid_are_kept"],
    "quantized_cache": ["a_cropped_draft_leaves_no_trace"],
}


@pytest.mark.parametrize("name", every_nth(FAULTS, 5))
def test_the_named_check_catches_a_fault(name):
    fault = FAULTS[name]
    tolerance = max(ROUNDING.values()) if fault.check.startswith("rounding") else TOLERANCE
    found = Kit(f"faulty:{name}", fault.factory, tolerance).checked(fault.check)
    assert found.verdict == "fails", found
    assert Kit("right:one", fault.right, tolerance).checked(fault.check).verdict == "passes"


@pytest.mark.parametrize("factory", every_nth(RIGHT, 5), ids=lambda factory: factory.__name__)
def test_right_caches_pass(factory):
    name = factory.__name__
    if name == "quantized_cache":
        pytest.importorskip("optimum.quanto")
    kit = Kit(f"right:{name}", factory, ROUNDING.get(name, TOLERANCE))
    verdicts = {one: kit.checked(one).verdict for one in all_checks()}
    assert [one for one in verdicts if verdicts[one] == "fails"] == LIMITS.get(name, [])
    assert list(verdicts.values()).count("passes") >= 12


def test_every_check_has_a_fault_that_it_names():
    assert {fault.check for fault in FAULTS.values()} == set(all_checks()) and len(FAULTS) >= 30


def test_bytes_count_at_every_call_and_not_at_the_last_alone():
    """A cache that frees what it evicts with the third generated token holds too much before."""

    class Late(Keeper):
        def evict(self) -> None:
            if self.seen >= 99:
                super().evict()

    def late(config, budget):
        return cache_of(config, lambda: Late(budget))

    assert Kit("faulty:late", late).checked("the_budget_holds_at_every_step_in_bytes").verdict == "fails"
