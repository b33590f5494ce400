"""LoopGuard: watch what a model generates, and take the repeating tail out of its cache when it loops."""

from sinkscope.kv.loopguard.detect import LoopReporter, LoopStopper
from sinkscope.kv.loopguard.guard import LoopGuard
from sinkscope.kv.loopguard.retention import KeptTokens, Retention, tokens_to_keep

__all__ = ["KeptTokens", "LoopGuard", "LoopReporter", "LoopStopper", "Retention", "tokens_to_keep"]
