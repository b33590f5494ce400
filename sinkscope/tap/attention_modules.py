"""Attention that a module computes itself, seen as it is computed.

Outside transformers' attention interface (Bloom, Falcon, GPT-J, MPT and others), a module multiplies queries by keys,
adds what it adds, takes a softmax, and multiplies the rows by values (all of them with eager attention, which is
selected). While such a module runs, a function mode of torch sees these calls. The scores are the module's own, so all
that it does to them is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sinkscope.errors import UnsupportedError
from sinkscope.models.following import AroundCall, following
from sinkscope.models.hooks import Args, Kwargs, hidden_of
from sinkscope.tap.own_attention import OwnAttention

_PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm")
_BIASES = ("alibi", "position_bias")  # arguments with a number for each head and key, which is added to the scores


Attend = Callable[[OwnAttention], Tensor]
"""Gives the output `[batch query head d_value]`: the module's own, or another in its place."""


class _Reader(TorchFunctionMode):
    """Sees one call of an attention module, and replaces the product of its rows and the values."""

    def __init__(self, module: nn.Module, layer: int, attend: Attend, args: Args, kwargs: Kwargs) -> None:
        super().__init__()
        self.module, self.layer, self.attend = module, layer, attend
        hidden = hidden_of(args, kwargs)
        self.batch, self.queries = hidden.shape[:2]
        self.attended = 0
        self._factors: tuple[Tensor, Tensor] | None = None
        self._softmax: tuple[Tensor, Tensor] | None = None  # scores and rows
        self._bias: Tensor | None = None
        self._lacks_bias = False
        for name in _BIASES:
            if isinstance(kwargs.get(name), Tensor):
                self._bias = kwargs[name]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        tensors = [part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)]
        if name in _PRODUCTS:
            return self._product(result, *tensors[-2:])
        if name == "softmax" and self._factors is not None and result.shape[-2] == self.queries:
            self._softmax = (tensors[0], result)
        return result

    def _product(self, result: Tensor, left: Tensor, right: Tensor) -> Tensor:
        if self._softmax is None or self._factors is None:
            if result.ndim > 2 and result.shape[-2] == self.queries:
                self._factors = (left, right)
            return result
        scores, rows = self._softmax
        if left.numel() != rows.numel() or left.shape[-1] != rows.shape[-1]:
            return result
        self.attended += 1
        query, key = self._factors
        self._factors = self._softmax = None
        output = self._by_head(result).transpose(1, 2)
        call = OwnAttention(
            self.module,
            self.layer,
            self._by_head(query),
            self._by_head(key.mT),
            self._by_head(right),
            mask=None,
            settings={},
            output=output,
            scores=self._by_head(scores),
            lacks_bias=self._lacks_bias,
        )
        if self._bias is not None:
            call.bias = self._bias.reshape(-1, output.shape[2], self._bias.shape[-1])
        other = self.attend(call)
        if other is output:
            return result
        return other.transpose(1, 2).reshape(result.shape).to(result.dtype)

    def _by_head(self, tensor: Tensor) -> Tensor:
        """`[batch head token width]`, also of a tensor that has batch and heads in one dimension."""
        return tensor.reshape(self.batch, -1, *tensor.shape[-2:])

    def unmasked(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The arguments of a call with masks that hide nothing and biases of zero, for what the cache will hold."""
        keys = self.queries
        for value in (*args, *kwargs.values()):
            if hasattr(value, "get_mask_sizes"):
                keys = value.get_mask_sizes(self.queries, self.layer)[0]
        changed = dict(kwargs)
        for name, value in kwargs.items():
            if name in _BIASES and isinstance(value, Tensor):
                self._lacks_bias = True
                changed[name] = value.new_zeros(*value.shape[:-1], keys)
            else:
                changed[name] = self._seen_by_all(value, keys)
        return tuple([self._seen_by_all(value, keys) for value in args]), changed

    def _seen_by_all(self, value: Any, keys: int) -> Any:
        if not isinstance(value, Tensor) or value.ndim != 4 or value.shape[-2] != self.queries:
            return value
        own = value[:, :, -1:, -1:]  # the last query sees its own key
        return own.expand(*value.shape[:2], self.queries, keys)


_READS: ContextVar[bool] = ContextVar("sinkscope_reads", default=False)
"""Whether the call of an attention module is being read."""


@contextmanager
def reading(
    modules: dict[int, nn.Module], name: str, attend: Attend, wanted: Callable[[], tuple[bool, bool]]
) -> Iterator[None]:
    """Context manager: `attend` sees the attention of every one of these modules, and may replace its output.

    Args:
        modules: Attention modules by the number of their layer.
        name: Name of the model, for errors.
        attend: Called with the parts of each attention.
        wanted: Function that says of the call that begins whether `attend` wants to see it, and whether the module is
            to hide no key.

    Raises:
        UnsupportedError: A module attends in another way, or not once.
    """
    layers = {module: layer for layer, module in modules.items()}

    def follow(module: nn.Module, args: Args, kwargs: Kwargs) -> AroundCall:
        sees, unmasks = wanted()
        if not sees or _READS.get():  # a model may be tapped several times
            return
        reader = _Reader(module, layers[module], attend, args, kwargs)
        if unmasks:
            args, kwargs = reader.unmasked(args, kwargs)
        _READS.set(True)
        try:
            with reader:
                yield args, kwargs
        finally:
            _READS.set(False)
        if reader.attended != 1:
            raise UnsupportedError(
                f"layer {layers[module]} of {name} attends in a way that is not seen from outside: use another model "
                "for cache policies and attention observers"
            )

    with following(layers, follow):
        yield
