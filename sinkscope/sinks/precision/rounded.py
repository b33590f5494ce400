"""Texts read by a rounded model, compared with the exact one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from einops import repeat
from jaxtyping import Float
from torch import Tensor

from sinkscope.hooks.edit.quantize import Quantize
from sinkscope.measure.margin import margin_of
from sinkscope.models.target import Target
from sinkscope.sinks.precision.exact import Exact
from sinkscope.sinks.tokens import TokenRows

EXACT_BITS = 16
"""Bits of a number that stays exact."""


@dataclass(frozen=True, eq=False)
class Rounded:
    """What a rounded model makes of some texts.

    Attributes:
        kl: Mean divergence of its next tokens from those of the exact model, in nats.
        loss: Mean loss of the next token in nats.
        numbers: How many numbers were rounded.
    """

    kl: Float[Tensor, " text"]
    loss: Float[Tensor, " text"]
    numbers: int = 0

    @property
    def divergence(self) -> float:
        """`kl` over all texts."""
        return float(self.kl.mean())

    @property
    def perplexity(self) -> float:
        """Of all texts."""
        return float(self.loss.mean().exp())

    def bits(self, scheme: Mapping[str, Any], nothing: Rounded) -> float:
        """Bits of a number on average, of all those that are rounded if nothing stays exact."""
        bits = scheme.get("activations", scheme.get("kv"))
        return EXACT_BITS - (EXACT_BITS - bits) * self.numbers / nothing.numbers

    def regained(self, nothing: Rounded) -> float:
        """Share of the divergence with nothing exact that is regained; none where rounding costs nothing."""
        return 1 - self.divergence / nothing.divergence if nothing.divergence > 0 else 0.0

    def margin(self, nothing: Rounded) -> float | None:
        """Two standard errors of this share over texts, as of a ratio; None for too few texts."""
        left = self.kl - (1 - self.regained(nothing)) * nothing.kl
        return margin_of((left / nothing.kl.mean()).nan_to_num().numpy())


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
        ids = ids.to(target.device)
        return cls(target, ids, _logs(target, ids, 0))

    @property
    def exact(self) -> Rounded:
        """What the exact model makes of them."""
        return self._compared(self.logs, 0)

    def rounded(self, scheme: Mapping[str, Any], exact: Exact) -> Rounded:
        """Read them rounded, after the prefix if there is one.

        Args:
            scheme: Fields of `Quantize` that say what is rounded.
            exact: What stays exact.
        """
        prefix = torch.tensor(exact.prefix, device=self.ids.device, dtype=self.ids.dtype)
        ids = torch.cat([repeat(prefix, "pos -> text pos", text=len(self.ids)), self.ids], 1)
        with Quantize(**scheme, **exact.fields).on(self.target) as run:
            logs = _logs(self.target, ids, len(prefix))
        return self._compared(logs, sum(event.data["numbers"] for event in run.events))

    def _compared(self, logs: Float[Tensor, "text pos vocab"], numbers: int) -> Rounded:
        """The first token's prediction is left out, because texts begin alike."""
        kl = (self.logs.exp() * (self.logs - logs)).sum(-1)[:, 1:]
        loss = -logs[:, 1:-1].gather(-1, self.ids[:, 2:, None])
        return Rounded(kl.mean(1).cpu(), loss.mean((1, 2)).cpu(), numbers)


@torch.no_grad()
def _logs(target: Target, ids: TokenRows, skipped: int) -> Float[Tensor, "text pos vocab"]:
    """Logarithms of the probabilities of what follows each token but the first ones."""
    return target.hf(input_ids=ids, use_cache=False).logits[:, skipped:].float().log_softmax(-1)
