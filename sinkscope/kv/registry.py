"""Cache policies and guards by name, and any class by its path."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Budget, read_settings, setting_types
from sinkscope.hooks.edit.base import Intervention

_REGISTERED: dict[str, type[Intervention]] = {}
_MODULES = ("sinkscope.kv.published", "sinkscope.generation.progressive")  # which register theirs
_GUARDS = {"loopguard": "sinkscope.loops.guard.guard:LoopGuard"}
PolicyClass = TypeVar("PolicyClass", bound=type[Intervention])


def register_policy(name: str) -> Callable[[PolicyClass], PolicyClass]:
    """Register the policy whose class is decorated under `name`, for commands.

    Raises:
        SinkscopeError: Another policy already has this name.
    """

    def register(policy: PolicyClass) -> PolicyClass:
        if name in _REGISTERED:
            raise SinkscopeError(
                f"two policies are called {name!r}, {_REGISTERED[name]} and {policy}: give one of them another name"
            )
        _REGISTERED[name] = policy
        return policy

    return register


def policies() -> dict[str, type[Intervention]]:
    """Return every registered policy, by name."""
    for module in _MODULES:
        import_module(module)
    return dict(sorted(_REGISTERED.items()))


def policy_named(text: str) -> Intervention:
    """Make a cache policy from its command-line name, such as `h2o`, `snapkv:512:window=64`, `package.module:Class`.

    After the name stand the budget, a number of tokens or a fraction of the prompt, and settings as KEY=VALUE. The
    current folder is also searched for modules. `loopguard` and `loopguard:paper` are the two guards.

    Raises:
        SinkscopeError: The policy, class or setting does not exist, or a value is invalid.

    Example:
        >>> policy_named("streaming:512:first=2"), policy_named("sinkscope.kv.published:H2O:0.25").budget
        (StreamingLLM(budget=512, first=2, last=0, every=1), 0.25)
    """
    name, *parts = text.split(":")
    by_name = policies()
    path = _GUARDS.get(name)
    if path is None and name not in by_name and parts and parts[0].isidentifier():
        path = f"{name}:{parts.pop(0)}"
    policy: Any = by_name.get(name) if path is None else import_object(path, f"policy {path!r}")
    if policy is None:
        raise SinkscopeError(f"policy {name!r}: expected one of {', '.join(by_name)}, or package.module:Class")
    if not isinstance(policy, type) or not issubclass(policy, Intervention):
        raise SinkscopeError(f"policy {path!r} is no cache policy: expected a subclass of sinkscope.kv.Policy")
    make: Any = policy
    if name in _GUARDS and parts[:1] == ["paper"]:
        make = make.paper
        parts = parts[1:]
    types = {"budget": Budget}
    if any("=" in part for part in parts):
        types |= setting_types(policy)
    given = read_settings([part for part in parts if part], types, f"policy {text!r}", "budget")
    try:
        return make(**given)
    except TypeError as error:  # a setting is missing, or a method
        raise SinkscopeError(f"policy {text!r} cannot be made: {error}") from None


def import_object(path: str, what: str, remedy: str = "") -> Any:
    """Return the object at "package.module:name", or at "folder/module.py:name"; the current folder is searched, too.

    Args:
        path: Where it is.
        what: What it is called in the error.
        remedy: End of the error.

    Raises:
        SinkscopeError: It cannot be imported.
    """
    module, _, name = path.partition(":")
    folder = ""
    if module.endswith(".py"):
        folder, module = os.path.split(module.removesuffix(".py"))
    sys.path.insert(0, folder)
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # a module that others wrote may fail in any way
        reason = str(error).partition("\n")[0]
        raise SinkscopeError(f"{what} cannot be imported: {type(error).__name__}: {reason}{remedy}") from None
    finally:
        sys.path.remove(folder)
