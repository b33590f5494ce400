"""LoopServe: sparse attention over a new turn's prompt, and a cache of which decoding reads a chosen part."""

from sinkscope.kv.loopserve.decode import Progressive, tokens_read
from sinkscope.kv.loopserve.lines import HeadLines, recovered
from sinkscope.kv.loopserve.select import minference_lines, select_lines
from sinkscope.kv.loopserve.serve import LoopServe
from sinkscope.kv.loopserve.sparse import Sparsity, sparse_attention

__all__ = [
    "HeadLines",
    "LoopServe",
    "Progressive",
    "Sparsity",
    "minference_lines",
    "recovered",
    "select_lines",
    "sparse_attention",
    "tokens_read",
]
