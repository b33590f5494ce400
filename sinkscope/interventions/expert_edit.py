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
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.models.experts import Experts
from sinkscope.models.target import on_hidden

_Key = tuple[int, int, int]
"""Id of the experts' module, expert, neuron."""


@dataclass
class _Edited:
    """Values that earlier hooks left in one call of an experts' module."""

    up: dict[_Key, Tensor] = field(default_factory=dict)
    post: dict[_Key, Tensor] = field(default_factory=dict)


class _LatestCall(threading.local):
    """The call in which the thread is, identified by its input, and what was edited in it."""

    hidden: Callable[[], Tensor | None] | None = None
    edited: _Edited

    def edits(self, hidden: Tensor) -> _Edited:
        """What hooks of this call have edited so far; a new call starts empty."""
        if self.hidden is None or self.hidden() is not hidden:
            self.hidden = weakref.ref(hidden)
            self.edited = _Edited()
        return self.edited


_latest = _LatestCall()


def expert_hook(
    experts: Experts, expert: int, neurons: list[int], site: str, edit: Callable[[Tensor], Tensor | None]
) -> Callable[..., Any]:
    """Forward hook (with kwargs) for the module that holds `experts`."""

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        routed = experts.routed(args, kwargs)
        edited = _latest.edits((*args, *kwargs.values())[0])
        keys = [(id(experts.module), expert, neuron) for neuron in neurons]
        *gate, up = experts.factors(expert, routed.entering(expert), neurons)
        up = _latest_values(up, edited.up, keys)
        post = _latest_values(experts.activate(*gate, up), edited.post, keys)
        new = edit(up if site == "up" else post)
        if new is None:
            return None
        new_post = new.to(post.dtype)
        if site == "up":
            edited.up.update(zip(keys, new.to(up.dtype).unbind(-1), strict=True))
            new_post = experts.activate(*gate, new.to(up.dtype))
        edited.post.update(zip(keys, new_post.unbind(-1), strict=True))
        weight = routed.weight[:, expert, None]
        written = ((new_post - post) * weight).to(post.dtype) @ experts.columns(expert, neurons).to(post.dtype)
        change = on_hidden(lambda hidden: hidden + written.view_as(hidden))
        return change(module, args, kwargs, output)

    return hook


def _latest_values(
    computed: Float[Tensor, "token neuron"], edited: dict[_Key, Tensor], keys: list[_Key]
) -> Float[Tensor, "token neuron"]:
    """The neurons' values as computed, or as an earlier hook on this same call left them."""
    if not edited.keys() & keys:
        return computed
    values = [edited.get(key, column) for key, column in zip(keys, computed.unbind(-1), strict=True)]
    return torch.stack(values, -1)
