"""Choose lines of attention by LoopServe's algorithm 5 (Li et al. 2025, section 5.1).

Algorithm 5 leaves some points open. They are settled here as follows:

- *Sample*: query rows are drawn uniformly without replacement, from a seed. If there are fewer queries than the sample
  size, all are taken.
- *Lengths* are those of the matrix that is to be computed, as in the paper's equation 1; weights are those of the
  sample. The sample is a fixed share of all rows, so the ratio of the two orders lines in the same way.
- *Always kept*: the main diagonal and position 0, so that every query sees something; more with `begin` and `local`.
- *alpha = 1* is dense by definition, because a sample says nothing certain about rows outside it.
- `variant="exact"`: the marginal weight of a line is its weight in the sample outside all chosen lines, divided by the
  number of cells it adds to the matrix. Lines are weighed again whenever others have been chosen.
- `variant="faithful"`: one overlap for all lines of a kind, as printed. `w^max` is read as the largest sampled cell of
  a line, because two lines share at most one cell; `sum` then never exceeds what is recovered. Chosen lines are removed
  from their list. A gain below 0 counts as 0, a denominator below 1 as 1. If the lists are exhausted before `sum`
  reaches its target, the head is dense. This happens often, because overlaps are subtracted from every line, whether or
  not it crosses the chosen lines.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from sinkscope.files.records import Natural, Part, check_values
from sinkscope.lines.attention import Scores, attention_of
from sinkscope.lines.exact import exact_lines, least_share
from sinkscope.lines.faithful import faithful_lines
from sinkscope.lines.head_lines import HeadLines
from sinkscope.lines.sample import sample_queries
from sinkscope.models.grouped_heads import beside_keys

Variant = Literal["exact", "faithful"]
_SCATTERED = 1.25  # lines take at least so many times the cells of `least_share` where it is large, as measured
_SOUGHT = 0.5  # share of a query's attention on one key from which on the query searches for it
_AT_A_TIME = 1 << 25  # cells of attention in memory while sought keys are looked for; on a GPU 8 times as many


@torch.no_grad()
def select_lines(
    scores: Scores,
    alpha: float = 0.955,
    *,
    sample: int = 48,
    variant: Variant = "exact",
    seed: int = 0,
    dense_above: float = math.inf,
    begin: int = 1,
    local: int = 1,
    sharp: float | None = None,
    checked: int = 0,
) -> HeadLines:
    """Run algorithm 5 for all heads of a layer: choose few vertical and slash lines that hold alpha of the attention.

    Args:
        scores: The scores of a layer without window, soft cap and learned sinks.
        alpha: Minimum share of the sampled attention weight that the lines hold.
        sample: Number of queries in the sample.
        variant: "exact" or "faithful"; see the module's docstring.
        seed: Seed of the sample.
        dense_above: Share of cells above which the exact variant makes a head dense: it gets all lines.
        begin: Number of first positions that are always kept.
        local: Number of offsets from 0 that are always kept.
        sharp: The exact variant also takes lines whose cells hold on average at least this share of their rows'
            attention, even if alpha is reached. They take few cells, and without them rows may lose everything, because
            alpha is a share of the sum over rows. None adds no such lines.
        checked: Number of queries outside the sample that are checked for a single sought key. These are the queries
            with the lowest raw scores for the first positions, because they probably seek something else. A key that
            holds half of such a query's attention is kept as a vertical line.

    Raises:
        SinkscopeError: alpha is outside (0, 1], the sample is below 1, or the variant is unknown.
    """
    check_values(Part, alpha=alpha)
    check_values(Natural, sample=sample)
    check_values(Variant, variant=variant)
    scores.check_plain()
    number = torch.arange(scores.keys, device=scores.key.device).repeat(scores.heads, 1)
    start = HeadLines.of(number < begin, number < local, scores.queries)
    if alpha == 1:
        start.vertical[:] = True
        return start
    rows = sample_queries(scores.queries, sample, seed)
    at = rows + scores.past
    probs = attention_of(scores, rows)
    if variant == "faithful":
        return faithful_lines(probs, at.to(number.device), alpha, start)
    flat = _SCATTERED * least_share(probs, at, alpha) > dense_above
    on_gpu = number.device.type != "cpu"
    if checked and on_gpu:  # a GPU would have to wait to know which heads are flat
        start.vertical[:] |= _sought(scores, begin, checked)
    elif checked and not bool(flat.all()):
        some = (~flat).nonzero().flatten()
        start.vertical[some] |= _sought(scores.of_heads(some), begin, checked)
    chosen = exact_lines(
        probs,
        at,
        alpha,
        start,
        flat=flat,
        local=local,
        dense_above=dense_above,
        sharp=sharp or math.inf,
        few_rounds=on_gpu,
    )
    return HeadLines(chosen, scores.queries)


def _sought(scores: Scores, begin: int, checked: int) -> Bool[Tensor, "head key"]:
    """Keys sought by single queries.

    Queries that seek nothing attend to the first tokens (attention sinks), so the queries that score these lowest are
    checked.
    """
    grouped = beside_keys(scores.query[None], len(scores.key)).to(scores.key)
    first_scores = ((grouped @ scores.key[:, :begin].mT).float() * scores.scaling).logsumexp(2).view(scores.heads, -1)
    rows = first_scores.topk(min(checked, scores.queries), largest=False).indices
    cells = _AT_A_TIME
    if rows.is_cuda:
        cells *= 8
    times_sought = torch.zeros(scores.heads, scores.keys, device=rows.device)
    for part in rows.split(max(1, cells // (scores.heads * scores.keys)), 1):
        weight, position = attention_of(scores, part).max(2)
        times_sought.scatter_add_(1, position, (weight >= _SOUGHT).float())
    return times_sought > 0
