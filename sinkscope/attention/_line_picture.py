"""The attention map of one head over the beginning of a text, with its lines."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from sinkscope.attention._line_tap import scores_of
from sinkscope.lines.choice import top_lines
from sinkscope.lines.sums import Scores, line_sums
from sinkscope.models.target import Target

TOKENS = 96
ETA = 0.05  # more lines would hide the map below them


@dataclass(frozen=True)
class Picture:
    """The first tokens of the first text: what a query sees does not depend on what comes after it.

    Attributes:
        layer: of the head.
        head: which head.
        words: the tokens as text.
        shares: one string per query: thousandths of its attention, one number per key that it sees.
        eta: share of the lines of this map that is drawn.
        vertical: key positions of the lines.
        slash: offsets of the lines.
    """

    layer: int
    head: int
    words: tuple[str, ...]
    shares: tuple[str, ...]
    eta: float
    vertical: tuple[int, ...]
    slash: tuple[int, ...]

    def values(self) -> list[list[float]]:
        """The shares as numbers, query by query."""
        return [[int(word) / 1000 for word in line.split()] for line in self.shares]


def pictured(target: Target, ids: Int[Tensor, " pos"], layer: int, head: int) -> Picture:
    """The map of a head of `layer` over the first tokens of `ids`."""
    ids = ids[:TOKENS]
    found: list[Picture] = []
    words = tuple(str(target.tokenizer.decode([i])) for i in ids.tolist())

    def draw(_: int, scores: Scores) -> None:
        vertical, slash = line_sums(scores)
        lines = top_lines(vertical, slash, [ETA])
        rows = [line_sums(scores.part(i, i + 1))[0][head] for i in range(len(ids))]
        shares = tuple(" ".join(str(round(1000 * p)) for p in row.tolist()) for row in rows)
        chosen = [tuple(kind[0, head].nonzero().flatten().tolist()) for kind in (lines.vertical, lines.slash)]
        found.append(Picture(layer, head, words, shares, ETA, *chosen))

    with scores_of(target, draw, [layer]):
        target.forward(ids[None])
    return found[0]
