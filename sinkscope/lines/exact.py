"""The greedy choice of lines, by the weight that each adds to the sample per cell that it adds to the matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.lines.attention import slash_sums
from sinkscope.lines.head_lines import HeadLines, crossing_counts


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
    """

    head: Int[Tensor, " head"]
    left: Float[Tensor, "head row key"]
    weights: Float[Tensor, "head kind line"]
    chosen: Float[Tensor, "head kind line"]
    missing: Float[Tensor, " head"]
    batch: Int[Tensor, " head"]
    done: Bool[Tensor, " head"]

    def unfinished(self) -> _Search:
        """The search of the heads that are not done."""
        going = ~self.done
        return _Search(**{name: values[going] for name, values in vars(self).items()})

    def take(self, index: Int[Tensor, "head taken"], at: Int[Tensor, " row"]) -> None:
        """Choose lines, and remove their cells from all that they cross."""
        _, rows, keys = self.left.shape
        _flat(self.chosen).scatter_(1, index, 1.0)
        _flat(self.weights).scatter_(1, index, -torch.inf)
        columns = repeat(index * (index < keys), "head taken -> head row taken", row=rows)
        slash_lines_crossed = (at[:, None] - columns).clamp_(min=0) + keys
        self._remove(columns, slash_lines_crossed)
        offset = (index - keys)[:, None]
        columns = torch.where(offset > 0, at[:, None] - offset, 0).clamp_(min=0)
        self._remove(columns, columns)

    def set_batch(self, most: Float[Tensor, " head"]) -> None:
        """Set how many lines the next round takes; `most` is the weight of the heaviest line of each head.

        The first lines are taken one by one, later ones in batches, because rounds cost time, not lines: a fifth of the
        chosen lines, or a twentieth of those that are missing at least; on a GPU, where rounds are dear, as many lines
        as are chosen.
        """
        lines_per_taken = 5
        if self.left.device.type != "cpu":
            lines_per_taken = 1
        share_of_chosen = self.chosen.sum((1, 2)).long() // lines_per_taken
        lines_missing = (self.missing / most.clamp(min=1e-30)).clamp(0, 2 * self.left.shape[2]).long()
        batch = torch.maximum(share_of_chosen, lines_missing // 20).clamp(min=1)
        self.batch = batch.masked_fill(self.done, 1)

    def _remove(self, columns: Int[Tensor, "head row taken"], crossed: Int[Tensor, "head row taken"]) -> None:
        """Remove one cell in each row for every line taken, also from the weight of the line that crosses it there."""
        cells = self.left.gather(2, columns)
        self.left.scatter_(2, columns, 0.0)
        _flat(self.weights).scatter_add_(1, crossed.flatten(1), -cells.flatten(1))
        self.missing -= cells.sum((1, 2), dtype=torch.float64)


def _flat(lines: Tensor) -> Tensor:
    return lines.view(len(lines), -1)  # "head kind line -> head (kind line)", without a copy


def exact_lines(left: Tensor, at: Tensor, alpha: float, lines: HeadLines, dense_above: float, sharp: float) -> Tensor:
    """Choose greedily by the weight that a line adds to the sample per cell that it adds to the matrix.

    `left` is the attention that is not yet on any chosen line; what is chosen is returned.
    """
    heads, rows, keys = left.shape
    sharp = sharp * rows / lines.queries  # weights are those of the sample, lengths of the matrix
    # Of lines that are chosen already. Those are few slash lines, the same in all heads, and line 0 of both kinds. Its
    # cells stand in for missing ones here and further down.
    left.masked_fill_(lines.vertical[:, None], 0.0)
    near = (at[:, None] - lines.slash[0].nonzero().flatten()).clamp_(min=0)
    left.scatter_(2, near.expand(heads, -1, -1), 0.0)
    lengths = lines.lengths().float()
    limit = dense_above * float(lengths.sum())
    weights = torch.stack([left.sum(1), slash_sums(left, at)], 1)
    chosen = lines.chosen.float()
    missing = weights[:, 0].sum(1, dtype=torch.float64) - (1 - alpha) * rows
    weights.masked_fill_(chosen.bool(), -torch.inf)
    result = chosen.clone()
    every_head = torch.arange(heads, device=left.device)
    one = torch.ones_like(every_head)
    search = _Search(every_head, left, weights, chosen, missing, one, torch.zeros_like(one, dtype=torch.bool))
    for _ in range(2 * keys):  # every round takes at least one line of every head that is not done, or ends it
        if 2 * int(search.done.sum()) >= len(search.done):
            result[search.head] = search.chosen
            search = search.unfinished()
        if not len(search.head):
            break
        crossings = crossing_counts(search.chosen.flip(1), lines.past)
        cells = (search.chosen @ lengths).sum(1) - (search.chosen[:, 0] * crossings[:, 0]).sum(1)
        new_cells = crossings.neg_().add_(lengths).clamp_(min=1)
        ratio = _flat(search.weights / new_cells)
        best, index = ratio.topk(min(int(search.batch.max()), 2 * keys), dim=1)
        gain = _flat(search.weights).gather(1, index)
        best_ratio = best[:, 0]
        # What is missing takes more cells than it would if all lines were as good as the best one.
        short = ~(search.missing <= 0)  # also where attention is not a number: a dense head hands it on
        least_cells = search.missing / best_ratio.clamp(min=1e-30)
        hopeless = short & (cells + least_cells > limit)
        given_up = hopeless | short & ~(best_ratio > 0)  # only rounding errors are left
        # Lines of one round may cross, so this never takes one too many; what is short comes in the next round.
        needed = gain.cumsum(1) - gain < search.missing[:, None]
        in_batch = torch.arange(best.shape[1], device=best.device) < search.batch[:, None]
        taken = (needed | (best >= sharp)) & (best > 0) & in_batch
        search.chosen[~search.done & given_up] = 1.0
        search.done |= given_up | ~short & (best_ratio < sharp)
        # Line 0, which was chosen first, stands in for lines not taken.
        search.take(index * (taken & ~search.done[:, None]), at)
        search.set_batch(gain.amax(1))
    else:
        raise RuntimeError("the choice of lines did not end although every line was taken")
    return result.bool()


def least_share(probs: Tensor, at: Tensor, alpha: float) -> Tensor:
    """Lower bound on the share of a sample's cells that hold alpha of its weight, for every head.

    A set that holds m of a row has at least m / (largest cell) cells and, by Cauchy and Schwarz, at least m^2 / (sum of
    squares of the row). The total is smallest if one more cell gains equally little in every row.
    """
    flat = torch.linalg.vector_norm(probs, dim=2).double().square().reciprocal()
    sharp = probs.amax(2).double().reciprocal()
    low = torch.zeros_like(flat[:, :1])
    high = 2 * flat.amax(1, keepdim=True)

    def held(slope: Tensor) -> Tensor:
        return torch.where(slope < sharp, 0, torch.maximum(sharp, slope / 2) / flat).clamp(max=1)

    for _ in range(20):
        slope = (low + high) / 2
        enough = held(slope).mean(1, keepdim=True) >= alpha
        low = torch.where(enough, low, slope)
        high = torch.where(enough, slope, high)
    share = held(low)
    return torch.maximum(share * sharp, share.square() * flat).sum(1) / (at + 1).sum()
