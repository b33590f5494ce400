"""The greedy choice of lines, by the weight that each adds to the sample per cell that it adds to the matrix.

On a GPU the host runs ahead of the device: the first `_UNCHECKED` rounds wait for no result, so launching them takes no
time while the device still computes the layer before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.lines.attention import causal_cells, slash_sums
from sinkscope.lines.head_lines import HeadLines, crossing_counts

_UNCHECKED = 7  # rounds on a GPU before it is asked for the first time whether all heads are done
_GROWTH = 4
"""How many times as many lines a round on a GPU takes as the one before. With 2, lines have 1 to 3 % fewer cells."""
_MOST = 2048  # lines that a round on a GPU takes at most
_SPARE = 1.1  # how much of what is missing a round on a GPU takes at most: lines of one round cross, and hold less


@dataclass(eq=False)
class _Search:
    """What the greedy choice knows of every head that it still searches; lines are vertical ones, then slash lines.

    Attributes:
        head: Number of each head.
        left: Attention that is not yet on any chosen line.
        weights: Weight that each line has outside all chosen lines; minus infinity for chosen ones.
        chosen: 1 for chosen lines, else 0.
        missing: Weight that is to be found.
        batch: Number of lines that a round takes at most.
        done: Whether the search has ended.
        dense: Whether it ended because lines take too many cells.
    """

    head: Int[Tensor, " head"]
    left: Float[Tensor, "head row key"]
    weights: Float[Tensor, "head kind line"]
    chosen: Float[Tensor, "head kind line"]
    missing: Float[Tensor, " head"]
    batch: Int[Tensor, " head"]
    done: Bool[Tensor, " head"]
    dense: Bool[Tensor, " head"]

    def unfinished(self) -> _Search:
        """The search of the heads that are not done."""
        going = ~self.done
        return _Search(**{name: values[going] for name, values in vars(self).items()})

    def found(self) -> Bool[Tensor, "head kind line"]:
        """The chosen lines; all lines of dense heads."""
        return self.chosen.bool() | self.dense[:, None, None]

    def take(
        self, index: Int[Tensor, "head taken"], taken: Bool[Tensor, "head taken"], at: Int[Tensor, " row"]
    ) -> None:
        """Choose those of these lines that are `taken`, and remove their cells from all that they cross."""
        keys = self.left.shape[2]
        _flat(self.chosen).scatter_add_(1, index, taken.float())
        _flat(self.weights).scatter_add_(1, index, torch.where(taken, -torch.inf, 0.0))
        # Each line has one cell in every row; where a slash line has none, a cell in the future stands in for it.
        offset = (index - keys)[:, None]
        back = at[:, None] - offset
        columns = torch.where(offset < 0, offset + keys, torch.where(back < 0, offset, back))
        cells = self.left.gather(2, columns)
        # Where a vertical and a slash line of this round cross, the cell counts for the vertical one.
        crossed = self.chosen[:, 0].gather(1, columns.flatten(1)).view_as(cells)
        counted = taken[:, None] & ((offset < 0) | (crossed == 0))
        removed = torch.where(counted, -cells, 0.0)
        self.missing += removed.sum((1, 2), dtype=torch.float64)
        self.left.scatter_add_(2, columns, removed)
        slash_lines = (at[:, None] - columns).abs_() + keys
        _flat(self.weights).scatter_add_(1, columns.flatten(1), removed.flatten(1))
        _flat(self.weights).scatter_add_(1, slash_lines.flatten(1), removed.flatten(1))

    def set_batch(self, most: Float[Tensor, " head"]) -> None:
        """Set how many lines the next round takes; `most` is the weight of the heaviest line of each head.

        The first lines are taken one by one, later ones in batches, because rounds cost time, not lines: a fifth of the
        chosen lines, or a twentieth of those that are missing at least.
        """
        share_of_chosen = self.chosen.sum((1, 2)).long() // 5
        lines_missing = (self.missing / most.clamp(min=1e-30)).clamp(0, 2 * self.left.shape[2]).long()
        batch = torch.maximum(share_of_chosen, lines_missing // 20).clamp(min=1)
        self.batch = batch.masked_fill(self.done, 1)


def _flat(lines: Tensor) -> Tensor:
    return lines.view(len(lines), -1)  # "head kind line -> head (kind line)", without a copy


def exact_lines(
    left: Float[Tensor, "head row key"],
    at: Int[Tensor, " row"],
    alpha: float,
    lines: HeadLines,
    *,
    flat: Bool[Tensor, " head"],
    local: int,
    dense_above: float,
    sharp: float,
    few_rounds: bool,
) -> Bool[Tensor, "head kind key"]:
    """Choose greedily by the weight that a line adds to the sample per cell that it adds to the matrix.

    Args:
        left: Attention of the sample, which is written over.
        at: Positions of the sample, on the CPU.
        alpha: Share of the weight that is to be found.
        lines: Lines that are chosen already: line 0 of both kinds, `local` slash lines, others that are vertical.
        flat: Heads that get all lines.
        local: Number of offsets from 0 that are chosen.
        dense_above: Share of cells above which a head gets all lines.
        sharp: Share of their rows' attention from which on lines are taken in any case.
        few_rounds: Whether each round takes many more lines than the one before, as on a GPU, where rounds are dear;
            finished heads then stay in the search.
    """
    heads, rows, keys = left.shape
    places, at = at, at.to(left.device, non_blocking=True)
    sharp = sharp * rows / lines.queries  # weights are those of the sample, lengths of the matrix
    left.masked_fill_(lines.vertical[:, None], 0.0)
    near = (at[:, None] - torch.arange(local, device=at.device)).clamp_(min=0)
    left.scatter_(2, near.expand(heads, -1, -1), 0.0)
    search = _begun(left, places, (1 - alpha) * rows, lines, flat)
    lengths = lines.lengths().float()
    spare = _SPARE if few_rounds else 1.0
    limit = min(dense_above, 3.0) * causal_cells(lines.queries, keys)  # what is missing never takes 3 times all cells
    result = torch.ones_like(lines.chosen)
    if not few_rounds:
        search = search.unfinished()
    for number in range(2 * keys + _UNCHECKED):  # a round takes a line or more of every head that goes on, or ends it
        if not few_rounds or number >= _UNCHECKED:
            done = int(search.done.sum())
            if done == len(search.done):
                break
            if not few_rounds and 2 * done >= len(search.done):
                result[search.head] = search.found()
                search = search.unfinished()
        crossings = crossing_counts(search.chosen.flip(1), lines.past)
        new_cells = lengths - crossings
        cells = (search.chosen * (new_cells + lengths)).sum((1, 2)) / 2  # where two lines cross, both lack half a cell
        ratio = _flat(search.weights / new_cells.clamp_(min=1))
        most = min(_GROWTH**number, _MOST) if few_rounds else int(search.batch.max())
        best, index = ratio.topk(min(most, 2 * keys), dim=1)
        gain = _flat(search.weights).gather(1, index)
        best_ratio = best[:, 0]
        enough = search.missing <= 0
        # What is missing takes more cells than it would if all lines were as good as the best one. Nothing is at most
        # the limit where only rounding errors are left, or where attention is not a number.
        least_cells = search.missing / best_ratio.clamp(min=1e-30)
        hopeless = ~((cells + least_cells <= limit) | enough)
        search.dense |= hopeless & ~search.done
        search.done |= hopeless | enough & (best_ratio < sharp)
        # Lines of one round may cross, so this never takes one too many; what is short comes in the next round.
        needed = gain.cumsum(1) - gain < spare * search.missing[:, None]
        taken = (needed | (best >= sharp)) & (best > 0) & ~search.done[:, None]
        if not few_rounds:
            taken &= torch.arange(best.shape[1], device=at.device) < search.batch[:, None]
        search.take(index, taken, at)
        if not few_rounds:
            search.set_batch(gain.amax(1))
    else:
        raise RuntimeError("the choice of lines did not end although every line was taken")
    result[search.head] = search.found()
    return result


def _begun(
    left: Float[Tensor, "head row key"],
    at: Int[Tensor, " row"],
    spared: float,
    lines: HeadLines,
    flat: Bool[Tensor, " head"],
) -> _Search:
    """The search of all heads, of whose weight outside of the chosen lines so much need not be found."""
    weights = torch.stack([left.sum(1), slash_sums(left, at)], 1)
    missing = weights[:, 0].sum(1, dtype=torch.float64) - spared
    weights.masked_fill_(lines.chosen, -torch.inf)
    every_head = torch.arange(len(left), device=left.device)
    one = torch.ones_like(every_head)
    return _Search(every_head, left, weights, lines.chosen.float(), missing, one, flat.clone(), flat.clone())


def least_share(probs: Float[Tensor, "head row key"], at: Int[Tensor, " row"], alpha: float) -> Float[Tensor, " head"]:
    """Lower bound on the share of a sample's cells that hold alpha of its weight, for every head.

    A set that holds m of a row has at least m / (largest cell) cells and, by Cauchy and Schwarz, at least m^2 / (sum of
    squares of the row). The total is smallest if one more cell gains equally little in every row.
    """
    flat = torch.linalg.vector_norm(probs, dim=2).double().square().reciprocal()
    sharp = probs.amax(2).double().reciprocal()
    low = torch.zeros_like(flat[:, :1])
    width = 2 * flat.amax(1, keepdim=True)

    def held(slope: Float[Tensor, "head slope"]) -> Float[Tensor, "head row slope"]:
        slope, most = slope[:, None], sharp[:, :, None]
        return torch.where(slope < most, 0, torch.maximum(most, slope / 2) / flat[:, :, None]).clamp(max=1)

    steps = torch.arange(1, 32, device=low.device)
    for _ in range(4):  # 20 bits
        width = width / 32
        enough = held(low + width * steps).mean(1) >= alpha
        low = low + width * (~enough).sum(1, keepdim=True)
    share = held(low)[:, :, 0]
    return torch.maximum(share * sharp, share.square() * flat).sum(1) / (at + 1).sum()
