"""PyramidKV (Cai et al. 2024, section 4.2): lower layers keep more tokens than higher ones, at the same total."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sinkscope.files.records import Natural
from sinkscope.kv.policy import LayerBudget, LayerMoment
from sinkscope.kv.registry import register_policy
from sinkscope.kv.snapkv import SnapKV


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
        rows, prompt = at.rows, torch.tensor(at.step.state.prompt)
        protected = torch.tensor(rows.first) + torch.tensor(rows.latest)
        mean = (torch.tensor(rows.total) - protected).double()
        lowest = (2 * mean - mean / self.beta).minimum(mean.maximum(prompt - protected))
        return (protected + (lowest + 2 * height * (mean - lowest) + 1e-6).long())[:, None]
