"""Who listens to the attention of which model, in this context."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from sinkscope.tap.call import Attention


@dataclass(eq=False)
class Handler:
    """A listener at the tap, inside a `with`.

    Attributes:
        see: Called with the attention of every layer.
        configs: Ids of the configurations of the model it listens to.
        needs_mask: Whether it needs rows under the model's mask, so that the mask must be complete (SDPA's).
        replaces_mask: Whether it determines what is seen, so that no mask is needed.
        idle: Whether it has nothing to do unless others listen too. The model then computes attention alone.
        was_reached: Whether attention of the model came by.
    """

    see: Callable[[Attention], None]
    configs: frozenset[int]
    needs_mask: bool = False
    replaces_mask: bool = False
    idle: bool = False
    was_reached: bool = False

    def __enter__(self) -> Handler:
        """See attention in this context, before those that are already listening."""
        HANDLERS.set((self, *HANDLERS.get()))
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening."""
        others = HANDLERS.get()
        if others[0] is self:
            HANDLERS.set(others[1:])
        else:
            HANDLERS.set(tuple([other for other in others if other is not self]))


HANDLERS: ContextVar[tuple[Handler, ...]] = ContextVar("sinkscope_tap", default=())
