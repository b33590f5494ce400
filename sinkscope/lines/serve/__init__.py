"""LoopServe: sparse attention over a new turn's prompt, and decoding that reads a chosen part of the cache."""

from sinkscope.kv.usage import tokens_read
from sinkscope.lines.serve.progressive import Progressive
from sinkscope.lines.serve.serve import LoopServe

__all__ = ["LoopServe", "Progressive", "tokens_read"]
