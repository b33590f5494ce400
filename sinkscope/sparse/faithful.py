"""Algorithm 5 of LoopServe as printed (Li et al. 2025, appendix A.6), head by head, with its names.

Numbers in comments are lines of the algorithm. `w` are weights of lines in the sample, `l` their lengths in the matrix,
and `ol` the sums of the largest cells (`w_max`) of the lines chosen so far. `_s` stands for slash lines, `_v` for
vertical ones.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.sparse.attention import slash_sums
from sinkscope.sparse.head_lines import HeadLines


def faithful_lines(
    probs: Float[Tensor, "head row key"], at: Int[Tensor, " row"], alpha: float, lines: HeadLines
) -> HeadLines:
    """Add lines to those of each head until they hold `alpha` of the sample; a head whose lists end becomes dense.

    Args:
        probs: Attention of the sampled queries (lines 1 to 4).
        at: Positions of these queries.
        alpha: Share of the sampled weight.
        lines: Lines that are always chosen; they are changed in place.
    """
    offset = (at[:, None] - torch.arange(probs.shape[2], device=at.device)).clamp(min=0)  # the future has no weight
    largest_s = torch.zeros_like(probs[:, 0])
    largest_s.scatter_reduce_(1, offset.flatten().expand(len(probs), -1), probs.flatten(1), "amax")
    weight = torch.stack([probs.sum(1), slash_sums(probs, at)], 1)  # 5
    order = weight.masked_fill(lines.chosen, torch.inf).argsort(dim=2, descending=True, stable=True)  # 6
    w = pad(weight.gather(2, order), (0, 1), value=-torch.inf)  # a list that has ended offers nothing
    w_max = torch.stack([probs.amax(1), largest_s], 1).double().gather(2, order)
    ol = pad(w_max.cumsum(2), (1, 0))  # 8: after so many lines of the list
    length = pad(lines.lengths()[order], (0, 1))
    totals = (probs * lines.rows(at)).sum((1, 2), dtype=torch.float64).tolist()
    targets = (alpha * probs.sum((1, 2), dtype=torch.float64)).tolist()
    for head, (total, target) in enumerate(zip(totals, targets, strict=True)):
        (w_v, w_s), (ol_v, ol_s), (l_v, l_s) = w[head].tolist(), ol[head].tolist(), length[head].tolist()
        v, s = lines.chosen[head].sum(1).tolist()  # 7: numbers of chosen lines, and where the lists begin
        while total < target and min(v, s) < probs.shape[2]:  # 9
            dw_s, dw_v = w_s[s] - ol_v[v], w_v[v] - ol_s[s]  # 10, 11
            if dw_s / max(1, l_s[s] - v) >= dw_v / max(1, l_v[v] - s):  # 12
                total, s = total + max(0.0, dw_s), s + 1  # 13, 14
            else:
                total, v = total + max(0.0, dw_v), v + 1  # 16, 17
        if total >= target:
            lines.vertical[head, order[head, 0, :v]] = True
            lines.slash[head, order[head, 1, :s]] = True
        else:  # the lists ended, or the attention is not a number
            lines.vertical[head] = True
    return lines  # 18
