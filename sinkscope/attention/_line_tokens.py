"""Important tokens of a prompt by who looks at them: its last queries, the answer's, or those of a block of either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.attention._line_data import Question
from sinkscope.attention._line_tap import scores_of
from sinkscope.interventions.decode import greedy
from sinkscope.lines.sums import Scores, line_sums
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.walk import Progress

BUDGETS = (0.05, 0.1, 0.15)
POSITIONS = ("begin", "middle", "end")
BLOCKS = 8  # of the prompt's end that are shown
Range = tuple[int, int]


@dataclass(frozen=True)
class PositionOverlap:
    """Where the question stands, and the share of the answer's important tokens that the last window finds.

    Attributes:
        position: "begin", "middle" or "end".
        overlap: one number per budget, mean over the prompts.
    """

    position: str
    overlap: tuple[float, ...]


@dataclass(frozen=True)
class BlockOverlap:
    """A block of queries as selector, the question at the end; means over the prompts that have it.

    Attributes:
        block: -1 is the last of the prompt, 0 the first of the answer.
        overlap: share of the whole answer's important tokens that it finds, per budget.
        apart: the same without its own queries in the answer; None for an answer of one block.
        prompts: how many have it.
    """

    block: int
    overlap: tuple[float, ...]
    apart: tuple[float, ...] | None
    prompts: int


@dataclass(frozen=True)
class Distance:
    """Important tokens shared by two blocks of an answer, mean over all pairs so far apart.

    Attributes:
        blocks: how far.
        overlap: one number per budget.
        pairs: how many.
    """

    blocks: int
    overlap: tuple[float, ...]
    pairs: int


@dataclass(frozen=True)
class TokenOverlap:
    """Observation 4, and what Fig. 4 shows.

    Attributes:
        budgets: shares of the prompt's tokens that count as important.
        window: queries of the last window, and of a block.
        prompts: how many.
        answer_tokens: mean length of the answers.
        random: what tokens drawn at random share with the important ones, per budget.
        positions: by where the question stands.
        blocks: Fig. 4 a.
        distances: Fig. 4 b.
    """

    budgets: tuple[float, ...]
    window: int
    prompts: int
    answer_tokens: float
    random: tuple[float, ...]
    positions: tuple[PositionOverlap, ...]
    blocks: tuple[BlockOverlap, ...]
    distances: tuple[Distance, ...]

    def lines(self) -> list[str]:
        """What was found, in a line or two."""
        i = min(range(len(self.budgets)), key=lambda k: abs(self.budgets[k] - 0.1))
        shown = ", ".join(f"{p.overlap[i]:.1%} with the question at its {_END[p.position]}" for p in self.positions)
        found = [
            f"Of the {self.budgets[i]:.0%} of a prompt that its answer attends to most, the last {self.window} queries "
            f"find {shown} (random {self.random[i]:.1%}; {self.prompts} prompts)."
        ]
        if self.distances:
            near = self.distances[0]
            far = self.distances[-1]
            tail = "" if far is near else f", {far.blocks} apart {far.overlap[i]:.1%}"
            found.append(f"Blocks of {self.window} queries of an answer share {near.overlap[i]:.1%} one apart{tail}.")
        return found


_END = {"begin": "beginning", "middle": "middle", "end": "end"}


def token_overlap(
    target: Target,
    asked: Sequence[Question],
    layers: list[int],
    new: int,
    budgets: Sequence[float],
    window: int,
    progress: Progress | None = None,
) -> TokenOverlap:
    """Answer every prompt greedily with its question at three places, and compare who attends to what.

    A token's importance is the attention that it gets from the queries in question, summed over them, all heads and
    layers (section 3.2).

    Args:
        target: the model.
        asked: the prompts.
        layers: whose attention counts.
        new: tokens of an answer at most.
        budgets: shares of the prompt's tokens.
        window: queries of a window and a block.
        progress: called after every answer.
    """
    found: dict[str, list[list[float]]] = {where: [] for where in POSITIONS}
    blocks: dict[int, list[tuple[list[float], list[float] | None]]] = {}
    apart: dict[int, list[list[float]]] = {}
    random: list[list[float]] = []
    lengths: list[int] = []
    for i, question in enumerate(asked):
        for j, where in enumerate(POSITIONS):
            ids = question.placed(where)
            answer = greedy(target, torch.tensor([ids]), new)[0]
            n, whole = len(ids), torch.tensor([*ids, *answer])
            before = [(n - (b + 1) * window, n - b * window) for b in range(min(BLOCKS, n // window))]
            after = [(n + b * window, n + (b + 1) * window) for b in range(len(answer) // window)]
            ranges = [(max(0, n - window), n), (n, len(whole)), *((*before, *after) if where == "end" else ())]
            last, output, *rest = _importance(target, whole, n, layers, ranges)
            truth = _top(output, budgets)
            found[where].append(_shared(_top(last, budgets), truth))
            random.append((truth.sum(1) / n).tolist())
            lengths.append(len(answer))
            for b, part in enumerate(rest):
                own, chosen = b >= len(before), _top(part, budgets)
                without = _top(output - part, budgets) if own else truth
                alone = None if own and len(answer) == window else _shared(chosen, without)
                place = b - len(before) if own else -1 - b
                blocks.setdefault(place, []).append((_shared(chosen, truth), alone))
                for other in range(len(before), b if own else 0):
                    apart.setdefault(b - other, []).append(_shared(_top(rest[other], budgets), chosen))
            if progress is not None:
                progress("answers", i * len(POSITIONS) + j + 1, len(asked) * len(POSITIONS))
    return TokenOverlap(
        tuple(budgets),
        window,
        len(asked),
        sum(lengths) / len(lengths),
        _mean(random),
        tuple(PositionOverlap(where, _mean(values)) for where, values in found.items()),
        tuple(
            BlockOverlap(
                place,
                _mean([whole for whole, _ in blocks[place]]),
                _mean([alone for _, alone in blocks[place] if alone is not None]) or None,
                len(blocks[place]),
            )
            for place in sorted(blocks)
        ),
        tuple(Distance(far, _mean(apart[far]), len(apart[far])) for far in sorted(apart)),
    )


def _importance(
    target: Target, ids: Tensor, prompt: int, layers: list[int], ranges: Sequence[Range]
) -> list[Float[Tensor, " key"]]:
    """What each of the first `prompt` tokens gets from the queries of each range, over all heads and layers."""
    found = [torch.zeros(prompt) for _ in ranges]

    def add(_: int, scores: Scores) -> None:
        for total, (start, stop) in zip(found, ranges, strict=True):
            got = line_sums(scores.part(start, stop))[0].sum(0).cpu()[:prompt]
            total[: len(got)] += got

    with scores_of(target, add, layers):
        target.forward(ids[None])
    return found


def _top(importance: Float[Tensor, " key"], budgets: Sequence[float]) -> Bool[Tensor, "budget key"]:
    chosen = torch.zeros(len(budgets), len(importance), dtype=torch.bool)
    for row, budget in zip(chosen, budgets, strict=True):
        row[importance.topk(max(1, round(budget * len(importance)))).indices] = True
    return chosen


def _shared(a: Bool[Tensor, "budget key"], b: Bool[Tensor, "budget key"]) -> list[float]:
    return ((a & b).sum(1) / b.sum(1)).tolist()


def _mean(series: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(sum(values) / len(values) for values in zip(*series, strict=True))
