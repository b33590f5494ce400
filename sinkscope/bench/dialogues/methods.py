"""Ways of holding the cache that dialogues are answered by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sinkscope.errors import SinkscopeError

Budget = int | float


def _policy(name: str, **options: Any) -> Callable[[Budget], Any]:
    def make(budget: Budget) -> Any:
        from sinkscope.kv import make_policy

        return make_policy(name, budget=budget, **options)

    return make


def _full(_budget: Budget) -> Any:
    from sinkscope.kv import Full

    return Full()


def _loopserve(first: int) -> Callable[[Budget], Any]:
    def make(budget: Budget) -> Any:
        from sinkscope.kv.loopserve.serve import LoopServe

        return LoopServe(budget=budget, first=first)

    return make


METHODS: dict[str, Callable[[Budget], Any]] = {
    "full": _full,
    "streaming": _policy("streaming"),
    "h2o": _policy("h2o"),
    "snapkv": _policy("snapkv"),
    "tova": _policy("tova"),
    "adakv": _policy("adakv"),
    "progressive": _policy("progressive"),
    "progressive-0": _policy("progressive", after=0),
    "loopserve": _loopserve(16),
    "loopserve-0": _loopserve(0),
}
"""By the name that commands use: a budget -> what is entered. "-0": without steps that read everything first."""


def check_methods(names: Sequence[str]) -> tuple[str, ...]:
    """The names, each once.

    Raises:
        SinkscopeError: no name, or an unknown one.
    """
    for name in names:
        if name not in METHODS:
            raise SinkscopeError(f"method {name!r} is unknown: expected some of {', '.join(METHODS)}")
    if not names:
        raise SinkscopeError(f"no method is given: choose from {', '.join(METHODS)}")
    return tuple(dict.fromkeys(names))
