"""Choose lines of attention: the heaviest, LoopServe's algorithm 5 (Li et al. 2025, section 5.1), MInference's.

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
import random
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.files.records import Natural, Part, check_values
from sinkscope.lines.deterministic_scatter import add_at

Variant = Literal["exact", "faithful"]
_ROWS = 64  # queries whose attention is built at a time
_SCATTERED = 1.25  # lines take at least so many times the cells of `_least_share` where it is large, as measured
_SEARCH = 4.0  # rows of dense attention that take as long as the choice does for each sampled or checked query
_SOUGHT = 0.5  # share of a query's attention on one key from which on the query searches for it


@dataclass(frozen=True, eq=False)
class HeadLines:
    """Vertical and slash lines chosen for every head of a layer in one sequence, or several such choices.

    Queries are the last `queries` of the positions. A vertical line is a key position, a slash line an offset (query
    position less key position). Both are restricted to causal cells of these queries.

    Attributes:
        vertical: Whether each key position is chosen.
        slash: Whether each offset is chosen.
        queries: Number of rows of the matrix.
    """

    vertical: Bool[Tensor, "*choice head key"]
    slash: Bool[Tensor, "*choice head key"]
    queries: int

    @property
    def past(self) -> int:
        """Number of positions before the first query."""
        return self.vertical.shape[-1] - self.queries

    def lengths(self) -> Int[Tensor, " key"]:
        """Number of cells of line i; it is the same for both kinds."""
        keys = self.vertical.shape[-1]
        return torch.arange(keys, 0, -1, device=self.vertical.device).clamp(max=self.queries)

    def counts(self) -> Int[Tensor, "*choice head"]:
        """Number of chosen lines."""
        return self.vertical.sum(-1) + self.slash.sum(-1)

    def cells(self) -> Int[Tensor, "*choice head"]:
        """Number of cells on the lines, each counted once."""
        both = (self.vertical.long() + self.slash.long()) * self.lengths()
        return (both - self.vertical * crossed(self.slash, self.past)).sum(-1)

    def density(self) -> Float[Tensor, "*choice head"]:
        """Share of all causal cells that lie on the lines."""
        return self.cells() / self.lengths().sum()

    def rows(self, at: Int[Tensor, " row"]) -> Bool[Tensor, "*choice head row key"]:
        """Which keys the queries at positions `at` see."""
        offset = at[:, None] - torch.arange(self.vertical.shape[-1], device=at.device)
        return (self.vertical[..., None, :] | self.slash[..., offset.clamp(min=0)]) & (offset >= 0)

    def random(self, generator: torch.Generator, *, cells: bool) -> HeadLines:
        """Draw random lines in place of these, per kind: the same number, or with `cells` the same lengths."""
        _, heads, keys = self.vertical.shape
        length = self.lengths()
        if not cells:
            length = torch.ones_like(length)
        kinds: list[Tensor] = []
        for chosen in (self.vertical, self.slash):
            order = torch.rand(heads, keys, generator=generator).argsort(1).to(chosen.device)
            drawn = length[order]
            reached = drawn.cumsum(1) - drawn / 2  # a line is taken if more than half of it still fits
            wanted = (chosen * length).sum(2, keepdim=True)
            kinds.append(torch.zeros_like(chosen).scatter_(2, order.expand_as(chosen), reached < wanted))
        return HeadLines(kinds[0], kinds[1], self.queries)


def crossed(lines: Shaped[Tensor, "*n line"], past: int) -> Shaped[Tensor, "*n line"]:
    """For each line of the other kind, how many of these cross it, if the first query is at position `past`."""
    # Lines j and o meet in row j + o, if that row is a query: o runs from past - j to keys - 1 - j.
    count = lines.cumsum(-1).flip(-1)
    count[..., :past] -= lines[..., :past].cumsum(-1).flip(-1)
    return count


def top_lines(
    vertical: Float[Tensor, "head key"],
    slash: Float[Tensor, "head key"],
    etas: Sequence[float],
    length: int | None = None,
) -> HeadLines:
    """Choose the heaviest `eta * 2 * length` lines of both kinds together, at least one, but none without weight.

    Args:
        vertical: Weights of vertical lines over all queries.
        slash: Weights of slash lines over all queries.
        etas: Shares of lines; one choice is made for each.
        length: Length in the formula. None means the number of key positions.
    """
    both = torch.cat([vertical, slash], 1)
    keys = vertical.shape[1]
    most = [max(1, math.floor(eta * 2 * (length or keys) + 1e-9)) for eta in etas]
    rank = both.argsort(dim=1, descending=True, stable=True).argsort(1)
    chosen = (rank < rank.new_tensor(most)[:, None, None]) & (both > 0)
    return HeadLines(chosen[..., :keys], chosen[..., keys:], keys)


def attention_of(
    query: Float[Tensor, "head row d_head"],
    key: Float[Tensor, "kv_head key d_head"],
    at: Int[Tensor, " row"],
    scaling: float | None = None,
) -> Float[Tensor, "head row key"]:
    """Causal attention of the queries at positions `at`, in float32; `scaling` None means 1 / sqrt(d_head)."""
    kv_heads, keys, width = key.shape
    if scaling is None:
        scaling = float(width**-0.5)
    # A matrix product, which is faster than einsum: "kv_head (group row) d, kv_head key d -> kv_head (group row) key".
    grouped = rearrange(query.float(), "(kv_head group) row d -> kv_head (group row) d", kv_head=kv_heads) * scaling
    scores = grouped @ rearrange(key.float(), "kv_head key d -> kv_head d key")
    scores = rearrange(scores, "kv_head (group row) key -> (kv_head group) row key", row=query.shape[1])
    future = torch.arange(keys, device=at.device) > at[:, None]
    return scores.masked_fill_(future, -torch.inf).softmax(-1)


def recovered(
    query: Float[Tensor, "head query d_head"],
    key: Float[Tensor, "kv_head key d_head"],
    lines: HeadLines,
    scaling: float | None = None,
    rows: Int[Tensor, " row"] | None = None,
) -> Float[Tensor, " head"]:
    """Share of the attention matrix's weight that lies on the lines; every cell is counted once.

    Args:
        query: As for `select_lines`.
        key: As for `select_lines`.
        lines: Lines of every head.
        scaling: Factor on the scores. None means 1 / sqrt(d_head).
        rows: Indices of the queries to use. None uses all.
    """
    if rows is None:
        rows = torch.arange(query.shape[1])
    rows = rows.to(query.device)
    total = torch.zeros(query.shape[0], dtype=torch.float64, device=query.device)
    for part in rows.split(_ROWS):
        at = lines.past + part
        on_lines = attention_of(query[:, part], key, at, scaling) * lines.rows(at)
        total += on_lines.sum((1, 2), dtype=torch.float64)
    return (total / len(rows)).float()


def slash_sums(probs: Float[Tensor, "head row key"], at: Int[Tensor, " row"]) -> Float[Tensor, "head key"]:
    """Sum of every slash line, by offset, in the rows at positions `at`."""
    falling = torch.zeros_like(probs[:, 0])  # from the largest offset to 0, so that no row has to be turned round
    for number, row in enumerate(at.tolist()):
        falling[:, probs.shape[2] - 1 - row :] += probs[:, number, : row + 1]
    return falling.flip(1)


def last_votes(
    query: Float[Tensor, "head query d_head"],
    key: Float[Tensor, "kv_head key d_head"],
    last: int,
    scaling: float | None = None,
) -> tuple[Float[Tensor, "head key"], Float[Tensor, "head key"]]:
    """Attention of the last queries, summed along vertical lines and along slash lines."""
    queries = query.shape[1]
    keys = key.shape[1]
    rows = torch.arange(max(0, queries - last), queries, device=query.device)
    at = rows + (keys - queries)
    probs = attention_of(query[:, rows], key, at, scaling)
    return probs.sum(1), slash_sums(probs, at)


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

    The authors' kernel computes whole blocks around the slash lines; here only the lines themselves are kept.

    Args:
        query: As for `select_lines`.
        key: As for `select_lines`.
        vertical: Number of vertical lines to keep.
        slash: Number of slash lines to keep.
        last: Number of last queries that vote.
        first: Number of first positions that are always kept; they count towards `vertical`.
        local: Number of offsets from 0 that are always kept; they count towards `slash`.
        scaling: Factor on the scores. None means 1 / sqrt(d_head).

    Raises:
        SinkscopeError: A number is below 1.
    """
    check_values(Natural, vertical=vertical, slash=slash, last=last, local=local)
    column_votes, offset_votes = last_votes(query, key, last, scaling)
    columns = _heaviest(column_votes, vertical, first)
    return HeadLines(columns, _heaviest(offset_votes, slash, local), query.shape[1])


def _heaviest(weights: Float[Tensor, "head line"], count: int, always: int) -> Bool[Tensor, "head line"]:
    """The heaviest lines of each head, among them the first."""
    weights[:, : min(always, count)] = torch.inf
    top = weights.topk(min(count, weights.shape[1]), dim=1).indices
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(1, top, True)


def sample_queries(queries: int, sample: int, seed: int = 0) -> Int[Tensor, " row"]:
    """Indices of the sampled queries, ascending."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(queries, generator=generator)[:sample].sort().values


def choice_cost(queries: int, keys: int, sample: int, checked: int = 0) -> float:
    """Time to choose lines as a share of the time of dense attention; above 1, no choice can pay.

    On a CPU and at 2,048 to 32,768 keys, choosing takes as long as 4 rows of dense attention for every query that is
    sampled or checked if the lines of a head are hard to find, 2.4 if they are found at once, and 1.3 if a head is soon
    seen to be flat (`experiments.bench_loopserve`).
    """
    causal_cells = queries * keys - queries * (queries - 1) / 2
    read = min(sample, queries) + min(checked, queries)
    return _SEARCH * read * keys / causal_cells


def draw_of(seed: int, layer: int, queries: int, keys: int) -> int:
    """Seed of the sample of one prompt in one layer: draws differ by seed, by layer, and by turn of a conversation."""
    return random.Random(f"{seed} {layer} {queries} {keys}").getrandbits(62)


def held_out(queries: int, sample: int, seed: int = 0, count: int = 16) -> Int[Tensor, " row"]:
    """Indices of some queries outside a sample; if the sample has all queries, indices from the sample."""
    sampled = sample_queries(queries, sample, seed)
    outside = torch.ones(queries, dtype=torch.bool).index_fill_(0, sampled, False).nonzero().flatten()
    if not len(outside):
        return sampled
    return outside[sample_queries(len(outside), count, seed)]


@torch.no_grad()
def select_lines(
    query: Float[Tensor, "head query d_head"],
    key: Float[Tensor, "kv_head key d_head"],
    alpha: float = 0.955,
    *,
    sample: int = 48,
    variant: Variant = "exact",
    scaling: float | None = None,
    seed: int = 0,
    dense_above: float = math.inf,
    begin: int = 1,
    local: int = 1,
    sharp: float | None = None,
    checked: int = 0,
) -> HeadLines:
    """Run algorithm 5 for all heads of a layer: choose few vertical and slash lines that hold alpha of the attention.

    Args:
        query: Queries of the new tokens, after rotary; they are at the last positions.
        key: Keys of all positions, after rotary; query heads share them in groups.
        alpha: Minimum share of the sampled attention weight that the lines hold.
        sample: Number of queries in the sample.
        variant: "exact" or "faithful"; see the module's docstring.
        scaling: Factor on the scores. None means 1 / sqrt(d_head).
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
    heads, queries, width = query.shape
    keys = key.shape[1]
    number = torch.arange(keys, device=query.device).repeat(heads, 1)
    start = HeadLines(number < begin, number < local, queries)
    if alpha == 1:
        start.vertical[:] = True
        return start
    if scaling is None:
        scaling = float(width**-0.5)
    rows = sample_queries(queries, sample, seed).to(query.device)
    at = rows + (keys - queries)
    probs = attention_of(query[:, rows], key, at, scaling)
    if variant == "faithful":
        return _faithful(probs, at, alpha, start)
    flat = _SCATTERED * _least_share(probs, at, alpha) > dense_above
    # Nothing is chosen in flat heads: they get all lines.
    start.vertical[flat] = start.slash[flat] = True
    some = (~flat).nonzero().flatten()
    if not len(some):
        return start
    if checked:
        group = heads // len(key)
        for head in some.tolist():
            start.vertical[head, _sought(query[head], key[head // group], begin, checked, scaling)] = True
    own = HeadLines(start.vertical[some], start.slash[some], queries)
    start.vertical[some], start.slash[some] = _exact(probs[some], at, alpha, own, dense_above, sharp or math.inf)
    return start


def _sought(
    query: Float[Tensor, "query d_head"], key: Float[Tensor, "key d_head"], begin: int, checked: int, scaling: float
) -> Int[Tensor, " some"]:
    """Keys sought by single queries of a head; several may seek the same.

    Queries that seek nothing attend to the first tokens (attention sinks), so the queries that score these lowest are
    checked.
    """
    key = key.float()
    first_scores = (key[:begin] * scaling) @ query.float().T
    rows = first_scores.logsumexp(0).topk(min(checked, len(query)), largest=False).indices
    weight, position = attention_of(query[None, rows], key[None], rows + (len(key) - len(query)), scaling)[0].max(1)
    return position[weight >= _SOUGHT]


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

    def drop_finished(self) -> None:
        """Go on with the heads that are not done."""
        going = ~self.done
        for name, tensor in vars(self).items():
            setattr(self, name, tensor[going])

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

    def _remove(self, columns: Int[Tensor, "head row taken"], crossed: Int[Tensor, "head row taken"]) -> None:
        """Remove one cell in each row for every line taken, also from the weight of the line that crosses it there."""
        rows = self.left.shape[1]
        cells = self.left.gather(2, columns)
        self.left.scatter_(2, columns, 0.0)
        add_at(_flat(self.weights), crossed.flatten(1), -cells.flatten(1), 2.0 * rows)
        self.missing -= cells.sum((1, 2), dtype=torch.float64)


def _flat(lines: Tensor) -> Tensor:
    return lines.view(len(lines), -1)  # "head kind line -> head (kind line)", without a copy


def _exact(
    left: Tensor, at: Tensor, alpha: float, lines: HeadLines, dense_above: float, sharp: float
) -> tuple[Tensor, Tensor]:
    """Choose greedily by the weight that a line adds to the sample per cell that it adds to the matrix.

    `left` is the attention that is not yet on any chosen line; the two kinds of lines are returned.
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
    chosen = torch.stack([lines.vertical, lines.slash], 1).float()
    missing = weights[:, 0].sum(1, dtype=torch.float64) - (1 - alpha) * rows
    weights.masked_fill_(chosen.bool(), -torch.inf)
    result = chosen.clone()
    every_head = torch.arange(heads, device=left.device)
    one = torch.ones_like(every_head)
    search = _Search(every_head, left, weights, chosen, missing, one, torch.zeros_like(one, dtype=torch.bool))
    for _ in range(2 * keys):  # every round takes at least one line of every head that is not done, or ends it
        if 2 * int(search.done.sum()) >= len(search.done):
            result[search.head] = search.chosen
            search.drop_finished()
        if not len(search.head):
            break
        crossings = crossed(search.chosen.flip(1), lines.past)
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
        # The first lines are taken one by one, later ones in batches, because rounds cost time, not lines: a fifth of
        # the chosen lines, or a twentieth of those that are missing at least; on a GPU, where rounds are dear, as many
        # lines as are chosen.
        lines_per_taken = 5
        if left.device.type != "cpu":
            lines_per_taken = 1
        share_of_chosen = search.chosen.sum((1, 2)).long() // lines_per_taken
        lines_missing = (search.missing / gain.amax(1).clamp(min=1e-30)).clamp(0, 2 * keys).long()
        batch = torch.maximum(share_of_chosen, lines_missing // 20).clamp(min=1)
        search.batch = batch.masked_fill(search.done, 1)
    else:
        raise RuntimeError("the choice of lines did not end although every line was taken")
    vertical, slash = result.bool().unbind(1)
    return vertical, slash


def _least_share(probs: Tensor, at: Tensor, alpha: float) -> Tensor:
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


def _faithful(probs: Tensor, at: Tensor, alpha: float, lines: HeadLines) -> HeadLines:
    """Algorithm 5 as printed, head by head."""
    kinds = (lines.vertical, lines.slash)
    totals = (probs * lines.rows(at)).sum((1, 2), dtype=torch.float64).tolist()
    targets = (alpha * probs.sum((1, 2), dtype=torch.float64)).tolist()
    offset = (at[:, None] - torch.arange(probs.shape[2], device=at.device)).clamp(min=0)  # the future has no weight
    slash_largest = torch.zeros_like(probs[:, 0])
    slash_largest.scatter_reduce_(1, offset.flatten().expand(len(probs), -1), probs.flatten(1), "amax")
    # The lines of each kind by descending weight, those that are always chosen first; and the sum of the largest cells
    # of the lines before each.
    weight = torch.stack([probs.sum(1), slash_sums(probs, at)], 1)
    order = weight.masked_fill(torch.stack(kinds, 1), torch.inf).argsort(dim=2, descending=True, stable=True)
    largest = torch.stack([probs.amax(1), slash_largest], 1).double().gather(2, order)
    weight = weight.gather(2, order)
    overlap = pad(largest.cumsum(2), (1, 0))
    length = lines.lengths()[order]
    for head, (total, target) in enumerate(zip(totals, targets, strict=True)):
        weights, overlaps, lengths = weight[head].tolist(), overlap[head].tolist(), length[head].tolist()
        taken = [int(kind[head].sum()) for kind in kinds]
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
            for kind, chosen in enumerate(kinds):
                chosen[head, order[head, kind, : taken[kind]]] = True
        else:  # the lists ended, or the attention is not a number
            lines.vertical[head] = True
    return lines
