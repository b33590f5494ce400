"""Vertical and slash lines of attention: their sums, the choice of a few of them, and attention computed along these.

A vertical line is a key position. A slash line is an offset: query position less key position (Li et al. 2025,
LoopServe, section 3.1; Jiang et al. 2024, MInference).
"""

from sinkscope.lines.attention import Scores, recovered
from sinkscope.lines.choice import select_lines
from sinkscope.lines.head_lines import HeadLines
from sinkscope.lines.sparse import Sparsity, sparse_attention
from sinkscope.lines.sums import line_sums
from sinkscope.lines.votes import minference_lines

__all__ = [
    "HeadLines",
    "Scores",
    "Sparsity",
    "line_sums",
    "minference_lines",
    "recovered",
    "select_lines",
    "sparse_attention",
]
