"""Cache policies and guards by name: those of sinkscope and of installed packages, and any class by its path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Budget, read_settings, setting_types
from sinkscope.hooks.edit.base import Intervention

ENTRY_POINTS = "sinkscope.policies"
_REGISTERED: dict[str, type[Intervention]] = {}
PAPER = "paper"
GUARDS = "sinkscope.guards"
"""Group of entry points of guards, by the names that commands take in place of a policy."""
PolicyClass = TypeVar("PolicyClass", bound=type[Intervention])


def register_policy(name: str) -> Callable[[PolicyClass], PolicyClass]:
    """Register the policy whose class is decorated under `name`, for commands.

    An installed package can instead list its policies in the entry point group `sinkscope.policies`.

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
    """Return every registered policy, by name.

    Raises:
        SinkscopeError: An installed package lists a policy that cannot be imported.
    """
    by_name = dict(_REGISTERED)
    for entry in installed(ENTRY_POINTS):
        by_name.setdefault(entry.name, import_object(entry.value, f"policy {entry.name!r}"))
    return dict(sorted(by_name.items()))


@cache
def installed(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group; reading those of all installed packages takes about 20 ms."""
    return tuple(entry_points(group=group))


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
    guards = {entry.name: entry.load() for entry in installed(GUARDS)}
    _, make, _, settings = read_named(text, policies() | guards, "policy")
    try:
        policy = make(**settings)
    except TypeError as error:  # a setting is missing, or a method
        raise SinkscopeError(f"policy {text!r} cannot be made: {error}") from None
    if not isinstance(policy, Intervention):
        raise SinkscopeError(f"policy {text!r} is no cache policy: expected a subclass of sinkscope.kv.Policy")
    return policy


def read_named(text: str, classes: Mapping[str, Any], kind: str) -> tuple[str, Any, dict[str, Any], dict[str, Any]]:
    """Read the name of a class and its settings, such as `h2o:0.25` or `package.module:name:first=2`.

    Args:
        text: The text. `name:paper` calls the class method `paper` of the class.
        classes: Classes by name.
        kind: What has such names, for errors.

    Returns:
        The name, what is to be called, the types of its settings, and those that are given.

    Raises:
        SinkscopeError: The name or a setting is unknown, or a value has the wrong type.
    """
    name, *parts = text.split(":")
    if name not in classes and parts and parts[0].isidentifier() and parts[0] != PAPER:
        name = f"{name}:{parts.pop(0)}"
    if name not in classes and ":" not in name:
        raise SinkscopeError(f"{kind} {name!r}: expected one of {', '.join(classes)}, or package.module:name")
    make = classes[name] if name in classes else import_object(name, f"{kind} {name!r}")
    types = setting_types(make) if isinstance(make, type) else {"budget": Budget}
    if PAPER in parts and hasattr(make, PAPER):
        parts.remove(PAPER)
        make = make.paper
    settings = [part if "=" in part else f"budget={part}" for part in parts if part]
    return name, make, types, read_settings(settings, types, f"{kind} {text!r}")


def import_object(path: str, kind: str, remedy: str = "") -> Any:
    """Return the object at "package.module:name"; the current folder is searched, too.

    Args:
        path: Where it is.
        kind: What it is called in the error.
        remedy: End of the error.

    Raises:
        SinkscopeError: It cannot be imported.
    """
    module, _, name = path.partition(":")
    sys.path.insert(0, "")
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # a module that others wrote may fail in any way
        reason = str(error).partition("\n")[0]
        raise SinkscopeError(f"{kind} cannot be imported: {type(error).__name__}: {reason}{remedy}") from None
    finally:
        sys.path.remove("")
