"""How many texts are read in one pass."""

from __future__ import annotations

MOST_NUMBERS = 1 << 24
"""Numbers of the widest activation of a pass: 64 MB in float32."""


def rows_at_once(length: int, width: int) -> int:
    """Return how many texts of a length one pass reads, if its widest activation has `width` numbers for each token."""
    return max(1, MOST_NUMBERS // (length * width))
