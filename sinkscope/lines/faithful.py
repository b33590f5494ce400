"""Algorithm 5 of LoopServe as printed, head by head."""

from __future__ import annotations

from operator import itemgetter

import torch
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.lines.attention import slash_sums
from sinkscope.lines.head_lines import HeadLines


def faithful_lines(probs: Tensor, at: Tensor, alpha: float, lines: HeadLines) -> HeadLines:
    """Algorithm 5 as printed, head by head."""
    totals = (probs * lines.rows(at)).sum((1, 2), dtype=torch.float64).tolist()
    targets = (alpha * probs.sum((1, 2), dtype=torch.float64)).tolist()
    offset = (at[:, None] - torch.arange(probs.shape[2], device=at.device)).clamp(min=0)  # the future has no weight
    slash_largest = torch.zeros_like(probs[:, 0])
    slash_largest.scatter_reduce_(1, offset.flatten().expand(len(probs), -1), probs.flatten(1), "amax")
    # The lines of each kind by descending weight, those that are always chosen first; and the sum of the largest cells
    # of the lines before each.
    weight = torch.stack([probs.sum(1), slash_sums(probs, at)], 1)
    order = weight.masked_fill(lines.chosen, torch.inf).argsort(dim=2, descending=True, stable=True)
    largest = torch.stack([probs.amax(1), slash_largest], 1).double().gather(2, order)
    weight = weight.gather(2, order)
    overlap = pad(largest.cumsum(2), (1, 0))
    length = lines.lengths()[order]
    for head, (total, target) in enumerate(zip(totals, targets, strict=True)):
        weights, overlaps, lengths = weight[head].tolist(), overlap[head].tolist(), length[head].tolist()
        taken = lines.chosen[head].sum(1).tolist()
        while total < target:
            offers: list[tuple[float, float, int]] = []
            for kind, other in ((1, 0), (0, 1)):  # of equals the slash line
                if taken[kind] < len(weights[kind]):
                    gain = weights[kind][taken[kind]] - overlaps[other][taken[other]]
                    cells = lengths[kind][taken[kind]] - taken[other]
                    offers.append((gain / max(1, cells), gain, kind))
            if not offers:
                break
            _, gain, best = max(offers, key=itemgetter(0))
            total += max(0.0, gain)
            taken[best] += 1
        if total >= target:
            for kind in (0, 1):
                lines.chosen[head, kind, order[head, kind, : taken[kind]]] = True
        else:  # the lists ended, or the attention is not a number
            lines.vertical[head] = True
    return lines
