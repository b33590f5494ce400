"""Edits of one expert of a mixture.

The experts of a mixture are one fused call, so an edit corrects its output instead: the output is a weighted sum over
each token's experts, and if neuron j of expert e has value `a` and should have `b`, it changes by
`weight[e] * (b - a) * W_out[e][:, j]` for the tokens routed to e, exactly. `a` is recomputed from that neuron's own
weight rows for all tokens. For a token that is routed elsewhere it is the value the neuron would have, which is needed
for the neutral value of a patch.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.models.hooks import on_hidden
from sinkscope.models.modules.experts import Experts
from sinkscope.models.modules.linear import brought


class _LatestCall(threading.local):
    """The call in which the thread is, identified by its input, and the values that earlier hooks left in it."""

    hidden: Callable[[], Tensor | None] = staticmethod(lambda: None)
    edited: dict[tuple[str, int, int, int], Tensor]  # by factor ("up" or "post"), id of the module, expert and neuron


_latest = _LatestCall()


def expert_hook(
    experts: Experts, expert: int, neurons: list[int], site: str, edit: Callable[[Tensor], Tensor | None]
) -> Callable[..., Any]:
    """Forward hook (with kwargs) for the module that holds `experts`."""

    def corrected(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        routed = experts.routed(args, kwargs)
        entering = (*args, *kwargs.values())[0]
        if _latest.hidden() is not entering:
            _latest.hidden, _latest.edited = weakref.ref(entering), {}
        edited = _latest.edited

        def latest(factor: str, computed: Float[Tensor, "token neuron"]) -> Float[Tensor, "token neuron"]:
            """The neurons' values as computed, or as an earlier hook on this same call left them."""
            columns: list[Tensor] = []
            for neuron, column in zip(neurons, computed.unbind(-1), strict=True):
                columns.append(edited.get((factor, id(module), expert, neuron), column))
            return torch.stack(columns, -1)

        *gate, up = experts.factors(expert, routed.entering(expert), neurons)
        up = latest("up", up)
        post = latest("post", experts.activate(*gate, up))
        new = edit(up if site == "up" else post)
        if new is None:
            return None
        left = {"post": new.to(post.dtype)}
        if site == "up":
            left = {"up": new.to(up.dtype), "post": experts.activate(*gate, new.to(up.dtype))}
        for factor, values in left.items():
            for neuron, column in zip(neurons, values.unbind(-1), strict=True):
                edited[factor, id(module), expert, neuron] = column
        weight = routed.weight[:, expert, None]
        written = ((left["post"] - post) * weight).to(post.dtype) @ experts.columns(expert, neurons).to(post.dtype)
        change = on_hidden(lambda hidden: hidden + written.view_as(hidden))
        return change(module, args, kwargs, output)

    def hook(module: Any, *call: Any) -> Any:
        with brought(module):
            return corrected(module, *call)

    return hook
