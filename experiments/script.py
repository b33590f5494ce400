"""The command line of a script: what the signature and the docstring of its function say."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Literal, get_args, get_origin

import click

from experiments.record import Row
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import Parameter, parameters_of


def run(main: Callable[..., None], argv: Sequence[str] | None = None) -> None:
    """Call the function of a script with what is on its command line; bad input is one line, and exit code 2.

    Parameters before the `*` of the signature are positional; the others are options. A list takes several values, and
    a flag has the default False. The help of each is in the section "Args" of the docstring.

    Args:
        main: the function.
        argv: the words after the name of the script. By default those of this process.
    """
    command, words = command_of(main, sys.argv[1:] if argv is None else argv)
    try:
        command.main(words, prog_name=f"python -m {command.name}", standalone_mode=False)
    except (SinkscopeError, click.ClickException) as error:
        said = error.format_message() if isinstance(error, click.ClickException) else str(error)
        print(f"error: {said}", file=sys.stderr)
        raise SystemExit(2) from None


def command_of(main: Callable[..., None], argv: Sequence[str]) -> tuple[click.Command, list[str]]:
    """The command of a function, and the words of its command line as click reads them."""
    module = inspect.getmodule(main)
    name = main.__module__
    if name == "__main__" and module is not None and module.__spec__ is not None:
        name = module.__spec__.name
    kinds = inspect.signature(main).parameters
    every = parameters_of(main)
    params = [_param(one, kinds[one.name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD) for one in every]
    about = (inspect.getdoc(module) or "").partition("\n")[0]
    command = click.Command(name, params=params, help=about, callback=lambda **given: _call(main, given))
    lists = [f"--{one.name.replace('_', '-')}" for one in every if one.many]
    return command, _repeated(argv, lists)


def _call(main: Callable[..., None], given: Row) -> None:
    """Call the function; what was not given is left to it, which has the default."""
    main(**{name: value for name, value in given.items() if value not in (None, ())})


def _param(one: Parameter, positional: bool) -> click.Parameter:
    """The argument or the option of a parameter."""
    required = one.default is inspect.Parameter.empty
    settings: Row = {"required": required, "help": one.help, "type": one.type}
    if get_origin(one.type) is Literal:
        settings["type"] = click.Choice(get_args(one.type))
    if positional:
        return click.Argument([one.name], nargs=-1 if one.many else 1, **settings)
    shown = not required and one.default not in (None, False, (), "") and str(one.default)
    flag = f"--{one.name.replace('_', '-')}"
    return click.Option([flag, one.name], is_flag=one.type is bool, multiple=one.many, show_default=shown, **settings)


def _repeated(words: Sequence[str], lists: Sequence[str]) -> list[str]:
    """Write an option before each of its values: `--only a b` is `--only a --only b`."""
    written: list[str] = []
    last = ""
    for word in words:
        if word.startswith("--"):
            last = word
        elif last in lists and written[-1] != last:
            written.append(last)
        written.append(word)
    return written
