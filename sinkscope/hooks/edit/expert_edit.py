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
    """Return the forward hook, with kwargs, by which `edit` acts on an expert; its module holds `experts`."""

    def corrected(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        entering = (*args, *kwargs.values())[0]
        if _latest.hidden() is not entering:
            _latest.hidden, _latest.edited = weakref.ref(entering), {}
        edited = _latest.edited
        with brought(module):
            routed = experts.routed(args, kwargs)
            post = experts.activate(*experts.factors(expert, routed.entering(expert), neurons)).clone()
            written = experts.columns(expert, neurons).to(post.dtype)
        for number, neuron in enumerate(neurons):
            if (id(module), expert, neuron) in edited:
                post[:, number] = edited[id(module), expert, neuron]
        new = edit(post)
        if new is None:
            return None
        new = new.to(post.dtype)
        for number, neuron in enumerate(neurons):
            edited[id(module), expert, neuron] = new[:, number]
        change = ((new - post) * routed.weight[:, expert, None]).to(post.dtype) @ written
        return on_hidden(lambda hidden: hidden + change.view_as(hidden))(module, args, kwargs, output)

    return corrected
