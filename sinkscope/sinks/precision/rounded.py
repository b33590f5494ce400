"""Texts read by a rounded model, compared with the exact one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from sinkscope.hooks.edit.quantize import Quantize
from sinkscope.models.target import Target
from sinkscope.sinks.held_out import logits_of
from sinkscope.sinks.precision.exact import Exact
from sinkscope.sinks.tokens import TokenRows


@dataclass(frozen=True, eq=False)
class Rounded:
    """What a rounded model makes of some texts.

    Attributes:
        kl: Mean divergence of its next tokens from those of the exact model, in nats.
        numbers: How many numbers were rounded.
    """

    kl: Float[Tensor, " text"]
    numbers: int

    def left(self, nothing: Rounded) -> float:
        """Share of the divergence with nothing exact that is left; all of it where rounding costs nothing."""
        return float(self.kl.mean() / nothing.kl.mean()) if float(nothing.kl.mean()) > 0 else 1.0


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts, and what the exact model says of each next token.

    Attributes:
        target: The whole model.
        ids: The texts.
        logs: Logarithms of probabilities.
    """

    target: Target
    ids: TokenRows
    logs: Float[Tensor, "text pos vocab"]

    @classmethod
    def of(cls, target: Target, ids: TokenRows) -> Texts:
        """Read the texts without rounding."""
        return cls(target, ids, logits_of(target, ids).log_softmax(-1))

    def rounded(self, scheme: Mapping[str, Any], exact: Exact) -> Rounded:
        """Read them rounded.

        Args:
            scheme: Fields of `Quantize` that say what is rounded.
            exact: What stays exact.
        """
        with Quantize(**scheme, **exact).on(self.target) as run:
            logits = logits_of(self.target, self.ids)
        logs = logits.log_softmax(-1)
        kl = (self.logs.exp() * (self.logs - logs)).sum(-1)[:, 1:]
        return Rounded(kl.mean(1).cpu(), sum(event.data["numbers"] for event in run.events))
