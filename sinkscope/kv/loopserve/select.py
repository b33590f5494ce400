"""Which lines a head needs (Li et al. 2025, LoopServe, section 5.1 and algorithm 5), and MInference's choice beside it.

Algorithm 5 leaves things open. Settled here so:

- *Sample*: query rows drawn uniformly without replacement, by a seed. Fewer queries than the sample: all of them.
  `recent` puts the last queries into it: what only they attend to is on no line of a sample without them.
- *Lengths* are those of the matrix that is to be computed, as in the paper's equation 1, weights those of the sample:
  a sample is a fixed share of all rows, so their ratio orders lines alike.
- *Always kept*: the main diagonal and position 0, so that every query sees something.
- *alpha = 1* is dense by definition: no sample can vouch for the rows that it left out.
- `variant="exact"`: the marginal weight of a line is what it has of the sample outside of all chosen lines, over the
  new cells that it brings to the matrix; every line is looked at again as others are chosen.
- `variant="faithful"`: one number of overlap for all lines of a kind, as printed. `w^max` is read as the largest
  sampled cell of a line, since two lines share one cell at most: `sum` is then never more than what is recovered. The
  first entries of the lists are taken off when chosen. A line's gain below 0 counts as 0, a denominator below 1 as 1.
  If the lists end before `sum` arrives, the head is dense. As overlaps are subtracted from every line, whether it
  meets the chosen ones or not, this happens often.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.kv.loopserve.lines import HeadLines, attention_of

Variant = Literal["exact", "faithful"]


def check_selection(alpha: float, sample: int, variant: str, recent: int = 0) -> None:
    """Refuse settings that make no sense.

    Raises:
        SinkscopeError: alpha outside (0, 1], a sample below 1 or `recent`, an unknown variant.
    """
    if not 0 < alpha <= 1:
        raise SinkscopeError(f"alpha={alpha!r}: expected a share of the attention weight above 0 and up to 1")
    if sample < 1:
        raise SinkscopeError(f"sample={sample!r}: expected a number of queries from 1, such as 48")
    if not 0 <= recent <= sample:
        raise SinkscopeError(f"recent={recent!r}: expected a number of queries from 0 to sample={sample}")
    if variant not in ("exact", "faithful"):
        raise SinkscopeError(f'variant={variant!r}: expected "exact" or "faithful"')


def sample_queries(queries: int, sample: int, seed: int = 0, recent: int = 0) -> Int[Tensor, " row"]:
    """Numbers of the sampled queries, in rising order; the last `recent` are among them whatever is drawn."""
    generator = torch.Generator().manual_seed(seed)
    before = max(0, queries - recent)
    drawn = torch.randperm(before, generator=generator)[: sample - recent].sort().values
    return torch.cat([drawn, torch.arange(before, queries)])


@torch.no_grad()
def select_lines(
    query: Float[Tensor, "head query d_head"],
    key: Float[Tensor, "kv_head key d_head"],
    alpha: float = 0.955,
    *,
    sample: int = 48,
    recent: int = 0,
    variant: Variant = "exact",
    scaling: float | None = None,
    seed: int = 0,
    dense_above: float = 1.0,
) -> HeadLines:
    """Algorithm 5 for all heads of a layer: few cells on vertical and slash lines that hold alpha of the attention.

    Args:
        query: of the new tokens, after rotary; they are the last of the positions.
        key: of all positions, after rotary; query heads share them in groups.
        alpha: share of the sampled attention weight that the lines hold at least.
        sample: queries looked at.
        recent: of these the last ones, the others are drawn from those before.
        variant: "exact" or "faithful", see above.
        scaling: factor on the scores; None: one over the root of `d_head`.
        seed: of the sample.
        dense_above: share of cells above which the exact variant gives a head up: it gets all lines.

    Raises:
        SinkscopeError: alpha outside (0, 1], a sample below 1 or `recent`, an unknown variant.
    """
    check_selection(alpha, sample, variant, recent)
    heads, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    none = torch.zeros(heads, keys, dtype=torch.bool, device=query.device)
    start = HeadLines(none, none.clone(), queries)
    start.vertical[:, 0] = start.slash[:, 0] = True
    if alpha == 1:
        start.vertical[:] = True
        return start
    rows = sample_queries(queries, sample, seed, recent).to(query.device)
    at = rows + (keys - queries)
    probs = attention_of(query[:, rows], key, at, scaling)
    if variant == "faithful":
        return _faithful(probs, at, alpha, start)
    return _exact(probs, at, alpha, start, dense_above)


@torch.no_grad()
def minference_lines(
    query: Float[Tensor, "head query d_head"],
    key: Float[Tensor, "kv_head key d_head"],
    vertical: int = 1000,
    slash: int = 6096,
    *,
    last: int = 64,
    first: int = 30,
    local: int = 100,
    scaling: float | None = None,
) -> HeadLines:
    """MInference's vertical-slash pattern (Jiang et al. 2024): fixed numbers of lines, voted for by the last queries.

    Its kernel computes whole blocks around the slash lines; these are the lines alone.

    Args:
        query: as for `select_lines`.
        key: as for `select_lines`.
        vertical: vertical lines kept.
        slash: slash lines kept.
        last: queries at the end that vote.
        first: positions at the beginning that are kept in any case, among the `vertical`.
        local: offsets from 0 that are kept in any case, among the `slash`.
        scaling: factor on the scores; None: one over the root of `d_head`.

    Raises:
        SinkscopeError: a number below 1.
    """
    if min(vertical, slash, last) < 1:
        raise SinkscopeError(f"vertical={vertical}, slash={slash}, last={last}: expected numbers from 1")
    queries, keys = query.shape[1], key.shape[1]
    rows = torch.arange(max(0, queries - last), queries, device=query.device)
    at = rows + (keys - queries)
    probs = attention_of(query[:, rows], key, at, scaling)
    columns, offsets = probs.sum(1), slash_lines(probs, at)[0]
    columns[:, : min(first, vertical)] = offsets[:, : min(local, slash)] = torch.inf
    chosen: list[Tensor] = []
    for weights, count in ((columns, vertical), (offsets, slash)):
        top = weights.topk(min(count, keys), dim=1).indices
        chosen.append(torch.zeros_like(weights, dtype=torch.bool).scatter_(1, top, True))
    chosen[1][:, 0] = True
    return HeadLines(chosen[0], chosen[1], queries)


def slash_lines(
    probs: Float[Tensor, "head row key"], at: Int[Tensor, " row"]
) -> tuple[Float[Tensor, "head key"], Float[Tensor, "head key"]]:
    """Sum and largest cell of every slash line, by offset."""
    total, largest = torch.zeros_like(probs[:, 0]), torch.zeros_like(probs[:, 0])
    for number, row in enumerate(at.tolist()):
        back = probs[:, number, : row + 1].flip(1)
        total[:, : row + 1] += back
        torch.maximum(largest[:, : row + 1], back, out=largest[:, : row + 1])
    return total, largest


def _exact(left: Tensor, at: Tensor, alpha: float, lines: HeadLines, dense_above: float) -> HeadLines:
    """Greedy by what a line adds to the sample per cell that it adds to the matrix; `left` is what no line has yet."""
    heads, rows, keys = left.shape
    past, count = lines.past, torch.arange(rows, device=at.device)
    flat = _least_share(left, at, alpha) > dense_above
    left[:, :, 0] = 0.0  # lines that are chosen already; what stands in for a missing cell, further down
    left[:, count, at] = 0.0
    lengths = lines.lengths().float()
    weights = torch.stack([left.sum(1), slash_lines(left, at)[0]], 1)
    chosen = torch.stack([lines.vertical, lines.slash], 1).float()  # [head kind line]; flat: vertical ones first
    missing = weights[:, 0].sum(1, dtype=torch.float64) - (1 - alpha) * rows
    weights[:, :, 0] = -torch.inf
    flat = flat | missing.isnan()  # as a dense head would have it
    chosen[flat] = 1.0
    result, which = chosen.clone(), torch.arange(heads, device=left.device)
    limit = dense_above * float(lengths.sum()) if dense_above < 1 else torch.inf
    done, batch = flat, 1
    while (finished := int(done.sum())) < len(done):
        if 2 * finished >= len(done):  # go on with the others only
            result[which] = chosen
            which, left, weights, chosen, missing = (t[~done] for t in (which, left, weights, chosen, missing))
            done = done[~done]
            heads = len(done)
        crossed = chosen.flip(1).cumsum(2).flip(2)  # as `HeadLines.crossed`, for both kinds
        if past:
            before = torch.nn.functional.pad(chosen.flip(1)[:, :, :past].cumsum(2).flip(2), (0, 1))
            crossed[:, :, : past + 1] -= before
        cells = (chosen @ lengths).sum(1) - (chosen[:, 0] * crossed[:, 0]).sum(1)
        ratio = weights / crossed.neg_().add_(lengths).clamp_(min=1)
        best, index = ratio.view(heads, -1).topk(min(batch, 2 * keys), dim=1)
        gain = weights.view(heads, -1).gather(1, index)
        # What is missing takes more cells than it would if all lines were as good as the best one.
        hopeless = ~done & (missing > 0) & (cells + missing / best[:, 0].clamp(min=1e-30) > limit)
        chosen[hopeless] = 1.0
        done |= (missing <= 0) | hopeless
        # Lines of one round may cross, so this never takes one too many; what is short comes in the next round.
        take = (gain.cumsum(1) - gain < missing[:, None]) & (best > 0) & ~done[:, None]
        stuck = ~done & (best[:, 0] <= 0)  # nothing but rounding is left
        chosen[stuck] = 1.0
        done |= stuck
        index = index * take  # line 0, chosen long since, stands in for those that are not taken
        chosen.view(heads, -1).scatter_(1, index, 1.0)
        weights.view(heads, -1).scatter_(1, index, -torch.inf)
        vertical = (index * (index < keys))[:, None].expand(-1, rows, -1)
        slash = (index - keys)[:, None]
        slash = torch.where(slash > 0, at[:, None] - slash, 0).clamp_(min=0)
        for column, other in ((vertical, lambda column: (at[:, None] - column).clamp_(min=0) + keys), (slash, None)):
            cells = left.gather(2, column)
            left.scatter_(2, column, 0.0)
            crossing = column if other is None else other(column)
            weights.view(heads, -1).scatter_add_(1, crossing.flatten(1), -cells.flatten(1))
            missing -= cells.sum((1, 2), dtype=torch.float64)
        # The first lines one by one, later ones in batches: rounds cost time, not lines. A fifth of what there is takes
        # about 1 % more cells; on a GPU, where rounds are dear, as many as there are take about 6 % more.
        batch = max(1, int(chosen.sum((1, 2)).masked_fill(done, 0).max()) // (5 if left.device.type == "cpu" else 1))
    result[which] = chosen
    vertical, slash = result.bool().unbind(1)
    return HeadLines(vertical.contiguous(), slash.contiguous(), lines.queries)


def _least_share(probs: Tensor, at: Tensor, alpha: float) -> Tensor:
    """Share of a sample's cells that any choice of cells needs at least to hold alpha of its weight, for every head.

    By Cauchy and Schwarz a set that holds m of a row has at least m^2 / (sum of squares of the row) cells; the fewest
    in all are needed if rows that have to be long hold less than all, m = min(1, level / length).
    """
    length = torch.linalg.vector_norm(probs, dim=2).double().square().reciprocal()
    low, high = torch.zeros_like(length[:, :1]), length.amax(1, keepdim=True)
    for _ in range(20):
        level = (low + high) / 2
        enough = (level / length).clamp(max=1).mean(1, keepdim=True) >= alpha
        low, high = torch.where(enough, low, level), torch.where(enough, level, high)
    return ((low / length).clamp(max=1).square() * length).sum(1) / (at + 1).sum()


def _faithful(probs: Tensor, at: Tensor, alpha: float, lines: HeadLines) -> HeadLines:
    """Algorithm 5 as printed, head by head."""
    keys = probs.shape[2]
    lengths = lines.lengths().tolist()
    slash, slash_max = slash_lines(probs, at)
    vertical, vertical_max = probs.sum(1), probs.amax(1)
    kept = (probs * lines.rows(at)).sum((1, 2), dtype=torch.float64)
    wanted = alpha * probs.sum((1, 2), dtype=torch.float64)
    for head in range(len(probs)):
        chosen_s, chosen_v = [0], [0]
        order_s, order_v = _falling(slash[head]), _falling(vertical[head])
        w_s, w_v, most_s, most_v = (t[head].tolist() for t in (slash, vertical, slash_max, vertical_max))
        overlap_s, overlap_v = most_s[0], most_v[0]
        total, target = float(kept[head]), float(wanted[head])
        i = j = 0
        while total < target and (i < keys - 1 or j < keys - 1):
            s, v = (order_s[i] if i < keys - 1 else None), (order_v[j] if j < keys - 1 else None)
            gain_s = -torch.inf if s is None else w_s[s] - overlap_v
            gain_v = -torch.inf if v is None else w_v[v] - overlap_s
            per_s = gain_s if s is None else gain_s / max(1, lengths[s] - len(chosen_v))
            per_v = gain_v if v is None else gain_v / max(1, lengths[v] - len(chosen_s))
            if s is not None and per_s >= per_v:
                chosen_s.append(s)
                overlap_s, total, i = overlap_s + most_s[s], total + max(0.0, gain_s), i + 1
            elif v is not None:
                chosen_v.append(v)
                overlap_v, total, j = overlap_v + most_v[v], total + max(0.0, gain_v), j + 1
        if not total >= target:  # or not a number
            lines.vertical[head] = True
        else:
            lines.vertical[head, chosen_v] = True
            lines.slash[head, chosen_s] = True
    return lines


def _falling(weights: Float[Tensor, " key"]) -> list[int]:
    """Lines by falling weight, without number 0, which is always chosen."""
    order = torch.argsort(weights, descending=True, stable=True)
    return order[order != 0].tolist()
