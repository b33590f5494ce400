"""Names for measurements that open a model by themselves."""

from __future__ import annotations

from sinkscope.measure.setup import PIECE, Setup, read_whole
from sinkscope.progress import Progress
from sinkscope.sinks.first_token.walk import causal_neurons, walk_far_enough


def setup(model: object, *, part: bool = False, **options: object) -> Setup:
    """Open `model` (see `Setup.open` for the arguments)."""
    return Setup.open(model, loading="enough" if part else "stream", **options)  # pyright: ignore[reportArgumentType]


__all__ = ["PIECE", "Progress", "Setup", "causal_neurons", "read_whole", "setup", "walk_far_enough"]
