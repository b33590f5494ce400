"""The checks, from simple to complex: a fault of one may let later ones fail, but not earlier ones.

With room for everything a cache changes nothing; with half of the prompt or a third, it loses only what it evicts.
"""

from importlib import import_module

from sinkscope.conformance.checks.registry import CHECKS, OF_A_BUDGET, OF_POSITIONS

for _file in ("basics", "evictions", "lengths", "parts", "prompts", "rows", "orders", "precision"):
    import_module(f"{__name__}.{_file}")

__all__ = ["CHECKS", "OF_A_BUDGET", "OF_POSITIONS"]
