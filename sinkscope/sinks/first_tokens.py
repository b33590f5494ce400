"""Tokens that stand first, each alone: how far they go along a spike's direction, also with heads replaced.

Such a token sees nothing but itself. A replaced head gives its mean output at ordinary positions of typical text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.results.parts import Head
from sinkscope.sinks.spikes.edited import Batch, Edit, Written, read
from sinkscope.sinks.spikes.find import sinks_of
from sinkscope.sinks.spikes.spike import Parts, Spike
from sinkscope.sinks.spikes.spike_circuit import SpikeCircuit


def heads_up_to(target: Target, last_layer: int) -> tuple[Head, ...]:
    """Return all heads of the layers with softmax attention up to a layer."""
    layers = [layer for layer in target.attending if layer <= last_layer]
    return tuple(Head(layer, head) for layer in layers for head in range(target.n_heads))


def along_first(
    spike: Spike, tokens: Int[Tensor, " token"], edits: Sequence[Parts], means: Written
) -> Float[Tensor, "state token"]:
    """Project each token, which stands alone, on a spike's direction, as a share of the spike: intact, then edited.

    Args:
        spike: The spike of the first token.
        tokens: The tokens.
        edits: The heads that each edit replaces.
        means: What replaced heads write instead.
    """
    every = [Edit(), *map(Edit, edits)]
    edit_of = torch.arange(len(every)).repeat_interleave(len(tokens))
    ids = tokens.repeat(len(every))[:, None]
    batch = Batch((spike,), ids, (torch.ones_like(ids, dtype=torch.bool),), tuple(every), edit_of, means)
    return read(batch).along[:, 0].reshape(len(every), -1)


def spike_of(setup: Setup, number: int | None = None) -> SpikeCircuit | None:
    """Return a spike of the first token that needs neurons; by default the spike that most heads read.

    None: no spike of the first token needs neurons.

    Args:
        setup: The model and its text.
        number: Number of the spike in `find_sinks`.

    Raises:
        SinkscopeError: The spike of this number is at another place, or needs no neurons, or there is none.
    """
    fit: dict[int, SpikeCircuit] = {}
    for own, circuit in enumerate(sinks_of(setup).spikes):
        if circuit.place.is_first and circuit.needed_neurons:
            fit[own] = circuit
    if number is None:
        return next(iter(fit.values()), None)
    if number not in fit:
        have = f"give one of {', '.join(map(str, fit))}" if fit else "this model has none"
        raise SinkscopeError(f"--spike {number} is no spike at the first token that needs neurons: {have}")
    return fit[number]
