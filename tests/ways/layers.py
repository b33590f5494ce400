"""What was done to the layers of a model before it came here; one row each. Plain transformers gets the same model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from .edits import ROWS_SEEN, Draw
from .families import HIDDEN

DECODERS = ("llama", "qwen3", "mistral")
"""Families with one plain list of layers."""


class _Passes(nn.Module):
    """Gives its input on."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states


class _Silent(nn.Module):
    """Attention that writes nothing."""

    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        return torch.zeros_like(hidden_states), None


class _Longer(nn.Module):
    """Another weight than the one that is kept."""

    def forward(self, weight: Any) -> Any:
        return weight * 1.5


def _usual(_model: Any) -> None:
    """Nothing was done."""


def _moved(model: Any) -> None:
    layers = model.model.layers
    layers[1], layers[2] = layers[2], layers[1]


def _shared(model: Any) -> None:
    model.model.layers[2] = model.model.layers[1]


def _passing(model: Any) -> None:
    model.model.layers[2] = _Passes()


def _silent(model: Any) -> None:
    model.model.layers[2].self_attn = _Silent()


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


def _pruned(model: Any) -> None:
    for layer in model.model.layers:
        prune.l1_unstructured(layer.mlp.gate_proj, "weight", amount=0.5)


@dataclass(frozen=True)
class Layered:
    """What was done to the layers.

    Attributes:
        change: Does it.
        refused: What a refusal says; empty: it is served always.
        always: Draws that have to be refused.
        caches: The only ways in which plain transformers is right; empty: all.
    """

    change: Callable[[Any], None] = _usual
    refused: str = ""
    always: Callable[[Draw], bool] = lambda draw: False
    caches: Sequence[str] = ()

    def fits(self, draw: Draw) -> bool:
        if self.change is _usual:
            return True
        if self.caches and draw["cache"] not in self.caches:
            return False
        if draw["wrapper"] != "bare" or draw["other"] != "nothing" or draw["mode"] not in ("usual", "inference"):
            return False
        of_all = draw["cache"] != "pickled"
        return of_all and draw["family"] in DECODERS and draw["attention"] in ("sdpa", "eager")


LAYERED = {
    "usual": Layered(),
    "moved": Layered(_moved, "calls itself layer", lambda draw: draw["edit"] in ("h2o", ROWS_SEEN)),
    # A cache would mix the two places.
    "shared": Layered(_shared, "has one module in layers 1 and 2", lambda draw: True, caches=("none", "generate")),
    "passing": Layered(_passing, "has no attention, and its configuration counts it"),
    "silent": Layered(_silent, "has no attention, and its configuration counts it"),
    "replaced": Layered(_replaced),
    "parametrized": Layered(_parametrized),
    "pruned": Layered(_pruned),
}
