"""The policies of the literature that need no lines: what each scores, and what it always keeps.

Full keeps everything, as the control. StreamingLLM (Xiao et al. 2024, section 3.2) keeps first and latest tokens; H2O
(Zhang et al. 2023, section 4 and algorithm 1) what received the most attention, and latest tokens; TOVA (Oren et al.
2024, section 4) what the newest query attends to; SnapKV (Li et al. 2024, section 4 and listing 1) what the end of the
prompt attends to, and its neighbours; AdaKV (Feng et al. 2024, section 3 and algorithm 1) shares SnapKV's budget among
the heads of a layer, and PyramidKV (Cai et al. 2024, section 4.2) among the layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from sinkscope.engine.attention import AttentionRows
from sinkscope.engine.run import Run
from sinkscope.engine.tap import of_all_heads
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.records import Budget, Natural, Share, share_of
from sinkscope.kv.keeper import CacheKeeper
from sinkscope.kv.policy import LayerBudget, LayerMoment, Policy, rank_from_top, unseen_queries
from sinkscope.kv.registry import register_policy
from sinkscope.kv.watch import Observe, keep_queries
from sinkscope.models.arithmetic import product
from sinkscope.models.layers import in_groups, per_query_head


@register_policy("full")
@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keep everything; `run.usage` reports what this costs.

    Example:
        >>> Full().budget
        1.0
    """

    budget: Budget = field(default=1.0, kw_only=False)

    def enter(self, run: Run, key: int) -> None:
        """Count the tokens, and leave the cache as it is."""
        CacheKeeper.of(run, self.shown_name, self.first)

    def scores(self, at: LayerMoment) -> Int[Tensor, "batch kv_head slot"]:
        """Score later positions higher; nothing is chosen by it."""
        return at.kv.pos


@register_policy("streaming")
@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Policy):
    """Keep the first tokens, which serve as attention sinks, and the latest tokens.

    Tokens keep the positions at which they were read; the paper counts positions anew within the cache.

    Attributes:
        first: Number of attention sinks; four in the paper.

    Example:
        >>> StreamingLLM(budget=1024).first
        4
    """

    first: int = 4

    def scores(self, at: LayerMoment) -> Int[Tensor, "batch kv_head slot"]:
        """Score later positions higher."""
        return at.kv.pos


@register_policy("h2o")
@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Keep heavy hitters: the tokens that received the most attention, summed over all queries of prefill and decoding.

    A token's sum starts with its own query and ends when the token is evicted. It is the mean over the query heads of a
    kv head; the paper's models have one query head per kv head. Padding contributes no attention and has no score.

    Attributes:
        recent: Share of the budget for the latest tokens, which are kept whatever attention they received; half in the
            paper.

    Example:
        >>> H2O(budget=512).recent
        0.5
    """

    recent: Share = 0.5

    def watch(self, run: Run) -> None:
        """Watch every query of every layer."""
        run.act(Observe(self._add))

    def _add(self, rows: AttentionRows) -> None:
        kv, probs = rows.kv, rows.probs
        if kv is None:  # a call without a cache
            return
        if probs.shape[2] > 1 or not kv.gapless:  # else a single token, which is no padding
            # As einsum, which would copy the rows: "batch query, batch head query slot -> batch head 1 slot".
            real = (rows.query_pos >= 0).to(probs)
            probs = product(real[:, None, None], probs)
        received = in_groups(probs, kv.keys.shape[1]).mean(2)
        earlier = kv.numbers.get("h2o")
        if earlier is not None:  # in place; new slots have none
            received.narrow(-1, 0, earlier.shape[-1]).add_(earlier)
        kv.numbers["h2o"] = received

    def scores(self, at: LayerMoment) -> Float[Tensor, "batch kv_head slot"]:
        """Score by the sums; recent tokens rank above all others."""
        budget = self.layer_budget(at)
        if isinstance(budget, int):
            recent: int | Tensor = share_of(self.recent, budget)
        else:
            recent = (budget.cpu().double() * self.recent + 1e-6).long().to(at.length.device)  # as `share_of` rounds
        late = at.kv.pos >= (at.length[:, None] - recent)[..., None]
        return at.kv.extra("h2o").masked_fill(late, torch.finfo(torch.float32).max)


@register_policy("tova")
@dataclass(frozen=True, kw_only=True)
class TOVA(Policy):
    """Keep the tokens to which the newest query attends most. Neither first nor recent tokens are protected.

    Attention is the mean over the query heads of a layer, as in the paper, so every kv head of a layer keeps the same
    tokens. The newest token is scored like any other; `last=1` always keeps it. Padding must
    be on the left.

    Example:
        >>> TOVA(budget=512).last
        0
    """

    def watch(self, run: Run) -> None:
        """Watch the newest query of every layer."""
        run.act(Observe(of_all_heads(run.target, self._note), last=1))

    def _note(self, rows: AttentionRows) -> None:
        if rows.kv is not None:  # there is a cache
            newest = rows.probs[:, :, -1].mean(1, keepdim=True)
            rows.kv.numbers["tova"] = newest.expand(-1, rows.kv.keys.shape[1], -1)

    def scores(self, at: LayerMoment) -> Float[Tensor, "batch kv_head slot"]:
        """Score by the attention of the newest query.

        Raises:
            UnsupportedError: It was read outside of the `with`.
        """
        if "tova" not in at.kv.numbers:
            raise unseen_queries()
        return at.kv.extra("tova")


WINDOW = 64
"""Length of the observation window where none is given, and half of the budget is not less."""


@register_policy("snapkv")
@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """Compress the prompt once: the last queries vote for earlier tokens, and pooling spreads votes to neighbours.

    Votes are summed per query head and pooled; what counts is the mean over the query heads of a kv head, where the
    paper's code keeps one cache per query head. The window itself is always kept. Generated tokens are kept too, unless
    `every` is a number; the latest queries then vote, including those of generated tokens. Padding must be on the
    left.

    Attributes:
        window: Length of the observation window in tokens; 64 in the paper's text, 32 in its LongBench runs. None means
            64, or half of a row's budget if that is less: a window that is most of the budget keeps little else.
        kernel: Width of the pooling; 5 in the paper's text, 7 in its LongBench runs.
        pooling: "avg", with zeros beyond the ends, or "max", as in the paper's LongBench runs.

    Example:
        >>> SnapKV(budget=1024, window=32, kernel=7, pooling="max").window
        32
    """

    window: Natural | None = None
    kernel: Natural = 5
    pooling: Literal["avg", "max"] = "avg"
    every: Natural | Literal["prefill"] = "prefill"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise SinkscopeError(f"{type(self).__name__}: kernel={self.kernel}: expected an odd kernel")

    def window_at(self, budget: int) -> int:
        """Return the length of the window at a budget in tokens."""
        if self.window is not None:
            return self.window
        return min(WINDOW, max(1, (budget - self.first) // 2))

    def watch(self, run: Run) -> None:
        """Ask for the latest queries: as many as the longest window that a row can have."""
        window = self.window or WINDOW
        if isinstance(self.budget, int):
            window = self.window_at(self.budget)
        keep_queries(run, window, decoding=self.every != "prefill")

    def always_kept(self, budget: int) -> tuple[int, int]:
        """Return the first tokens, and the window or `last` if that is more."""
        return self.first, max(self.last, self.window_at(budget))

    def scores(self, at: LayerMoment) -> Float[Tensor, "batch kv_head slot"]:
        """Score by pooled votes; tokens of the window get none."""
        windows = torch.tensor([self.window_at(budget) for budget in at.rows.total])
        rows = at.window_rows(int(windows.max()))
        votes_here = torch.arange(rows.shape[2], 0, -1) <= windows[:, None]
        # As einsum, which would copy the rows: "batch query, batch head query slot -> batch head slot".
        votes = product(votes_here.to(rows)[:, None, None], rows)[:, :, 0]
        in_window = at.kv.pos >= (at.length - windows.to(at.length.device))[:, None, None]
        votes = votes.masked_fill(per_query_head(in_window, votes.shape[1]), 0)
        pool = avg_pool1d if self.pooling == "avg" else max_pool1d
        places = None
        if not at.kv.gapless:  # a token's neighbours are tokens, whatever padding stands between them
            places = _without_gaps(per_query_head(at.kv.pos, votes.shape[1])).expand_as(votes)
            votes = torch.zeros_like(votes).scatter_(2, places, votes)
        pooled = torch.as_tensor(pool(votes, self.kernel, stride=1, padding=self.kernel // 2))
        if places is not None:
            pooled = pooled.gather(2, places)
        return in_groups(pooled, at.kv.pos.shape[1]).mean(2)


def _without_gaps(pos: Int[Tensor, "batch head slot"]) -> Int[Tensor, "batch head slot"]:
    """The place of each slot if empty slots come first and occupied slots follow without gaps."""
    occupied = pos >= 0
    empty = (~occupied).sum(-1, keepdim=True)
    return torch.where(occupied, empty + occupied.cumsum(-1) - 1, (~occupied).cumsum(-1) - 1)


@register_policy("adakv")
@dataclass(frozen=True, kw_only=True)
class AdaKV(SnapKV):
    """Score like SnapKV; the heads of a layer share one budget, so a head with widely spread votes keeps more.

    The highest scores of all kv heads of a layer are pooled, up to the sum of the heads' budgets. Each head then keeps
    `1 - floor` times its number of slots in that pool plus `floor` times its even share, rounded down. Window and
    `first` are kept in every head and count towards the budget. `budget` is the mean over the heads of a layer.

    Attributes:
        floor: Part of the budget that is shared evenly. The default of 0.2 is what the authors advise for models whose
            query heads share kv heads (their first scripts have 0.5).

    Example:
        >>> AdaKV(budget=1024).floor
        0.2
    """

    floor: Share = 0.2

    def watch(self, run: Run) -> None:
        """Ask for the latest queries.

        Raises:
            UnsupportedError: The model is split over processes, which hold some of the heads each.
        """
        if run.target.processes > 1:
            raise UnsupportedError(
                "AdaKV compares all heads of a layer, which are split over processes here: use SnapKV, or load the "
                "model with device_map"
            )
        super().watch(run)

    def select(
        self,
        scores: Float[Tensor, "batch kv_head slot"],
        at: LayerMoment,
        budget: LayerBudget,
    ) -> Bool[Tensor, "batch kv_head slot"]:
        """Choose the window, the first tokens and, in every head, as many of the highest scores as its share allows."""
        pos = at.kv.pos
        occupied = pos >= 0
        protected = occupied & self.protected(at)
        free = occupied & ~protected
        ranked = scores.masked_fill(~free, -torch.inf)
        head_budget = (torch.as_tensor(budget, device=pos.device) - protected.sum(-1)).clamp(min=0)
        layer_budget = head_budget.sum(1)
        in_pool = rank_from_top(ranked.flatten(1)) < layer_budget[:, None]  # "batch (kv_head slot)"
        pooled = (in_pool.view_as(free) & free).sum(-1)
        # Slightly more than the exact number, as in `share_of`.
        mixed = (1 - self.floor) * pooled.cpu().double() + self.floor * head_budget.cpu().double() + 1e-6
        all_fit = free.sum((1, 2)) <= layer_budget
        share = torch.where(all_fit[:, None], pooled, mixed.floor().long().to(pooled.device))
        return protected | ((rank_from_top(ranked) < share[..., None]) & free)


@register_policy("pyramid")
@dataclass(frozen=True, kw_only=True)
class Pyramid(SnapKV):
    """Score and choose like SnapKV, with the budget spread over the layers along a straight line.

    What is always kept has its place in every layer. Of the rest, the highest layer keeps 1 / `beta`, and the lowest
    one as much above the mean as the highest is below it, but no more than a prompt holds. `budget` is the mean over
    the layers, rounded down in each.

    Attributes:
        beta: Steepness of the line; 20 in the authors' code. With 1, every layer has the same budget.

    Example:
        >>> Pyramid(budget=512).beta
        20
    """

    beta: Natural = 20

    def layer_budget(self, at: LayerMoment) -> LayerBudget:
        """Return the layer's point on the line, for each row."""
        numbers = [kv.number for kv in at.step.layers]
        height = 0.5
        if len(numbers) > 1:
            height = numbers.index(at.layer) / (len(numbers) - 1)
        rows = at.rows
        prompt = torch.tensor(at.step.state.prompt)
        protected = torch.tensor(rows.first) + torch.tensor(rows.latest)
        mean = (torch.tensor(rows.total) - protected).double()
        lowest = (2 * mean - mean / self.beta).minimum(mean.maximum(prompt - protected))
        return (protected + (lowest + 2 * height * (mean - lowest) + 1e-6).long())[:, None]
