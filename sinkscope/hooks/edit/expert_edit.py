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
from torch import Tensor

from sinkscope.models.hooks import on_hidden
from sinkscope.models.modules.experts import Experts
from sinkscope.models.modules.linear import brought


class _LatestCall(threading.local):
    """The call in which the thread is, identified by its input, and the values that earlier hooks left in it."""

    hidden: Callable[[], Tensor | None] = staticmethod(lambda: None)
    edited: dict[tuple[int, int, int], Tensor]  # by id of the module, expert and neuron


_latest = _LatestCall()


def expert_hook(
    experts: Experts, expert: int, neurons: list[int], edit: Callable[[Tensor], Tensor | None]
) -> Callable[..., Any]:
    """Forward hook (with kwargs) for the module that holds `experts`."""

    def corrected(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        routed = experts.routed(args, kwargs)
        entering = (*args, *kwargs.values())[0]
        if _latest.hidden() is not entering:
            _latest.hidden, _latest.edited = weakref.ref(entering), {}
        edited = _latest.edited
        computed = experts.activate(*experts.factors(expert, routed.entering(expert), neurons))
        columns: list[Tensor] = []
        for neuron, column in zip(neurons, computed.unbind(-1), strict=True):
            columns.append(edited.get((id(module), expert, neuron), column))
        post = torch.stack(columns, -1)
        new = edit(post)
        if new is None:
            return None
        new = new.to(post.dtype)
        for neuron, column in zip(neurons, new.unbind(-1), strict=True):
            edited[id(module), expert, neuron] = column
        weight = routed.weight[:, expert, None]
        written = ((new - post) * weight).to(post.dtype) @ experts.columns(expert, neurons).to(post.dtype)
        change = on_hidden(lambda hidden: hidden + written.view_as(hidden))
        return change(module, args, kwargs, output)

    def hook(module: Any, *call: Any) -> Any:
        with brought(module):
            return corrected(module, *call)

    return hook
