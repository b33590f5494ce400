"""PyramidKV (Cai et al. 2024, section 4.2): lower layers keep more tokens than higher ones, at the same total."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float, Real
from pydantic import InstanceOf
from torch import Tensor

from sinkscope.files.records import Natural, checked_value
from sinkscope.kv.policy import LayerBudget, LayerMoment, Policy
from sinkscope.kv.registry import register_policy
from sinkscope.kv.session import Session
from sinkscope.kv.snapkv import SnapKV


@register_policy("pyramid")
@dataclass(frozen=True, kw_only=True)
class Pyramid(Policy):
    """Spread the budget over the layers along a straight line; in each layer another policy scores and chooses.

    What is always kept has its place in every layer. Of the rest, the highest layer keeps 1 / `beta`, and the lowest
    one as much above the mean as the highest is below it, but no more than a prompt holds. `budget` is the mean over
    the layers, rounded down in each.

    Attributes:
        beta: Steepness of the line; 20 in the authors' code. With 1, every layer has the same budget.
        scorer: The policy that protects, scores and chooses; SnapKV in the paper. Its own budget and `every` are not
            used.

    Example:
        >>> from sinkscope.kv import H2O
        >>> Pyramid(budget=512, scorer=H2O(), every=1).beta
        20
    """

    beta: Natural = 20
    scorer: Policy = field(default_factory=SnapKV)
    every: Natural | Literal["prefill"] = "prefill"

    def __post_init__(self) -> None:
        checked_value(InstanceOf[Policy], self.scorer, "Pyramid: scorer=")
        super().__post_init__()

    def watch(self, session: Session, key: int) -> None:
        """Ask for what the scorer needs."""
        self.scorer.watch(session, key)

    def always_kept(self, budget: int) -> tuple[int, int]:
        """What the scorer always keeps, or what is given here if that is more."""
        first, latest = self.scorer.always_kept(budget)
        return max(self.first, first), max(self.last, latest)

    def budgets(self, at: LayerMoment) -> LayerBudget:
        """The layer's point on the line, for each row."""
        assert at.moment.state.prompt is not None
        numbers = [kv.number for kv in at.moment.layers]
        height = numbers.index(at.layer) / max(1, len(numbers) - 1)
        budgets: list[int] = []
        prompts: list[int] = at.moment.state.prompt.tolist()
        for total, first, latest, prompt in zip(at.rows.total, at.rows.first, at.rows.latest, prompts, strict=True):
            kept = first + latest
            mean, most = total - kept, prompt - kept
            if mean >= most or len(numbers) == 1:
                budgets.append(total)
                continue
            lowest = min(2 * mean - mean / self.beta, most)
            highest = 2 * mean - lowest
            budgets.append(max(1, kept + int(lowest + height * (highest - lowest) + 1e-6)))
        return torch.tensor(budgets)[:, None]

    def scores(self, at: LayerMoment) -> Real[Tensor, "batch kv_head slot"]:
        """Score as the scorer does."""
        return self.scorer.scores(at)

    def select(
        self, scores: Float[Tensor, "batch kv_head slot"], at: LayerMoment, budget: LayerBudget
    ) -> Bool[Tensor, "batch kv_head slot"]:
        """Choose as the scorer does."""
        return self.scorer.select(scores, at, budget)
