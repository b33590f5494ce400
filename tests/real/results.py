"""What the results of sinkscope hold, by names of our own: where a result changes its form, only this file changes."""

from __future__ import annotations

from typing import Any


def spike_layer(found: Any) -> int:
    """The layer whose MLP adds most to the first spike."""
    return found.sink_layer


def norms_at_first(found: Any) -> tuple[float, ...]:
    """Norm at the first token after each layer that was read."""
    return found.spike_norm


def contributions(found: Any) -> dict[tuple[int, int], float]:
    """Norm of what each candidate neuron adds at the spike."""
    return {(one.layer, one.neuron): one.contribution_norm for one in found.neurons}


def left_without(found: Any) -> dict[tuple[int, int], float]:
    """Share of the norm at the spike that is left where one neuron is zeroed."""
    return {(one.layer, one.neuron): 1 - one.ablation_drop for one in found.neurons}


def attends_to_first(found: Any) -> tuple[float, int]:
    """How many heads attend to the first token, and in how many layers heads were read."""
    (sink,) = [sink for sink in found.sinks if sink.place is not None and sink.place.is_first]
    return sink.readers, found.layers_read
