"""A pass through some layers: it starts at the input of a layer, may skip layers, and ends behind the last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from sinkscope.models.hooks import Hook, hidden_of, hooked, on_input

_SKIPPING = threading.RLock()  # while layers of some model are skipped, in one thread


class Stop(Exception):  # noqa: N818 - no error: it ends a pass
    """Raised by `stop` inside a hook, to end a forward pass or the call of a layer early."""


def stop(*_: object) -> None:
    """End the running pass of a `Target`; to be called in a hook, or to be one."""
    raise Stop


@dataclass(frozen=True, eq=False)
class LayerInput:
    """The residual stream of some texts where it enters a layer, at which a later pass over them may begin.

    Attributes:
        layer: The layer.
        hidden: What enters it.
        wrapped: Whether the layers of the model return a tuple.
    """

    layer: int
    hidden: Float[Tensor, "batch pos d_model"]
    wrapped: bool


@contextmanager
def bounded(
    layers: Sequence[nn.Module], start: LayerInput | None, last_layer: int | None, store: Any = None
) -> Iterator[None]:
    """Context manager in which a pass begins and ends at layers, and is over where `stop` is called.

    Args:
        layers: All layers of the model.
        start: What the first layer that runs gets; those before it pass on what they get. None: all run.
        last_layer: The last layer that runs. None: all run.
        store: Reads the weights of layers when they are called, if they are not in memory.
    """
    hooks: list[Hook] = []
    skipping: AbstractContextManager[None] = nullcontext()
    if start is not None:
        hidden = start.hidden
        hooks.append((layers[start.layer], "first", on_input(lambda _: hidden)))  # edits there act on it
        skipping = _skipped(layers[: start.layer], start.wrapped, store)
    if last_layer is not None:
        hooks.append((layers[last_layer], "post", stop))
    with suppress(Stop), skipping, hooked(*hooks):
        yield


@contextmanager
def _skipped(layers: Sequence[nn.Module], wrapped: bool, store: Any) -> Iterator[None]:
    """Context manager in which the first layers pass on what they get in this thread; no other enters it meanwhile.

    Args:
        layers: These layers.
        wrapped: Whether the layers of the model return a tuple.
        store: Reads their weights when they are called, if they are not in memory; it does not read them either.
    """
    owner = threading.get_ident()

    def passing_on(run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != owner:
                return run(*args, **kwargs)
            hidden = hidden_of(args, kwargs)
            return (hidden,) if wrapped else hidden

        return forward

    with _SKIPPING, ExitStack() as stack:
        for layer in layers:
            attributes = vars(layer)  # a bridge hands what is set on it to the module inside
            run = layer.forward
            if "forward" in attributes:  # some libraries replace it as well
                stack.callback(attributes.update, forward=attributes["forward"])
            else:
                stack.callback(attributes.pop, "forward")
            attributes["forward"] = passing_on(run)
        if store is not None:
            store.skipped = len(layers)
            stack.callback(setattr, store, "skipped", 0)
        yield
