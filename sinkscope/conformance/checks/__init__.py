"""The checks, from simple to complex: a fault of one may let later ones fail, but not earlier ones.

With room for everything a cache changes nothing; with half of the prompt or a third, it loses only what it evicts.
"""

from sinkscope.conformance.checks import basics, evictions, lengths, parts, prompts, rows, orders  # isort: skip
from sinkscope.conformance.checks.registry import CHECKS, OF_A_BUDGET, OF_POSITIONS

__all__ = ["CHECKS", "OF_A_BUDGET", "OF_POSITIONS"]
