"""What is checked: the cache, the context manager or the policy that a factory gives for a model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from transformers import Cache, DynamicCache

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Budget, share_of
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv.registry import import_object, policies
from sinkscope.results.console import note

Factory = Callable[..., Any]
ROOM = 1024
"""Tokens for which a cache has room that is to keep everything."""
KNOWN = ("model", "config", "budget", "share", "max_cache_len")
"""Names of parameters that a factory may have."""
EXPECTED = (
    "expected a function of a model that gives a transformers Cache, a context manager or a cache policy; its "
    f"parameters may be {', '.join(KNOWN)}"
)


def factory_named(place: str) -> Factory:
    """Return the factory at "module:function", or a policy by the name for `--policy`; the checks set its budget.

    The current folder is searched, too.

    Raises:
        SinkscopeError: There is none, or it needs a parameter that is not known here.
    """
    name, _, budget = place.partition(":")
    if name in policies():
        if budget:
            note(f"note: the checks set the budget themselves; {budget} is not used")
        return policies()[name]
    factory = import_object(place, place, f"; {EXPECTED}") if ":" in place else None
    if not callable(factory):
        raise SinkscopeError(f"{place} is no policy and no module:function: {EXPECTED}")
    for name, parameter in parameters(factory).items():
        if (
            name not in KNOWN
            and parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ):
            raise SinkscopeError(f"{place} needs {name}=: {EXPECTED}, or have a default")
    return factory


def place_of(factory: Factory) -> str:
    """Return the name by which a factory is imported, as module:name; empty if it has none.

    A function that another one made is called by the variable of its module that holds it.
    """
    module, own = getattr(factory, "__module__", ""), getattr(factory, "__name__", "")
    held = vars(sys.modules[module]) if module in sys.modules else {}
    if held.get(own) is not factory:
        own = next((name for name, value in held.items() if value is factory), own)
    return f"{module}:{own}" if own else ""


def parameters(factory: Factory) -> dict[str, inspect.Parameter]:
    """Return the parameters of a factory by name."""
    return dict(inspect.signature(factory).parameters)


def made(factory: Factory, model: Any, prompt: int, budget: Budget | None) -> Any:
    """Return what a factory gives.

    Args:
        factory: The factory.
        model: The model.
        prompt: Tokens of the longest prompt that will be read.
        budget: Tokens to keep of it, or a share. None: everything.

    Raises:
        NotImplementedError: The factory refuses this model.
        SinkscopeError: It is none of the three kinds.
    """
    tokens, share = budget or ROOM, 1.0
    if isinstance(budget, float):
        tokens, share = max(1, share_of(budget, prompt)), budget
    elif budget is not None:
        share = budget / prompt
    offered = {
        "model": model,
        "config": model.config,
        "budget": tokens,
        "share": share,
        "max_cache_len": ROOM,
    }
    try:
        subject = factory(**{name: offered[name] for name in parameters(factory) if name in offered})
    except Exception as error:  # what others wrote may refuse in any way
        reason = str(error).partition("\n")[0]
        raise NotImplementedError(f"{type(error).__name__}: {reason}") from error
    if not isinstance(subject, Cache | Intervention | AbstractContextManager):
        raise SinkscopeError(f"the factory gave a {type(subject).__name__}: {EXPECTED}")
    return subject


@contextmanager
def entered(subject: Any, model: Any) -> Iterator[Any]:
    """Return the cache that the model is called with, while what is checked acts.

    Raises:
        NotImplementedError: It refuses this model as it is entered.
    """
    if isinstance(subject, Cache):
        yield subject
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(subject.on(model) if isinstance(subject, Intervention) else subject)
        except SinkscopeError as error:
            raise NotImplementedError(str(error)) from error
        yield DynamicCache(config=model.config)
