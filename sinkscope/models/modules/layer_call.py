"""A layer called again, without what its MLP gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.models.hooks import Args, Hook, Kwargs, first_tensor, hidden_of, on_hidden, with_hidden
from sinkscope.models.target import Target

Added = Callable[[Float[Tensor, "row pos d_model"]], Float[Tensor, "row pos d_model"]]
"""Gives how much of the residual stream after a layer is not there if the MLP gives zero."""


def keep_call(target: Target, layer: int, calls: list[Added]) -> Hook:
    """Return a hook that keeps the call of a layer, which does not simply add what its MLP gives."""

    def keep(_module: Any, args: Args, kwargs: Kwargs) -> None:
        hidden = hidden_of(args, kwargs).clone()  # some layers add to it in place
        args, kwargs = with_hidden(args, kwargs, hidden)

        @torch.no_grad()
        def added(resid: Tensor) -> Tensor:
            silenced = target.mlp_writers(layer)[0], "post", on_hidden(torch.zeros_like)
            with target.loaded(layer), target.hooks(silenced):
                return resid - first_tensor(target.layers[layer].forward(*args, **kwargs))

        calls.append(added)

    return target.layers[layer], "pre", keep
