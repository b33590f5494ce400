"""Short passes that tell how a model behaves."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.models.hooks import LayerInput, first_tensor, on_output
from sinkscope.models.target import Target

_TOKENS = 3
_SAME = 1e-3  # largest relative distance between the ends of two passes


def token_ids(target: Target, length: int) -> Int[Tensor, "1 pos"]:
    """Return some tokens, always the same ones."""
    vocabulary = int(next(target.embedding.parameters()).shape[0])
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(16, vocabulary // 2), vocabulary, (1, length), generator=generator).to(target.device)


def relative_error(change: Tensor, expected: Tensor, numbers: Tensor | None = None) -> float:
    """Return the largest distance from the expected change, relative to its size or, if larger, that of `numbers`."""
    size = expected.abs().max()
    if not size > 0:
        return float("inf")
    if numbers is not None:
        size = torch.maximum(size, numbers.abs().max())
    return float(((change - expected).abs().max() / size).nan_to_num(torch.inf))


def begins_at(target: Target, layer: int, last: int) -> bool:
    """Return whether a pass may begin at a layer: with what entered it in a whole pass, it gives the same."""
    ids = token_ids(target, _TOKENS)
    starts = list[LayerInput]()
    ends = list[Tensor]()

    def take(output: Any) -> None:
        starts.append(LayerInput(layer, first_tensor(output).clone(), isinstance(output, tuple)))

    ending = target.layers[last], "post", on_output(lambda output: ends.append(first_tensor(output).clone()))
    with target.hooks((target.layers[layer - 1], "post", on_output(take)), ending):
        target.forward(ids, last_layer=last)
    try:
        with target.hooks(ending):
            target.forward(ids, last_layer=last, start=starts[0])
    except (LookupError, TypeError, ValueError):  # layers pass on more than the residual stream, or do not run
        return False
    return relative_error(ends[1], ends[0]) < _SAME
