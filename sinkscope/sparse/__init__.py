"""Vertical and slash lines of attention: their sums, the choice of a few of them, and attention computed along these.

A vertical line is a key position. A slash line is an offset: query position less key position (Li et al. 2025,
LoopServe, section 3.1; Jiang et al. 2024, MInference).

| for | files |
|---|---|
| measuring | `sums` (of every line, what lines hold), `votes` (the heaviest), `lines` (the command) |
| choosing | `sample` (which queries), `bands`, `choice` (the search), `triton_sums`, `replay` (on a GPU) |
| choosing as printed | `faithful` (algorithm 5), `votes` (MInference), `shapes` (A-shape, Tri-shape, MInference) |
| attending | `sparse` (on a CPU, under a mask), `triton` (on a GPU), `devices` (which of them) |
| in a model | `sparse_prompts`, `prompt_calls`, `serve` (LoopServe) |
| shared | `attention` (scores), `head_lines` (single lines of every head) |
"""

from sinkscope.sparse.attention import Scores
from sinkscope.sparse.bands import Bands
from sinkscope.sparse.choice import select_bands, select_lines
from sinkscope.sparse.head_lines import HeadLines
from sinkscope.sparse.sparse import band_attention, line_attention
from sinkscope.sparse.sums import line_sums, recovered
from sinkscope.sparse.votes import minference_lines

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
