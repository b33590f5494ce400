"""Arguments of Python callers: what a signature and a docstring say of each, and refusals in one line."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from sinkscope.errors import SinkscopeError
from sinkscope.files.docstrings import descriptions_of
from sinkscope.files.records import checked_value

C = TypeVar("C", bound=Callable[..., Any])
PYTHON_ONLY = frozenset({"tokenizer", "texts", "ids", "progress", "loading", "interventions", "to_files"})
"""Parameters that no command has as an option."""
LARGEST = (1 << 31) - 1
"""A number above it is too large for any work."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function, as its signature and its docstring describe it.

    Attributes:
        name: Its name.
        type: Its annotation without `Annotated`, without None, and of a sequence that of a member.
        default: Its default; `inspect.Parameter.empty` if it has none.
        help: Its description, from the docstring.
        many: Whether it takes several values.
        hint: The whole annotation.
    """

    name: str
    type: Any
    default: Any
    help: str
    many: bool
    hint: Any

    def check(self, value: Any, *, in_python: bool = False) -> None:
        """Refuse a value that the annotation excludes, and a number that is too large for any work.

        Nothing is converted, except a whole number to a float. None is accepted if it is the default.

        Args:
            value: The value.
            in_python: Whether only callers from Python can have given it, whom the error does not tell an option.

        Raises:
            SinkscopeError: The value is of another type or word, too small, too large, or not a number.
        """
        if value is None and self.default is None:
            return
        name, then = f"--{self.name.replace('_', '-')} ", f" ({self.name}=... in Python)"
        if in_python or self.name in PYTHON_ONLY:
            name, then = f"{self.name}=", ""
        checked_value(self.hint, value, name, strict=True, then=then)
        for number in value if self.many and isinstance(value, list | tuple) else [value]:
            if isinstance(number, int | float) and not abs(number) <= LARGEST:
                raise SinkscopeError(f"{name}{number!r:.80}: expected a number up to {LARGEST}{then}")


def checks_arguments(function: C, others: Callable[..., Any] | None = None) -> C:
    """Make a function refuse arguments that its annotations exclude, before it does anything.

    The error is a SinkscopeError of one line with the name and the value.

    Args:
        function: The function.
        others: Function that gets the `**settings` of this one, whose parameters are checked as well.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        known = (*(() if others is None else parameters_of(others)), *parameters_of(function))
        arguments = dict(kwargs)
        with suppress(TypeError):  # the call itself raises what Python says of such arguments
            arguments |= inspect.signature(function).bind(*args, **kwargs).arguments
        for name, parameter in {parameter.name: parameter for parameter in known}.items():
            if name in arguments:
                parameter.check(arguments[name], in_python=True)
        return function(*args, **kwargs)

    return cast(C, call)


@cache
def parameters_of(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    """Return the parameters of a function, in order, with their descriptions from the section "Args" of its docstring.

    Args:
        function: Function whose annotations can be evaluated in its module.
    """
    hints = get_type_hints(function, include_extras=True)
    descriptions = descriptions_of(inspect.getdoc(function) or "", "Args")
    parameters: list[Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            hint = hints.get(name, Any)
            kind, many = member_of(hint)
            parameters.append(Parameter(name, kind, parameter.default, descriptions.get(name, ""), many, hint))
    return tuple(parameters)


def member_of(hint: Any) -> tuple[Any, bool]:
    """Return the type of a value without `Annotated` and None, and whether it may hold several values."""
    origin: Any = get_origin(hint)
    parts = tuple(part for part in get_args(hint) if part is not NoneType)
    is_union = origin in (Union, UnionType)
    if origin is Annotated or (is_union and len(parts) == 1):  # a None is only the default
        return member_of(parts[0])
    is_sequence = isinstance(origin, type) and issubclass(cast(Any, origin), Sequence) and parts[1:] in ((), (...,))
    if is_sequence or (is_union and parts[1:] == (Sequence[parts[0]],)):  # or one value, or several
        return member_of(parts[0])[0], True
    return (Union[parts] if is_union else hint), False  # noqa: UP007 - made of a tuple
