"""Options of commands: what signatures and docstrings say about the parameters of a function."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from sinkscope.errors import SinkscopeError
from sinkscope.files.catalog import Command
from sinkscope.files.records import checked_value


@dataclass(frozen=True)
class Option:
    """How a parameter appears on the command line, if its name and type do not determine it; used in `Annotated`.

    Attributes:
        name: Name of the option, such as "--prompt-file". None: the parameter's name, in the singular if the option may
            be repeated.
        metavar: Placeholder for its value in the help.
        reads: How the value is parsed: "text" reads a file or standard input, "commas" splits at commas.
        argument: Whether it is a positional argument.
        hidden: Whether only Python callers can give it.
        required: Whether the command line requires it although it has a default in Python.
        writes: Whether it names a file or folder for writing.
    """

    name: str | None = None
    metavar: str | None = None
    reads: Literal["text", "commas"] | None = None
    argument: bool = False
    hidden: bool = False
    required: bool = False
    writes: bool = False


Hidden = Annotated[Any, Option(hidden=True)]
"""Anything; only callers from Python can give it."""


C = TypeVar("C", bound=Callable[..., Any])


def command(*, words: str, group: str, help: str, options_of: Callable[..., Any] | None = None) -> Callable[[C], C]:
    """Make a function a command that is no measurement; its arguments are checked as `checks_arguments` does.

    `python -m tools.commands` writes it into the table of commands.

    Args:
        words: As for `Command`, and so are `group` and `help`.
        options_of: Function whose options the command has as well; they arrive in its `**settings`.
    """

    def wrap(function: C) -> C:
        every = {one.name: one for one in parameters_of(function)}
        if options_of is not None:
            every = {one.name: one for one in parameters_of(options_of)} | every
        made: Any = checks_arguments(function, every)
        target = f"{function.__module__}:{function.__name__}"
        made.command = Command(words, target, group, help, measures=False)
        made.all_parameters = tuple(every.values())
        return made

    return wrap


def checks_arguments(function: C, parameters: Mapping[str, Parameter] | None = None) -> C:
    """Make a function refuse arguments that its annotations exclude, before it does anything.

    The error is a SinkscopeError of one line with the name and the value.

    Args:
        function: The function.
        parameters: What it takes, by name. None: as its signature says.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(kwargs)
        if parameters is not None:
            refuse_unknown(function.__name__, given, parameters)
        with suppress(TypeError):  # the call itself raises what Python says of such arguments
            given |= inspect.signature(function).bind(*args, **kwargs).arguments
        for one in parameters_of(function) if parameters is None else parameters.values():
            if one.name in given:
                one.check(given[one.name], in_python=True)
        return function(*args, **kwargs)

    return cast(C, call)


def refuse_unknown(name: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse arguments that a function does not take, as Python does, with what was probably meant.

    Raises:
        TypeError: There is one.
    """
    for one in given:
        if one not in known:
            near = get_close_matches(one, known, 1)
            said = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
            raise TypeError(f"{name}() got an unexpected keyword argument {one!r}; {said}")


_TITLE = re.compile(r"\n\n(Args|Attributes|Example|Example in Python|Raises|Returns):\n")
LARGEST = (1 << 31) - 1
"""A number above it is too large for any work."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function, as its signature and its docstring describe it.

    Attributes:
        name: Name in Python.
        type: Its annotation without `Annotated` and without None.
        option: How it appears on the command line.
        default: Its default; `inspect.Parameter.empty` if it has none.
        help: Its description, from the docstring.
        many: Whether it takes several values.
        hint: The whole annotation.
    """

    name: str
    type: Any
    option: Option
    default: Any
    help: str
    many: bool
    hint: Any = Any

    @property
    def required(self) -> bool:
        """Whether the command line requires it."""
        return self.option.required or self.default is inspect.Parameter.empty

    @property
    def flag(self) -> str:
        """The option's name on the command line."""
        if self.option.name is not None:
            return self.option.name
        stem = self.name
        if self.many:
            stem = stem.removesuffix("s")
        return "--" + stem.replace("_", "-")

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
        name, then = f"{self.flag} ", f" ({self.name}=... in Python)"
        if in_python or self.option.hidden:
            name, then = f"{self.name}=", ""
        checked_value(self.hint, value, name, strict=True, then=then)
        for number in value if self.many and isinstance(value, list | tuple) else [value]:
            if isinstance(number, int | float) and not abs(number) <= LARGEST:
                raise SinkscopeError(f"{name}{number!r:.80}: expected a number up to {LARGEST}{then}")


@cache
def parameters_of(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    """Return the parameters of a function, in order, with their descriptions from the section "Args" of its docstring.

    Args:
        function: Function whose annotations can be evaluated in its module.
    """
    hints = get_type_hints(function, include_extras=True)
    descriptions = descriptions_of(inspect.getdoc(function) or "", "Args")
    parameters: list[Parameter] = []
    for name, one in inspect.signature(function).parameters.items():
        if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            text = descriptions.get(name, "")
            if isinstance(one.default, int | float | str) and one.default and one.default is not True:
                text += f" Default: {one.default}."
            parameters.append(parameter(name, hints.get(name, Any), one.default, help=text))
    return tuple(parameters)


def parameter(name: str, hint: Any, default: Any, *, help: str = "") -> Parameter:
    """Build a parameter from its annotation.

    Args:
        name: Name in Python.
        hint: Its annotation, evaluated.
        default: Its default; `inspect.Parameter.empty` if it has none.
        help: Its description.
    """
    option, whole = Option(), hint
    many = False
    while True:
        origin, parts = get_origin(hint), get_args(hint)
        if origin is Annotated:
            for part in parts[1:]:
                if isinstance(part, Option):
                    option = part
            hint = parts[0]
        elif type(None) in parts:  # a union with None: the None is only the default
            others = tuple(part for part in parts if part is not type(None))
            hint = Union[others]  # noqa: UP007 - made of a tuple
        elif isinstance(origin, type) and issubclass(origin, Sequence) and parts[1:] in ((), (...,)) and not many:
            many = True
            hint = parts[0]
        elif len(parts) == 2 and parts[1] == Sequence[parts[0]]:  # one value, or several
            hint = parts[1]
        else:
            return Parameter(name, hint, option, default, help, many, whole)


def section(doc: str, title: str) -> str:
    """Return a section of a docstring, such as "Args" or "Example"; empty if there is none."""
    parts = _TITLE.split(doc)
    return dict(zip(parts[1::2], parts[2::2], strict=True)).get(title, "")


def descriptions_of(doc: str, title: str) -> dict[str, str]:
    """Return the description of each name in a section of a docstring, such as "Args" or "Attributes"."""
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section(doc, title), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def introduction(doc: str) -> str:
    """Return a docstring without its sections, as the help of a command."""
    return _TITLE.split(doc)[0]


def example_lines(doc: str) -> list[str]:
    """Return the lines of the section "Example" of a docstring: commands to type."""
    return re.findall(r"^    (.+)", section(doc, "Example"), re.MULTILINE)
