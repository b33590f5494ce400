"""Cache policies and guards by name: those of sinkscope and of installed packages, and any class by its path."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, TypeVar

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Budget, read_setting
from sinkscope.hooks.edit.base import Intervention

ENTRY_POINTS = "sinkscope.policies"
_REGISTERED: dict[str, type[Intervention]] = {}
GUARDS = "sinkscope.guards"
"""Group of entry points of guards, by the names that commands take in place of a policy."""
PolicyClass = TypeVar("PolicyClass", bound=type[Intervention])


def register_policy(name: str) -> Callable[[PolicyClass], PolicyClass]:
    """Register the policy whose class is decorated under `name`, for commands and `make_policy`.

    An installed package can instead list its policies in the entry point group `sinkscope.policies`.

    Raises:
        SinkscopeError: Another policy already has this name.
    """

    def register(policy: PolicyClass) -> PolicyClass:
        if name in _REGISTERED:
            raise _name_taken(name, _REGISTERED[name], policy)
        _REGISTERED[name] = policy
        return policy

    return register


def policies() -> dict[str, type[Intervention]]:
    """Return every registered policy, by name.

    Raises:
        SinkscopeError: An installed package lists a policy that cannot be imported, or whose name is taken.
    """
    for file in iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{file.name}")
    by_name = dict(_REGISTERED)
    for entry in installed(ENTRY_POINTS):
        policy = _import_policy(entry.value.replace(" ", ""))
        if by_name.setdefault(entry.name, policy) is not policy:
            raise _name_taken(entry.name, by_name[entry.name], policy)
    return dict(sorted(by_name.items()))


@cache
def installed(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group; reading those of all installed packages takes about 20 ms."""
    return tuple(entry_points(group=group))


def guards() -> dict[str, EntryPoint]:
    """Return the guards of installed packages by name; a name may be followed by `:paper`."""
    return {entry.name: entry for entry in installed(GUARDS)}


def make_policy(name: str, **options: Any) -> Any:
    """Make the policy registered as `name`; the options are its fields.

    Raises:
        SinkscopeError: The policy or field does not exist, or a value is invalid.

    Example:
        >>> make_policy("streaming", budget=512)
        StreamingLLM(budget=512, first=4, last=0, every=1)
    """
    by_name = _REGISTERED if name in _REGISTERED else policies()
    if name not in by_name:
        raise SinkscopeError(f"policy {name!r}: expected one of {', '.join(by_name)}, or package.module:Class")
    return _make(name, by_name[name], options)


def policy_named(text: str) -> Intervention:
    """Make a cache policy from its command-line name: `NAME` or `package.module:Class`, optionally with `:BUDGET`.

    The budget is a number of tokens or a fraction of the prompt. The current folder is also searched for modules.
    `loopguard` and `loopguard:paper` are the two guards.

    Raises:
        SinkscopeError: The policy or class does not exist, or the budget is invalid.

    Example:
        >>> policy_named("streaming:512").budget, policy_named("sinkscope.kv.h2o:H2O:0.25").budget
        (512, 0.25)
    """
    name, _, rest = text.partition(":")
    second, _, budget = rest.partition(":")
    if name in guards():
        guard: Any = guards()[name].load()
        if second == "paper":
            guard, rest = guard.paper, budget
        return guard(**_budget_option(text, rest))
    if name not in _REGISTERED and second.isidentifier():
        return _make(text, _import_policy(f"{name}:{second}"), _budget_option(text, budget))
    return make_policy(name, **_budget_option(text, rest))


def _budget_option(text: str, budget: str) -> dict[str, Any]:
    """The budget that a name ends with, if it ends with one."""
    if not budget:
        return {}
    return {"budget": read_setting(budget, Budget, f"policy {text!r}: budget=")}


def import_object(path: str, what: str, remedy: str = "") -> Any:
    """Return the object at "package.module:name"; the current folder is searched, too.

    Args:
        path: Where it is.
        what: What it is called in the error.
        remedy: End of the error.

    Raises:
        SinkscopeError: It cannot be imported.
    """
    sys.path.insert(0, "")
    try:
        module, _, name = path.partition(":")
        return getattr(import_module(module), name)
    except Exception as error:  # a module that others wrote may fail in any way
        reason = str(error).partition("\n")[0]
        raise SinkscopeError(f"{what} cannot be imported: {type(error).__name__}: {reason}{remedy}") from None
    finally:
        sys.path.remove("")


def _import_policy(path: str) -> type[Intervention]:
    """The class at "package.module:Class"."""
    policy = import_object(path, f"policy {path!r}")
    if not isinstance(policy, type) or not issubclass(policy, Intervention):
        raise SinkscopeError(f"policy {path!r} is no cache policy: expected a subclass of sinkscope.kv.Policy")
    return policy


def _make(name: str, policy: type[Intervention], options: dict[str, Any]) -> Intervention:
    try:
        return policy(**options)
    except TypeError as error:  # a setting that does not exist or is missing, or a method that is missing
        settings = ", ".join(setting.name for setting in fields(policy))  # type: ignore[arg-type]
        raise SinkscopeError(f"policy {name!r} cannot be made: {error}; its settings are {settings}") from None


def _name_taken(name: str, first: type, second: type) -> SinkscopeError:
    return SinkscopeError(f"two policies are called {name!r}, {first} and {second}: give one of them another name")
