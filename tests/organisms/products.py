"""What a layer really multiplies in its attention, seen as torch is called, and how it changes with the sites of heads.

The model runs with its own eager attention. A product of `[... query d_head]` and `[... d_head key]`, whose softmax is
taken, has the queries and keys; the product of that softmax has the values, and gives the heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sinkscope.hooks.trace import Site

from .additions import followed

_PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm"}
_TOKEN = 5  # the one that is edited


class Products(TorchFunctionMode):
    """Follows the attention of one call of a layer.

    Attributes:
        parts: Queries, keys and values `[head token width]`; empty until they are seen.
        rows: `[head query key]`; None where torch does not show them.

    Args:
        tokens: Length of the text.
        silenced: A head whose output becomes zero.
    """

    def __init__(self, tokens: int, silenced: int | None = None) -> None:
        super().__init__()
        self.tokens, self.silenced = tokens, silenced
        self.parts: dict[str, Tensor] = {}
        self.rows: Tensor | None = None
        self._factors: list[Tensor] = []
        self._has_rows = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        square = (self.tokens, self.tokens)
        if name == "scaled_dot_product_attention":  # some models have no eager attention
            return self._attended(*args[:3], result)
        if name in _PRODUCTS:
            left, right = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, Tensor)][-2:]
            if self._has_rows and tuple(left.shape[-2:]) == square:
                self._has_rows = False
                self.rows = _flat(left)
                return self._attended(self._factors[0], self._factors[1].mT, right, result)
            if tuple(result.shape[-2:]) == square and result.ndim > 2:
                self._factors = [left.clone(), right.clone()]
        elif name == "softmax" and self._factors and result.shape[-2] == self.tokens:
            # One column more of a learned sink, which is dropped.
            self._has_rows = self._has_rows or result.shape[-1] in (self.tokens, self.tokens + 1)
        return result

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, result: Tensor) -> Tensor:
        self.parts = {"q": _flat(query), "k": _flat(key), "v": _flat(value)}
        if self.silenced is not None:
            result = result.clone()
            result.view(-1, *result.shape[-2:])[self.silenced] = 0
        return result


def _flat(tensor: Tensor) -> Tensor:
    return tensor.clone().reshape(-1, *tensor.shape[-2:])


@contextmanager
def eager(model: Any) -> Iterator[None]:
    """The model's own eager attention, if it has one."""
    before = model.config._attn_implementation
    with suppress(Exception):
        model.set_attn_implementation("eager")
    yield
    with suppress(Exception):
        model.set_attn_implementation(before)


def rows_of(model: Any, layers: list[torch.nn.Module], ids: Tensor) -> list[Tensor | None]:
    """The rows of each layer in a pass with eager attention."""
    with eager(model):
        return [products.rows for products, _, _ in followed(model, layers, ids, lambda _: Products(ids.shape[1]))]


def is_of_heads(model: Any, layer: torch.nn.Module, ids: Tensor, which: str, site: Site) -> bool:
    """Whether a site holds the queries "q", keys "k", values "v" or heads "z" of a layer.

    If the numbers of one head of a site change places, exactly the heads that read it must change in what is
    multiplied. If attention gives zero in one head, `hook_z` must change most in that head.
    """
    shown = list[Tensor]()

    def seen(edit: Callable[[Tensor], Tensor | None], silenced: int | None = None) -> Products:
        module, when, hook = site.point.hook(edit)
        register = module.register_forward_pre_hook if when == "pre" else module.register_forward_hook
        handle = register(hook, with_kwargs=True)
        try:
            return followed(model, [layer], ids, lambda _: Products(ids.shape[1], silenced))[0][0]
        finally:
            handle.remove()

    def keep(value: Tensor) -> None:
        shown.append(site.shown(value.clone(), ids.shape)[0])  # [token head width]

    intact = seen(keep).parts
    count = shown[0].shape[1]

    def turn(head: int, value: Tensor) -> Tensor:
        new = value.clone()
        part = site.cut(new).view(-1, *shown[0].shape[1:])[_TOKEN, head]
        part.copy_(part.roll(1))
        return new

    for head in {0, count - 1} if intact else ():
        if which == "z":
            seen(keep, head)
            changed = (shown[-1] - shown[0]).abs().amax((0, 2))
            is_right = bool(changed.argmax() == head and changed.sum() < 2 * changed[head])
        else:
            turned = seen(partial(turn, head)).parts[which]
            is_right = _is_read(intact[which], turned, shown[0], head)
        if not is_right:
            return False
    return bool(intact)


def _is_read(intact: Tensor, turned: Tensor, here: Tensor, head: int) -> bool:
    """Whether exactly the heads that read one of `here` change, by widths that fit."""
    count, heads = len(intact), here.shape[1]
    if count % heads or intact.shape[-1] != here.shape[-1]:
        return False
    changed = (turned - intact).abs().amax((1, 2)) > 1e-5 * intact.abs().max()
    return bool((changed == (torch.arange(count) * heads // count == head)).all())
