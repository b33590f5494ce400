"""Who listens to the attention of which model, in this context."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    """

    see: Callable[[Attention], None]
    configs: frozenset[int]
    needs_mask: bool = False
    replaces_mask: bool = False
    idle: bool = False

    def __enter__(self) -> None:
        """See attention in this context, before those that are already listening."""
        HANDLERS.set((self, *HANDLERS.get()))

    def __exit__(self, *_: object) -> None:
        """Stop listening."""
        HANDLERS.set(tuple([other for other in HANDLERS.get() if other is not self]))


HANDLERS: ContextVar[tuple[Handler, ...]] = ContextVar("sinkscope_tap", default=())


def listeners_to(configs: Iterable[int]) -> list[Handler]:
    """Return who listens to a model with one of these configurations."""
    return [handler for handler in HANDLERS.get() if not handler.configs.isdisjoint(configs)]
