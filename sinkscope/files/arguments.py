"""Arguments of functions: what a signature and a docstring say of each, and refusals in one line.

`docstring_at` reads a docstring from the source of sinkscope, so that a help need not import what it describes.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from sinkscope.errors import SinkscopeError

C = TypeVar("C", bound=Callable[..., Any])
PYTHON_ONLY = frozenset({"tokenizer", "texts", "ids", "progress", "loading", "interventions", "to_files"})
"""Parameters that no command has as an option."""
NO_SETTINGS = PYTHON_ONLY | {"out"}
"""Parameters that are no settings of a result: these, and where a measurement writes a file."""
LARGEST = (1 << 31) - 1
"""A number above it is too large for any work."""
_TITLE = re.compile(r"\n\n(Args|Attributes|Example|Example in Python|Raises|Returns):\n")
_PACKAGE = Path(__file__).parents[1]


# --- docstrings ---


@cache
def docstring_at(place: str) -> str:
    """Return the docstring of a function of sinkscope, without importing it.

    Args:
        place: Its module within sinkscope and its name, such as "sinks.repeat:repeat" or "measure.setup:Setup.open".
    """
    module, _, name = place.partition(":")
    path = _PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    definition: Any = ast.parse(path.read_text(encoding="utf-8"))
    for word in name.split("."):
        definition = next(node for node in definition.body if getattr(node, "name", None) == word)
    return ast.get_docstring(definition) or ""


def descriptions_of(doc: str, title: str) -> dict[str, str]:
    """Return the description of each name in a section of a docstring, such as "Args" or "Attributes"."""
    parts = _TITLE.split(doc)
    section = dict(zip(parts[1::2], parts[2::2], strict=True)).get(title, "")
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def introduction(doc: str) -> str:
    """Return a docstring without its sections."""
    return _TITLE.split(doc)[0]


# --- parameters ---


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

    @property
    def names_file(self) -> bool:
        """Whether a value may be the name of a file or folder, as its annotation says: it takes a path."""
        return _takes_path(self.hint)

    def check(self, value: Any) -> None:
        """Refuse a value that the annotation excludes, and a number that is too large for any work.

        Nothing is converted, except a whole number to a float. The default is accepted.

        Raises:
            SinkscopeError: The value is of another type or word, too small, too large, or not a number.
        """
        from sinkscope.files.records import checked_value  # loads pydantic, for which no help need wait

        if value is self.default or self.hint is Any:
            return
        checked_value(self.hint, value, self.name, strict=True)
        if isinstance(value, int | float) and not abs(value) <= LARGEST:
            raise SinkscopeError(f"{self.name}={value!r:.80}: expected a number up to {LARGEST}")


def _takes_path(hint: Any) -> bool:
    """Whether an annotation names a class of paths, alone or among others."""
    if hint is Path or get_origin(hint) is os.PathLike:
        return True
    return any(_takes_path(part) for part in get_args(hint))


def checks_arguments(function: C, settings_of: Callable[..., Any] | None = None) -> C:
    """Make a function refuse arguments that its annotations exclude, before it does anything.

    The error is a SinkscopeError of one line with the name and the value.

    Args:
        function: The function.
        settings_of: Function that gets the `**settings` of this one, whose parameters are checked as well.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        by_name = kwargs | inspect.signature(function).bind(*args, **kwargs).arguments
        for taker in (function, settings_of or function):
            for parameter in parameters_of(taker):
                if parameter.name in by_name:
                    parameter.check(by_name[parameter.name])
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
    parts = [part for part in get_args(hint) if part not in (NoneType, ...)]
    if origin is Annotated:
        return member_of(parts[0])
    if origin in (Union, UnionType):
        members = [member_of(part) for part in parts]
        kinds = {kind for kind, _ in members}
        return kinds.pop() if len(kinds) == 1 else hint, any(many for _, many in members)
    if origin in (list, tuple, Sequence) and len(parts) == 1:
        return member_of(parts[0])[0], True
    return hint, False
