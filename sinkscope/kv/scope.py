"""What sinkscope serves of a model, and what not and why."""

from __future__ import annotations

from transformers import DynamicCache

from sinkscope.models.target import Target

SERVED = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""Classes of layers of a stock cache that hold keys and values alone."""


def cache_layers(target: Target) -> list[int]:
    """Return layers whose part of the cache holds keys and values alone; others keep a state.

    There are none if an indexer chooses, or if attention is outside transformers' attention interface.
    """
    if not target.adapter.attention_interface:
        return []
    for layer in target.attending:
        if hasattr(target.sub(layer, "attn"), "indexer"):
            return []
    layers = DynamicCache(config=target.config).layers[: target.n_layers]  # of a cut model, the configuration has more
    return [number for number, layer in enumerate(layers) if type(layer).__name__ in SERVED]


def scope_line(target: Target) -> str:
    """Return what is served of a model, in one line."""
    layers = range(target.n_layers)
    policies = [layer for layer in cache_layers(target) if layer in target.attending]
    parts = {
        "sink neurons and patches": [layer for layer in layers if target.has_neurons(layer)],
        "attention": target.attending,
        "cache policies and guards": policies,
    }
    sentences = list[str]()
    for what, served in parts.items():
        where = f"{len(served)} of {len(layers)} layers"
        if len(served) == len(layers):
            where = "all layers"
        sentences.append(f"{what} in {where}")
    return "; ".join(sentences)
