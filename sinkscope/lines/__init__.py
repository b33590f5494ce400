"""Vertical and slash lines of attention: their sums, the choice of a few of them, and attention computed along these.

A vertical line is a key position. A slash line is an offset: query position less key position (Li et al. 2025,
LoopServe, section 3.1; Jiang et al. 2024, MInference).
"""

from sinkscope.lines.attention import Scores
from sinkscope.lines.bands import Bands
from sinkscope.lines.choice import select_bands, select_lines
from sinkscope.lines.head_lines import HeadLines
from sinkscope.lines.sparse import band_attention, line_attention
from sinkscope.lines.sums import line_sums, recovered
from sinkscope.lines.votes import minference_lines

__all__ = [
    "Bands",
    "HeadLines",
    "Scores",
    "band_attention",
    "line_attention",
    "line_sums",
    "minference_lines",
    "recovered",
    "select_bands",
    "select_lines",
]
