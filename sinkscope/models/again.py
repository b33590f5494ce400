"""A layer called again, with another output of its MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkscope.models.target import Target, first_tensor, on_hidden


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A call of a layer, for layers to whose residual stream the output of the MLP is not simply added.

    Attributes:
        target: The model.
        layer: Number of the layer.
        args: What the layer was called with.
        kwargs: The same, by name.
    """

    target: Target
    layer: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @torch.no_grad()
    def output(self, change: Callable[[Tensor], Tensor]) -> Float[Tensor, "row pos d_model"]:
        """The residual stream after the layer, if what the MLP gives is changed."""
        writer = self.target.mlp_writers(self.layer)[0]
        args, kwargs = _with_copied_input(self.args, self.kwargs)
        with self.target.loaded(self.layer), self.target.hooks((writer, "post", on_hidden(change))):
            return first_tensor(self.target.layers[self.layer].forward(*args, **kwargs))

    def added(self, resid: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos d_model"]:
        """How much of the residual stream after the layer is not there if the MLP gives zero."""
        return resid - self.output(torch.zeros_like)


def keep_call(target: Target, layer: int, calls: list[LayerCall]) -> tuple[nn.Module, str, Any]:
    """A hook that keeps the call of a layer."""

    def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(LayerCall(target, layer, *_with_copied_input(args, kwargs)))

    return target.layers[layer], "pre", keep


def _with_copied_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with its hidden states copied, because some layers add to them in place."""
    if args:
        return (args[0].clone(), *args[1:]), dict(kwargs)
    return args, {**kwargs, "hidden_states": kwargs["hidden_states"].clone()}
