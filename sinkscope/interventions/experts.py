"""Neurons inside fused experts: the experts' kernel is one call, so an edit corrects its output instead.

The output of a mixture is a weighted sum over each token's experts. If neuron j of expert e has value `a` and should
have `b`, the output changes by `weight[e] * (b - a) * W_out[e][:, j]` for the tokens routed to e, exactly. `a` is
computed again from that neuron's own rows, for all tokens: also for one that is routed elsewhere it says what the
neuron would do, which is what the neutral value of a patch needs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.models.experts import activate, bind, columns, gate_up
from sinkscope.models.target import Target

_last = threading.local()  # values already edited in this call of an experts module, by other hooks


def check_experts(target: Target, layer: int) -> tuple[int, int]:
    """Number of experts of a layer and neurons of each.

    Raises:
        UnsupportedError: their weights are not plain tensors.
    """
    experts: Any = target.sub(layer, target.adapter.experts or "")
    weight = getattr(experts, "down_proj", None)
    if not isinstance(weight, Tensor) or weight.ndim != 3 or not weight.is_floating_point():
        raise UnsupportedError(
            f"the experts of {target.name} hold no plain weights (quantised?): load the model dequantised to edit "
            "neurons of an expert",
            page="quantised-experts",
        )
    return int(weight.shape[0]), int(weight.shape[1 if experts.is_transposed else 2])


def expert_hook(
    expert: int, neurons: list[int], site: str, edit: Callable[[Tensor], Tensor | None]
) -> Callable[..., Any]:
    """Forward hook (with kwargs) for a fused experts module of transformers."""

    def hook(experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        hidden, chosen, weights = bind(args, kwargs)
        gate, up = gate_up(experts, expert, hidden, neurons)
        before = _edited(hidden)
        keys = [(id(experts), expert, n) for n in neurons]
        # What the neurons have now: as computed, or as an earlier hook on this same call left them.
        up = torch.stack([before.get((*k, "up"), up[..., i]) for i, k in enumerate(keys)], -1)
        post = activate(experts, gate, up)
        post = torch.stack([before.get((*k, "post"), post[..., i]) for i, k in enumerate(keys)], -1)
        new = edit(up if site == "up" else post)
        if new is None:
            return None
        after = activate(experts, gate, new.to(up.dtype)) if site == "up" else new.to(post.dtype)
        for i, k in enumerate(keys):
            before[(*k, "post")] = after[..., i]
            if site == "up":
                before[(*k, "up")] = new[..., i].to(up.dtype)
        weight = torch.where(chosen == expert, weights, 0).sum(-1, keepdim=True)
        written = columns(experts, expert, neurons).to(post.dtype)
        return output + ((after - post) * weight).to(post.dtype) @ written

    return hook


def _edited(hidden: Tensor) -> dict[Any, Tensor]:
    """Shared by all hooks of one call, which is known by its input; a new call begins with nothing."""
    if getattr(_last, "hidden", None) is None or _last.hidden() is not hidden:
        _last.hidden, _last.values = weakref.ref(hidden), {}
    return _last.values
