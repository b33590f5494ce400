"""The cache policies by name: those of sinkscope, those of installed packages, and any class by its module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeVar

from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Intervention

ENTRY_POINTS = "sinkscope.policies"
_REGISTERED: dict[str, type[Intervention]] = {}
Class = TypeVar("Class", bound=type[Intervention])


def register_policy(name: str) -> Callable[[Class], Class]:
    """Decorate a policy: commands, and `make_policy`, find it under `name`.

    A policy of an installed package is found without this if the package names it in the entry point group
    `sinkscope.policies`.

    Raises:
        SinkscopeError: another policy has this name.
    """

    def register(policy: Class) -> Class:
        if name in _REGISTERED:
            raise _taken(name, _REGISTERED[name], policy)
        _REGISTERED[name] = policy
        return policy

    return register


def policies() -> dict[str, type[Intervention]]:
    """Every policy that has a name.

    Raises:
        SinkscopeError: an installed package names a policy that cannot be imported, or whose name is taken.
    """
    found = dict(_REGISTERED)
    for entry in entry_points(group=ENTRY_POINTS):
        loaded = _class(entry.value.replace(" ", ""))
        if found.setdefault(entry.name, loaded) is not loaded:
            raise _taken(entry.name, found[entry.name], loaded)
    return dict(sorted(found.items()))


def make_policy(name: str, **options: Any) -> Any:
    """The policy that commands call `name`, with its fields as options.

    Raises:
        SinkscopeError: no such policy, no such field, or a value that makes no sense.

    Example:
        >>> make_policy("streaming", budget=512)
        StreamingLLM(budget=512, first=4, last=0, every=1, mode='evict', positions='original', reduce='mean')
    """
    known = _REGISTERED if name in _REGISTERED else policies()
    if name not in known:
        raise SinkscopeError(f"policy {name!r}: expected one of {', '.join(known)}, or package.module:Class")
    return _made(name, known[name], options)


def policy_named(text: str) -> Intervention:
    """A cache policy as commands name it: `NAME` or `package.module:Class`, and a budget behind another colon.

    The budget is a number of tokens or a fraction of the prompt. Modules are also looked for in the current folder.

    Raises:
        SinkscopeError: no such policy, no such class, or no such budget.

    Example:
        >>> policy_named("streaming:512").budget, policy_named("sinkscope.kv.h2o:H2O:0.25").budget
        (512, 0.25)
    """
    name, *rest = text.split(":")
    own = rest[:1] if rest and (rest[0].isidentifier() or len(rest) > 1) and name not in _REGISTERED else []
    budget = ":".join(rest[len(own) :])
    options = {} if len(rest) == len(own) else {"budget": _budget(text, ":".join([name, *own]), budget)}
    return _made(text, _class(f"{name}:{own[0]}"), options) if own else make_policy(name, **options)


def _budget(text: str, name: str, budget: str) -> int | float:
    try:
        return float(budget) if "." in budget else int(budget)
    except ValueError:
        raise SinkscopeError(
            f"policy {text!r}: {budget!r} is no budget; give a number of tokens, as in {name}:512, or a fraction of "
            f"the prompt, as in {name}:0.25",
            page="kv-budget",
        ) from None


def _class(path: str) -> type[Intervention]:
    """The class at "package.module:Class"."""
    module, _, name = path.partition(":")
    sys.path.insert(0, "")
    try:
        found = getattr(import_module(module), name)
    except Exception as error:  # a module that others wrote may fail in any way
        what = str(error).partition("\n")[0]
        raise SinkscopeError(f"policy {path!r} cannot be imported: {type(error).__name__}: {what}") from None
    finally:
        sys.path.remove("")
    if not isinstance(found, type) or not issubclass(found, Intervention):
        raise SinkscopeError(f"policy {path!r} is no cache policy: expected a subclass of sinkscope.kv.Policy")
    return found


def _made(name: str, policy: type[Intervention], options: dict[str, Any]) -> Intervention:
    known = [field.name for field in fields(policy)]  # type: ignore[arg-type]
    if odd := [option for option in options if option not in known]:
        raise SinkscopeError(f"policy {name!r} has no {odd[0]!r}; it has: {', '.join(known)}")
    try:
        return policy(**options)
    except TypeError as error:  # a field without a default, or a method that is missing
        raise SinkscopeError(f"policy {name!r} cannot be made: {error}") from None


def _taken(name: str, first: type, second: type) -> SinkscopeError:
    both = " and ".join(f"{each.__module__}.{each.__qualname__}" for each in (first, second))
    return SinkscopeError(f"two policies are called {name!r}, {both}: give one of them another name")
