"""The checks by name, in their order, which is that in which their files are imported."""

from __future__ import annotations

from sinkscope.conformance.kit import Check

CHECKS: dict[str, Check] = {}
"""All checks by name, in their order."""
OF_A_BUDGET: dict[str, Check] = {}
"""Those that only use caches which evict."""
OF_POSITIONS = (
    "every_slot_has_the_position_of_its_token",
    "positions_are_right_after_eviction_inside_the_text",
    "facts_on_both_sides_of_a_hole_are_recalled",
)
"""Those that say where a token stands after an eviction: one of them has to apply to a cache that evicts."""


def check(function: Check) -> Check:
    """Register a check; its name says the behaviour."""
    CHECKS[function.__name__] = function
    return function


def check_of_a_budget(function: Check) -> Check:
    """Register a check of what a cache keeps."""
    OF_A_BUDGET[function.__name__] = function
    return check(function)
