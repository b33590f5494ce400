"""How often greedy continuations end in a repetition loop, with the full cache and under the guard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

import plotly.graph_objects as go

from sinkscope.loops.signals import ends_in_loop, tail_period
from sinkscope.measure import Option, Result, Setup, measurement
from sinkscope.measure.style import COLOURS, axes, finished, shares
from sinkscope.models.text import text_rows
from sinkscope.serving.generate import generate

REPEATS = 3  # copies of a periodic end that make a loop
SHORTEST = 24  # tokens of such an end; on a line of its own, where the registry reads it without importing torch


@dataclass(frozen=True)
class LoopShare:
    """One way of continuing the openings.

    Attributes:
        way: "greedy", "guard" (greedy under LoopGuard), "drawn" (temperature 1) or "text" (the text itself).
        loops: Number of continuations that end in a loop.
        openings: Number of openings.
        share: `loops` divided by `openings`.
        margin: Two standard errors of `share` (Agresti and Coull: two loops and two non-loops are added).
        tokens: Mean length of the continuations.
    """

    way: str
    loops: int
    openings: int
    share: float
    margin: float
    tokens: float


@dataclass(frozen=True, kw_only=True)
class LoopRate(Result):
    """Shares of continuations that end in a loop: greedy, guarded, and two controls (sampled, and the text itself)."""

    percent = ("share", "margin")

    max_new_tokens: int
    shares: tuple[LoopShare, ...]

    def conclusion(self) -> str:
        """The loop rates: greedy, under the guard, and in the two controls."""
        greedy, guard, drawn, text = self.shares
        return (
            f"Of {greedy.openings} openings, {greedy.loops} end in a loop when they are continued greedily, and "
            f"{guard.loops} under the guard; drawn at temperature 1, {drawn.loops} do, and as the text itself goes on, "
            f"{text.loops}."
        )


def draw(result: LoopRate) -> go.Figure:
    """Draw one bar per way, with two standard errors."""
    fig, some = go.Figure(), result.shares
    bars = {"type": "data", "array": [s.margin for s in some], "thickness": 1}
    names = {"greedy": "greedy", "guard": "greedy, guarded", "drawn": "drawn (control)", "text": "the text (control)"}
    fig.add_bar(x=[names[s.way] for s in some], y=[s.share for s in some], error_y=bars, marker_color=COLOURS[0])
    axes(fig, None, None, y=shares("continuations that end in a loop", 0, 1.05))
    return finished(fig, result, width=700, height=440, bottom=60)


@measurement(
    group="Loops",
    figure=draw,
    loading="whole",
    quick={"openings": 3, "max_new_tokens": 32},
    scan={
        "order": 60,
        "seconds": [2.8, 14.0],
        "quick": {"openings": 8, "max_new_tokens": 160},
        "numbers": {
            "greedy continuations that loop": ["shares.0.share", "shares.2.share", "shares.0.margin"],
            "guarded continuations that loop": ["shares.1.share", "shares.0.share", "shares.1.margin"],
        },
    },
)
def loop_rate(
    setup: Setup,
    *,
    openings: Annotated[int, Option(min=2)] = 16,
    opening: Annotated[int, Option(min=2)] = 16,
    max_new_tokens: Annotated[int, Option(min=SHORTEST)] = 384,
) -> LoopRate:
    """Measure how often greedy continuations of a text end in a loop, and how often under the guard.

    There are two controls: the same openings sampled at temperature 1, and the text's own continuation. A continuation
    counts as a loop if it ends in three or more copies of a period that cover at least 24 tokens, or if LoopGuard's
    rule (Eq. 7) without its length condition holds.

    Args:
        openings: Number of pieces of the typical text to continue; fewer if the text is shorter.
        opening: Tokens per opening.
        max_new_tokens: Maximum length of a continuation; shorter if the context is.

    Example:
        sinkscope loop-rate --openings 32 --max-new-tokens 500
    """
    limit = setup.target.max_positions or opening + max_new_tokens
    new = max(SHORTEST, min(max_new_tokens, limit - opening - 2))
    setup.record(max_new_tokens=new)
    rows = text_rows(setup.tokenizer, setup.text, openings, opening + new, setup.bos).tolist()
    prompts = [setup.tokenizer.decode(row[int(setup.bos is not None) : opening]) for row in rows]
    found = [_share("text", [row[opening:] for row in rows])]
    for i, way in enumerate(("drawn", "guard", "greedy")):
        setup.progress("ways to continue", i, 3)
        made = generate(
            setup.target,
            prompts,
            guard=way == "guard",
            temperature=float(way == "drawn"),
            max_new_tokens=new,
            seed=setup.seed,
            bos=setup.bos is not None,
            batch_size=len(prompts),
        )
        found.insert(0, _share(way, [one.tokens for one in made]))
    return LoopRate(max_new_tokens=new, shares=tuple(found))


def _share(way: str, rows: Sequence[Sequence[int]]) -> LoopShare:
    loops = sum(bool(tail_period(row, repeats=REPEATS, shortest=SHORTEST)) or ends_in_loop(row) for row in rows)
    n, p = len(rows) + 4, (loops + 2) / (len(rows) + 4)
    margin = 2 * (p * (1 - p) / n) ** 0.5
    return LoopShare(way, loops, len(rows), loops / len(rows), margin, fmean(map(len, rows)))
