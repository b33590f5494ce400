"""What was done to the layers of a model before it came here; one row each. Plain transformers gets the same model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from .edits import ROWS_SEEN, Draw
from .families import HIDDEN

DECODERS = ("llama", "qwen3", "mistral")
"""Families with one plain list of layers."""


class _Passes(nn.Module):
    """Gives its input on."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states


class _Longer(nn.Module):
    """Another weight than the one that is kept."""

    def forward(self, weight: Any) -> Any:
        return weight * 1.5


def _usual(_model: Any) -> None:
    """Nothing was done."""


def _moved(model: Any) -> None:
    layers = model.model.layers
    layers[1], layers[2] = layers[2], layers[1]


def _passing(model: Any) -> None:
    model.model.layers[2] = _Passes()


def _replaced(model: Any) -> None:
    """A low rank by a forward of one's own, in modules that no edit by hand changes."""
    for layer in model.model.layers:
        up = layer.mlp.up_proj
        rank = torch.randn(2, len(up.weight), HIDDEN, generator=torch.Generator().manual_seed(3)).to(up.weight)
        own = up.forward
        up.forward = lambda x, own=own, rank=rank: own(x) + x @ (rank[0] * 0.1).T


def _parametrized(model: Any) -> None:
    for layer in model.model.layers:
        parametrize.register_parametrization(layer.self_attn.v_proj, "weight", _Longer())


@dataclass(frozen=True)
class Layered:
    """What was done to the layers.

    Attributes:
        change: Does it.
        refused: What a refusal says; empty: it is served always.
        always: Draws that have to be refused.
    """

    change: Callable[[Any], None] = _usual
    refused: str = ""
    always: Callable[[Draw], bool] = lambda draw: False

    def fits(self, draw: Draw) -> bool:
        if self.change is _usual:
            return True
        if draw["wrapper"] != "bare" or draw["other"] != "nothing" or draw["mode"] not in ("usual", "inference"):
            return False
        of_all = draw["cache"] != "pickled"
        return of_all and draw["family"] in DECODERS and draw["attention"] in ("sdpa", "eager")


LAYERED = {
    "usual": Layered(),
    "moved": Layered(_moved, "calls itself layer", lambda draw: draw["edit"] in ("h2o", ROWS_SEEN)),
    "passing": Layered(_passing, "has no attention, and its configuration counts it"),
    "replaced": Layered(_replaced),
    "parametrized": Layered(_parametrized),
}
