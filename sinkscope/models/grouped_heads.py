"""Which query head reads which key: query heads share a kv head in groups, which are beside each other."""

from __future__ import annotations

from einops import rearrange, repeat
from jaxtyping import Float, Shaped
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


def kv_head_of(head: int, heads: int, kv_heads: int) -> int:
    """The kv head whose keys a query head reads."""
    return head * kv_heads // heads


def widened(by_kv_head: Shaped[Tensor, "batch _ *rest"], heads: int) -> Shaped[Tensor, "batch _ *rest"]:
    """Expand from kv heads to query heads; a tensor with a single head for all is left as it is."""
    kv_heads = by_kv_head.shape[1]
    if kv_heads in (1, heads):
        return by_kv_head
    return repeat(by_kv_head, "batch kv_head ... -> batch (kv_head group) ...", group=heads // kv_heads)


def beside_keys(
    by_head: Shaped[Tensor, "batch head query width"], kv_heads: int
) -> Shaped[Tensor, "kv_head_of_batch query_of_group width"]:
    """Queries, or their rows, in a form that a matrix product with the keys or values of their kv heads takes.

    Args:
        by_head: What there is of each query head.
        kv_heads: Number of kv heads.
    """
    # Without einops, because this runs in every layer for every generated token, where it costs a tenth:
    # "batch (kv_head group) query width -> (batch kv_head) (group query) width"
    batch, _, _, width = by_head.shape
    return by_head.reshape(batch * kv_heads, -1, width)
