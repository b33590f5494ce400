"""Vertical and slash lines of attention: their sums, the choice of a few of them, and attention computed along these.

A vertical line is a key position. A slash line is an offset: query position less key position (Li et al. 2025,
LoopServe, section 3.1; Jiang et al. 2024, MInference).

| for | files |
|---|---|
| measuring | `lines` (the command), `attention` (scores, sums along lines) |
| choosing | `bands` (columns and bands), `choice` (the search), `triton_sums` (on a GPU) |
| choosing single lines | `head_lines` (the heaviest, MInference, algorithm 5 as printed), `shapes` (with A-shape) |
| attending | `sparse` (on a CPU, under a mask), `triton` (on a GPU) |
| in a model | `sparse_prompts`, `progressive` (algorithm 6), `serve` (LoopServe) |
"""

from typing import TYPE_CHECKING, NoReturn

from sinkscope.errors import no_such_name
from sinkscope.sparse.attention import Scores, line_sums
from sinkscope.sparse.bands import Lines
from sinkscope.sparse.choice import select_bands
from sinkscope.sparse.head_lines import minference_lines, select_lines
from sinkscope.sparse.shapes import AShape, MInference, TriShape
from sinkscope.sparse.sparse import line_attention, recovered

__all__ = [
    "AShape",
    "Lines",
    "MInference",
    "Scores",
    "TriShape",
    "line_attention",
    "line_sums",
    "minference_lines",
    "recovered",
    "select_bands",
    "select_lines",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        """Refuse a name that is not here, with the nearest one."""
        raise no_such_name(__name__, name, __all__)
