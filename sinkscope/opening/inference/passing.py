"""What passes a module in a pass over a batch, as a hook keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from sinkscope.models.hooks import first_tensor

_ONE = 5e-3  # largest distance of a measured constant from 1 that rounding explains


@dataclass(eq=False)
class Passing:
    """What passed a module, by row of the batch and position, in float32.

    Attributes:
        batch: Number of rows.
        ran: Whether the module ran.
        rows: What passed it; no numbers before it ran.
    """

    batch: int
    ran: bool = False
    rows: Float[Tensor, "row pos width"] = field(default_factory=lambda: torch.empty(0, 0, 0))

    def by_row(self, tensor: Tensor) -> Float[Tensor, "row pos width"]:
        """A tensor by row and position, which OPT and experts run together."""
        if tensor.ndim == 2:
            return rearrange(tensor, "(row pos) width -> row pos width", row=self.batch)
        return rearrange(tensor, "row pos ... -> row pos (...)")

    def keep(self, output: Any) -> None:
        """Keep a copy of what passes; some models add to it in place."""
        self.rows = self.by_row(first_tensor(output).detach()).float().clone()
        self.ran = True

    def change(self, row: int) -> Float[Tensor, "pos width"]:
        """What an edit of a row changed, beside the first row."""
        return self.rows[row] - self.rows[0]


def rounded(constant: float) -> float:
    """A constant as an adapter states it."""
    if abs(constant) < _ONE:
        return 0.0
    if abs(constant - 1) < _ONE:
        return 1.0
    return float(f"{constant:.4g}")
