"""One numbering of layers: the place in the model's list; a model whose modules say otherwise is refused."""

from __future__ import annotations

from typing import Any

from sinkscope.errors import UnsupportedError
from sinkscope.models.target import Target
from sinkscope.models.windows import layers_with_states


def misnumbered(target: Target) -> list[int]:
    """Return the layers whose attention has the number of another place."""
    return [place for place in target.attending if getattr(target.sub(place, "attn"), "layer_idx", place) != place]


def check_numbering(target: Target) -> None:
    """Refuse a model whose layers are numbered in two ways, where attention or caches are told apart by layer.

    Raises:
        UnsupportedError: The attention of a layer has the number of another place.
    """
    for place in misnumbered(target):
        number: Any = target.sub(place, "attn").layer_idx
        raise UnsupportedError(
            f"the layer at place {place} of {target.name} calls itself layer {number} (layer_idx of its attention), so "
            "that attention and caches would be those of another layer: set layer_idx to the place of each layer"
        )


def check_caches_filled(target: Target) -> None:
    """Refuse a model of which a layer fills no cache although the configuration gives it one, or sees what it drops.

    Raises:
        UnsupportedError: A layer without softmax attention keeps no state either, or a layer attends beyond its window.
    """
    states, unproved = layers_with_states(target), dict(target.adapter.unproved)
    for place in range(target.n_layers):
        reason = unproved.get(f"blocks.{place}.cache")
        if reason is not None:
            raise UnsupportedError(
                f"layer {place} of {target.name} {reason}: use another model for cache policies, guards and observers"
            )
        if place not in target.attending and place not in states:
            raise UnsupportedError(
                f"layer {place} of {target.name} has no attention, and its configuration counts it among those with a "
                "cache of keys: take the layer out of the list (with num_hidden_layers and layer_idx), or use no cache "
                "policy or guard"
            )
