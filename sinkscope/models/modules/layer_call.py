"""A layer called again, without what its MLP gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.models.hooks import Args, Hook, Kwargs, first_tensor, hidden_of, on_hidden, with_hidden
from sinkscope.models.target import Target


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A recorded call of a layer, repeated with the MLP silenced where the layer does not simply add its output.

    Attributes:
        target: The model.
        layer: Number of the layer.
        args: What the layer was called with.
        kwargs: The same, by name.
    """

    target: Target
    layer: int
    args: Args
    kwargs: Kwargs

    @torch.no_grad()
    def added(self, resid: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos d_model"]:
        """Return how much of the residual stream after the layer is not there if the MLP gives zero."""
        silenced = self.target.mlp_writers(self.layer)[0], "post", on_hidden(torch.zeros_like)
        with self.target.loaded(self.layer), self.target.hooks(silenced):
            return resid - first_tensor(self.target.layers[self.layer].forward(*self.args, **self.kwargs))


def keep_call(target: Target, layer: int, calls: list[LayerCall]) -> Hook:
    """Return a hook that keeps the call of a layer."""

    def keep(_module: Any, args: Args, kwargs: Kwargs) -> None:
        hidden = hidden_of(args, kwargs).clone()  # some layers add to it in place
        calls.append(LayerCall(target, layer, *with_hidden(args, kwargs, hidden)))

    return target.layers[layer], "pre", keep
