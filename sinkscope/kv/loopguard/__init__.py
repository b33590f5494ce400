"""LoopGuard: watch what a model generates, and take the repeating tail out of its cache when it loops."""

from sinkscope.kv.loopguard.detect import LoopReporter
from sinkscope.kv.loopguard.guard import LoopGuard
from sinkscope.kv.loopguard.retention import Retention, ranges_of, tokens_to_keep

__all__ = ["LoopGuard", "LoopReporter", "Retention", "ranges_of", "tokens_to_keep"]
