"""A number with its margin, and the numbers of single texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MeanKind = Literal["share", "count", "number"]
"""What a number is: a share of a whole, a count of things, or any other number."""


@dataclass(frozen=True)
class Mean:
    """A number, most often a mean over texts; the column of a table says how it is written.

    Attributes:
        value: The number.
        margin: Half of its 95 % interval over texts. None: it has none.
        by_text: The number of each text; empty: it was not kept.
        kind: What it is.
    """

    value: float
    margin: float | None = None
    by_text: tuple[float, ...] = ()
    kind: MeanKind = "number"
