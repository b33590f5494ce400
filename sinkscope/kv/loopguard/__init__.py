"""LoopGuard: watch what a model generates, and take the repeating tail out of its cache when it loops."""

from sinkscope.kv.loopguard.detect import LoopReporter, LoopStopper
from sinkscope.kv.loopguard.guard import LoopGuard
from sinkscope.kv.loopguard.plan import Plan, Retention, plan

__all__ = ["LoopGuard", "LoopReporter", "LoopStopper", "Plan", "Retention", "plan"]
