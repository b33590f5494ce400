"""What sinkscope serves of a model, and what not and why."""

from __future__ import annotations

from dataclasses import dataclass, fields

from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
)

from sinkscope.models.adapters import Adapter
from sinkscope.models.target import Target

_WITH_KEYS = (
    DynamicLayer,
    DynamicIndexedLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
)


@dataclass(frozen=True)
class Scope:
    """What is served of a model, by layers.

    Attributes:
        n_layers: Number of decoder layers.
        neurons: Layers with an MLP, whose neurons can be found, ablated and patched.
        attention: Layers whose attention rows are shown.
        policies: Layers on whose cache policies and guards act.
        why_no_policies: Why there are none, if there are none.
    """

    n_layers: int
    neurons: tuple[int, ...]
    attention: tuple[int, ...]
    policies: tuple[int, ...]
    why_no_policies: str = ""

    def line(self) -> str:
        """One sentence."""
        parts = [
            f"sink neurons and patches in {self._of_all(self.neurons)}",
            f"attention in {self._of_all(self.attention)}",
        ]
        if self.policies:
            parts.append(f"cache policies and guards in {self._of_all(self.policies)}")
        else:
            parts.append(f"no cache policies or guards, because {self.why_no_policies}")
        return "; ".join(parts)

    def _of_all(self, layers: tuple[int, ...]) -> str:
        if len(layers) == self.n_layers:
            return "all layers"
        return f"{len(layers)} of {self.n_layers} layers"


def cache_layers(target: Target) -> list[int]:
    """Layers whose part of the cache holds keys and values; others keep a state alone."""
    layers = DynamicCache(config=target.config).layers
    return [number for number, layer in enumerate(layers) if type(layer) in _WITH_KEYS]


def scope_of(target: Target) -> Scope:
    """What is served of a model."""
    layers = range(target.n_layers)
    policies = cache_layers(target)
    return Scope(
        target.n_layers,
        tuple(layer for layer in layers if target.has_neurons(layer)),
        tuple(layer for layer in layers if target.has_attention(layer)),
        tuple(layer for layer in policies if target.has_attention(layer)),
        "no layer of its cache holds keys and values",
    )


def shown_row(adapter: Adapter) -> str:
    """The row of an adapter as one would write it, without what it shares with Llama."""
    settings = [repr(adapter.model_type)]
    for field in fields(adapter):
        value = getattr(adapter, field.name)
        if field.name != "model_type" and value != field.default:
            settings.append(f"{field.name}={value!r}")
    return f"Adapter({', '.join(settings)})"
