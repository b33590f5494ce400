"""The command line of a script: what the signature and the docstring of its function say."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, get_args

from experiments.record import Row
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import parameters_of


def run(main: Callable[..., None], argv: Sequence[str] | None = None) -> None:
    """Call the function of a script with what is on its command line; bad input is one line, and exit code 2.

    Parameters before the `*` of the signature are positional; the others are options. A list takes several values, and
    a flag has the default False. The help of each is in the section "Args" of the docstring.

    Args:
        main: the function.
        argv: the words after the name of the script. By default those of this process.
    """
    try:
        main(**arguments_of(main, sys.argv[1:] if argv is None else argv))
    except SinkscopeError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


class Parser(argparse.ArgumentParser):
    """A parser whose errors are those of the package."""

    def error(self, message: str) -> NoReturn:
        """Raise the error."""
        raise SinkscopeError(message)


def arguments_of(main: Callable[..., None], argv: Sequence[str]) -> Row:
    """Read the arguments of a function; those that are not given are left to it, which has the default."""
    module = inspect.getmodule(main)
    parser = Parser(description=(inspect.getdoc(module) or "").partition("\n")[0], allow_abbrev=False)
    for one in parameters_of(main):
        required = one.default is inspect.Parameter.empty
        settings: Row = {"help": one.help.replace("%", "%%"), "default": argparse.SUPPRESS}
        if one.type is bool:
            settings["action"] = "store_true"
        elif words := get_args(one.type):  # of a Literal
            settings["choices"] = words
        else:
            settings["type"] = one.type
        if one.many:
            settings |= {"action": "extend", "nargs": "+" if required else "*"}
        if inspect.signature(main).parameters[one.name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            parser.add_argument(one.name, **({"nargs": None if required else "?"} | settings))
        else:
            parser.add_argument(f"--{one.name.replace('_', '-')}", required=required, **settings)
    return vars(parser.parse_args(argv))
