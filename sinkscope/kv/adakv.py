"""AdaKV (Feng et al. 2024, section 3 and algorithm 1): SnapKV's scores, and one budget for the heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.engine.run import Run
from sinkscope.errors import UnsupportedError
from sinkscope.files.records import Share
from sinkscope.kv.policy import LayerBudget, LayerMoment, rank_from_top
from sinkscope.kv.registry import register_policy
from sinkscope.kv.snapkv import SnapKV


@register_policy("adakv")
@dataclass(frozen=True, kw_only=True)
class AdaKV(SnapKV):
    """Score like SnapKV; the heads of a layer share one budget, so a head with widely spread votes keeps more.

    The highest scores of all kv heads of a layer are pooled, up to the sum of the heads' budgets. Each head then keeps
    `1 - floor` times its number of slots in that pool plus `floor` times its even share, rounded down. Window and
    `first` are kept in every head and count towards the budget. `budget` is the mean over the heads of a layer. Heads
    are ragged, so `run.usage` reports fewer logical than physical bytes.

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
