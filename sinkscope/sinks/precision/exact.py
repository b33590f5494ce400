"""Texts read by a rounded model, and what may stay exact: the sink's places, neurons and layers, or random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.hooks.edit.quantize import Quantize
from sinkscope.measure import Setup
from sinkscope.models.draws import draws, some_of
from sinkscope.models.target import Target
from sinkscope.sinks.find.places import Place
from sinkscope.sinks.held_out import logits_of
from sinkscope.sinks.removal.components import Neurons
from sinkscope.sinks.removal.search import random_neurons
from sinkscope.sinks.tokens import TokenRows

DRAWS = 3
"""Random ones with which what stays exact is compared."""
PLACES, FIRST = "sink places", "first tokens"
NEURONS, LAYERS = "sink neurons", "sink layers"


Compared = tuple[str, Sequence[Any]]
"""What stays exact, as a field of `Quantize`: its name, and its values for what was chosen, then for random ones."""


def comparisons(
    setup: Setup, places: Sequence[Place], neurons: Neurons, made_in: Sequence[int], ids: TokenRows, experts: bool
) -> dict[str, Compared]:
    """What may stay exact in some texts, by its name.

    The first tokens are as many as a text has places of the sink, or one where no text has such a place.

    Args:
        setup: The model.
        places: The places of norm spikes or, without any, those that heads attend to.
        neurons: The neurons that make the spikes.
        made_in: The layers that build them.
        ids: The texts.
        experts: Whether only keys and values are rounded, so that no inputs of modules can stay exact.
    """
    target = setup.target
    there = torch.zeros_like(ids, dtype=torch.bool)
    for place in places:
        there |= place.means(ids)
    count = there.sum(1, keepdim=True).clamp(min=int(not there.any()))
    first = torch.arange(ids.shape[1]) < count
    generator = draws(setup.seed, "places beside those of the sink")
    others = torch.rand(DRAWS, *ids.shape, generator=generator).masked_fill(there | first, 2.0)
    random = (others.argsort(-1).argsort(-1) < count).unbind()
    compared: dict[str, Compared] = {}
    for name, kept in ((PLACES, there), (FIRST, first)):
        if kept.any():
            compared[name] = "places", [one.nonzero().tolist() for one in (kept, *random)]
    if neurons and not experts:
        sets = [neurons, *(random_neurons(target, neurons, neurons, setup.seed, number) for number in range(DRAWS))]
        compared[NEURONS] = "neurons", sets
    if made_in:
        compared[LAYERS] = "layers", beside_layers(setup, made_in)
    return compared


def beside_layers(setup: Setup, layers: Sequence[int]) -> list[Sequence[int]]:
    """Some layers, and as many others in several draws; only the layers if there are not enough others."""
    generator = draws(setup.seed, f"layers beside {list(layers)}")
    others = [layer for layer in range(setup.n_layers) if layer not in layers]
    beside: list[Sequence[int]] = [layers]
    if len(others) >= len(layers):
        for _ in range(DRAWS):
            beside.append(some_of(others, len(layers), generator))
    return beside


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

    def rounded(self, **scheme: Any) -> Rounded:
        """Read them rounded.

        Args:
            scheme: Fields of `Quantize` that say what is rounded, and what stays exact.
        """
        with Quantize(**scheme).on(self.target) as run:
            logits = logits_of(self.target, self.ids)
        logs = logits.log_softmax(-1)
        kl = (self.logs.exp() * (self.logs - logs)).sum(-1)[:, 1:]
        return Rounded(kl.mean(1).cpu(), sum(event.data["numbers"] for event in run.events))
