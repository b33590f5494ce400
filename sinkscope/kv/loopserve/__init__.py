"""LoopServe: sparse attention over a new turn's prompt, and decoding that reads a chosen part of the cache."""

from sinkscope.kv.loopserve.progressive import Progressive, tokens_read
from sinkscope.kv.loopserve.serve import LoopServe

__all__ = ["LoopServe", "Progressive", "tokens_read"]
