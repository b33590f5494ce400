"""How the output of a projection is split into heads."""

from __future__ import annotations

from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from sinkscope.models.target import Target


def projected(which: str, target: Target, tensor: Float[Tensor, "*n width"]) -> Float[Tensor, "*n head d_head"]:
    """q, k or v before rotary, from the output of its own or a shared projection."""
    adapter, index = target.adapter, "qkv".index(which)
    if getattr(adapter, which) is None:
        if adapter.qkv_layout == "by head":
            split = rearrange(tensor, "... (head qkv d_head) -> qkv ... head d_head", head=target.n_heads, qkv=3)
            return split[index]
        heads = [target.n_heads, target.n_kv_heads, target.n_kv_heads]
        tensor = tensor.split([count * target.head_width for count in heads], -1)[index]
    count = target.n_kv_heads
    if which == "q":
        count = target.n_heads
    return rearrange(tensor, "... (head d_head) -> ... head d_head", head=count)
