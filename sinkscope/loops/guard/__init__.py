"""LoopGuard: watch what a model generates, and take the repeating tail out of its cache when it loops."""

from sinkscope.loops.guard.cut import Retention, ranges_of, tokens_to_keep
from sinkscope.loops.guard.guard import LoopGuard
from sinkscope.loops.guard.steer import Steer

__all__ = ["LoopGuard", "Retention", "Steer", "ranges_of", "tokens_to_keep"]
