"""SnapKV (Li et al. 2024, section 4 and listing 1): what the end of the prompt attends to, and its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from sinkscope.engine.run import Run
from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Natural
from sinkscope.kv.keeper import CacheKeeper
from sinkscope.kv.policy import LayerMoment, Policy
from sinkscope.kv.registry import register_policy
from sinkscope.models.grouped_heads import in_groups, per_query_head

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
        CacheKeeper.of(run).window_queries(run, window, decoding=self.every != "prefill")

    def always_kept(self, budget: int) -> tuple[int, int]:
        """Return the first tokens, and the window or `last` if that is more."""
        return self.first, max(self.last, self.window_at(budget))

    def scores(self, at: LayerMoment) -> Float[Tensor, "batch kv_head slot"]:
        """Score by pooled votes; tokens of the window get none."""
        windows = torch.tensor([self.window_at(budget) for budget in at.rows.total])
        rows = at.window_rows(int(windows.max()))
        votes_here = torch.arange(rows.shape[2], 0, -1) <= windows[:, None]
        # As einsum, which would copy the rows: "batch query, batch head query slot -> batch head slot".
        votes = (votes_here.to(rows)[:, None, None] @ rows)[:, :, 0]
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
