"""The command line of a script: what the signature and the docstring of its function say."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Literal, get_args, get_origin

from experiments.record import Row
from sinkscope.errors import SinkscopeError
from sinkscope.results.options import Parameter, parameters_of


def run(main: Callable[..., None], argv: Sequence[str] | None = None) -> None:
    """Call the function of a script with what is on its command line; bad input is one line, and exit code 2.

    Parameters before the `*` of the signature are positional; the others are options. A list takes several values, and
    a flag has the default False. The help of each is in the section "Args" of the docstring.

    Args:
        main: the function.
        argv: the words after the name of the script. By default those of this process.
    """
    module = inspect.getmodule(main)
    name = main.__module__
    if name == "__main__" and module is not None and module.__spec__ is not None:
        name = module.__spec__.name
    about = (inspect.getdoc(module) or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=about)
    kinds = inspect.signature(main).parameters
    for one in parameters_of(main):
        positional = kinds[one.name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        parser.add_argument(*_names(one, positional), **_settings(one, positional))
    words = parser.parse_args(argv)
    try:
        main(**vars(words))
    except SinkscopeError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _names(one: Parameter, positional: bool) -> list[str]:
    if positional:
        return [one.name]
    return [f"--{one.name.replace('_', '-')}"]


def _settings(one: Parameter, positional: bool) -> Row:
    """How argparse reads a parameter. What is not given is left to the function, which has the default."""
    settings: Row = {"help": one.help_with_default.replace("%", "%%"), "default": argparse.SUPPRESS}
    if not positional:
        settings["required"] = one.required
        settings["dest"] = one.name
    if one.type is bool:
        return {**settings, "action": "store_true"}
    if get_origin(one.type) is Literal:
        settings["choices"] = get_args(one.type)
        settings["type"] = type(settings["choices"][0])
    else:
        settings["type"] = one.type
    if one.many:
        settings["action"] = "extend"
        settings["nargs"] = "+" if one.required or not positional else "*"
    elif positional and not one.required:
        settings["nargs"] = "?"
    return settings
