"""Cache policies and guards by name: those of sinkscope and of installed packages, and any class by its path."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, TypeVar

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Budget, read_settings, setting_types, with_own_settings
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
    return _make(name, _policy_class(name), options)


def _policy_class(name: str) -> type[Intervention]:
    by_name = _REGISTERED if name in _REGISTERED else policies()
    if name not in by_name:
        raise SinkscopeError(f"policy {name!r}: expected one of {', '.join(by_name)}, or package.module:Class")
    return by_name[name]


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
    if name in guards():
        guard: Any = guards()[name].load()
        if parts[:1] == ["paper"]:
            return guard.paper(**_options(text, parts[1:], guard))
        return guard(**_options(text, parts, guard))
    if name not in _REGISTERED and parts and parts[0].isidentifier():
        policy = _import_policy(f"{name}:{parts[0]}")
        return _make(text, policy, _options(text, parts[1:], policy))
    policy = _policy_class(name)
    return _make(name, policy, _options(text, parts, policy))


def _options(text: str, parts: Sequence[str], policy: type[Intervention]) -> dict[str, Any]:
    """The budget and settings after a name."""
    types = {"budget": Budget}
    if any("=" in part for part in parts):
        types |= setting_types(policy)
    settings = read_settings([part for part in parts if part], types, f"policy {text!r}", "budget")
    return with_own_settings(policy, settings)


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
