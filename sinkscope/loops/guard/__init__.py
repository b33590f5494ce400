"""LoopGuard: watch what a model generates, and take the repeating tail out of its cache when it loops."""

from sinkscope.loops.guard.guard import LoopGuard
from sinkscope.loops.guard.retention import Retention, ranges_of, tokens_to_keep

__all__ = ["LoopGuard", "Retention", "ranges_of", "tokens_to_keep"]
