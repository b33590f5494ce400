"""Where a sink is, for the measurements that begin there."""

from __future__ import annotations

from typing import Any

import torch

from sinkscope.measure.setup import PIECE, Setup, read_whole
from sinkscope.sinks.first_token.ablation import Neuron, prove
from sinkscope.sinks.first_token.walk import Progress, Walk, walk


def setup(model: object, *, part: bool = False, **options: Any) -> Setup:
    """Open `model` (see `Setup.open` for the arguments)."""
    return Setup.open(model, loading="enough" if part else "stream", **options)


def walk_far_enough(made: Setup, *, whole: bool, progress: Progress | None = None) -> tuple[Setup, Walk]:
    """`walk`, and where only the first layers of a file are in memory, again with more of them until they suffice."""
    while True:
        seen = walk(made.target, made.ids, whole=whole, progress=progress)
        enough = len(seen.first) == made.target.n_layers or (seen.flat() and not whole)
        if enough or not made.more():
            return made, seen


def causal_neurons(made: Setup, layer: int | None = None, top_k: int = 8) -> tuple[int | None, tuple[Neuron, ...]]:
    """Sink layer and its causal neurons, proven by ablation; (None, ()) for a model without a sink.

    Args:
        made: the model and its text.
        layer: the sink layer, where it is known; None: it is searched.
        top_k: candidates.
    """
    if layer is None:
        layer = walk(made.target, made.ids, whole=made.target.resident).sink_layer()
    if layer is None:
        return None, ()
    proof = prove(made.target, made.ids, layer, top_k, torch.Generator().manual_seed(made.seed), None)
    return layer, tuple(n for n in proof.neurons if n.causal)


__all__ = ["PIECE", "Progress", "Setup", "causal_neurons", "read_whole", "setup", "walk_far_enough"]
