"""What a layer's attention is made of, handed out while the model's own fast attention runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.lines.sums import Scores
from sinkscope.models.target import Target
from sinkscope.trace.attention import refuse_opaque
from sinkscope.trace.tap import Attention, listening

ScoresObserver = Callable[[int, Scores], None]
"""Called as `observer(layer, scores)` for a pass of a single sequence."""


@contextmanager
def scores_of(target: Target, observer: ScoresObserver, layers: list[int]) -> Iterator[None]:
    """For the length of a `with`, every forward pass of one sequence shows its scores' parts to `observer`.

    Args:
        target: the model; plain or nnsight.
        observer: called as `observer(layer, scores)`.
        layers: the layers to watch.

    Raises:
        UnsupportedError: a TransformerBridge, whose attention is its own, or an architecture outside transformers'
            attention interface (Falcon); attention that is neither causal nor a window; a cache from which tokens were
            evicted.
    """
    refuse_opaque(target)

    def see(call: Attention) -> None:
        if (layer := call.layer) not in layers:
            return
        if call.evicted:
            raise UnsupportedError(
                "lines need every key at its position, and a cache policy has evicted some: measure the prompt, before "
                "anything was generated"
            )
        given, scale = call.settings.get("scaling"), call.query.shape[-1] ** -0.5
        scale, window = float(scale if given is None else given), _window(call.mask, call.key.shape[2])
        capped = call.settings.get("softcap"), call.settings.get("s_aux")
        with torch.no_grad():
            observer(layer, Scores(call.query[0], call.key[0], scale, window, *capped))

    with listening(target, see):
        yield


def _window(mask: Tensor | None, keys: int) -> int | None:
    """What a mask leaves to see: None for all earlier keys, else how many of the last."""
    if mask is None:
        return None
    seen = mask[0, 0, :, :keys]
    if seen.dtype != torch.bool:
        seen = seen == 0
    window = int(seen[-1].sum())
    for row in {0, len(seen) // 2, len(seen) - 1}:
        last = keys - len(seen) + row
        expected = torch.zeros_like(seen[row])
        expected[max(0, last - window + 1) : last + 1] = True
        if not torch.equal(seen[row], expected):
            raise UnsupportedError(
                "lines are of causal attention, with or without a window; this mask is neither: give texts without "
                "padding"
            )
    return None if window == keys else window
