"""The commands of measurements of other packages, made of their signatures; the package is imported for them."""

from __future__ import annotations

import inspect
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

from sinkscope.app.commands import COMMANDS
from sinkscope.app.commands.command import Command, measures
from sinkscope.app.commands.options import Several
from sinkscope.errors import SinkscopeError
from sinkscope.files.envelope import KINDS, OWN, other_measurements

if TYPE_CHECKING:
    from sinkscope.files.arguments import Parameter

ELSEWHERE = "Other packages"


def other_commands() -> dict[str, EntryPoint]:
    """Return the measurements of other packages by the words of their commands.

    Raises:
        SinkscopeError: One has the name of a command of sinkscope.
    """
    table: dict[str, EntryPoint] = {}
    for name, point in other_measurements().items():
        words = name.replace("_", "-")
        if words in {*COMMANDS, *KINDS, *OWN}:
            raise SinkscopeError(
                f"{point.module}:{name} is registered under the name of another command, {words}: give the function "
                "another name"
            )
        table[words] = point
    return table


def other_command(words: str, point: EntryPoint) -> Command:
    """Return the command of a measurement of another package."""
    measurement = point.load()
    options = [option_of(parameter) for parameter in measurement.parameters]
    params = [option for option in options if option is not None]
    return measures(words, ELSEWHERE, function=measurement, edits=measurement.edits, params=params)


def option_of(parameter: Parameter) -> click.Option | None:
    """Return the option of a parameter; None if its type is none that is typed."""
    flag = f"--{parameter.name.replace('_', '-')}"
    kind: Any = parameter.type
    if get_origin(kind) is Literal:
        kind = click.Choice(get_args(kind))
    elif kind not in (str, int, float, bool, Path):
        return None
    required = parameter.default is inspect.Parameter.empty
    settings: dict[str, Any] = {"required": required, "type": click.types.convert_type(kind)}
    if parameter.many:
        return Several([flag], **settings)
    if not required:
        settings["default"] = parameter.default
    if parameter.type is bool and parameter.default is not False:
        flag = f"{flag}/--no-{flag[2:]}"
    return click.Option([flag], is_flag=parameter.type is bool, **settings)
