"""The table of commands, made of what `@measurement` and `@command` mark; a command is imported when it is typed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.files.catalog import PACKAGE, MarkedFunction, marked

GROUPS = ("Sinks", "Repetition", "Loops", "Dialogues", "Benchmark", "Look")
"""Headings of the help in their order; others follow."""
ELSEWHERE = "Other packages"
_LAST = 1000  # place of a command that states none


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        words: What is typed, such as "find-sinks" or "patch make".
        target: Its function, as "module:function".
        group: Heading under which the help lists it.
        help: One line.
        measures: Whether it is a measurement, which `sinkscope` has as a public name.
    """

    words: str
    target: str
    group: str
    help: str
    measures: bool

    @property
    def module(self) -> str:
        """Module of its function."""
        return self.target.partition(":")[0]

    @property
    def name(self) -> str:
        """Name of its function."""
        return self.target.partition(":")[2]

    def load(self) -> Any:
        """Its function; this imports its module."""
        return resolve_name(self.target)


@cache
def commands() -> dict[str, Command]:
    """Every command by its words: those of sinkscope by their groups, then those of other packages.

    Raises:
        SinkscopeError: A function has words or a name that are taken.
    """
    functions = [(one, True) for one in marked("measurement")] + [(one, False) for one in marked("command")]
    functions.sort(key=lambda pair: _place(pair[0]))
    table: dict[str, Command] = {}
    for one, measures in functions:
        if one.words in table or (measures and any(one.name == other.name for other in table.values())):
            raise SinkscopeError(
                f"{one.target} is registered under the name of another command, {one.words}: give the function another "
                "name"
            )
        group = one.settings.get("group") or ELSEWHERE
        line = one.settings.get("help") or f"See sinkscope {one.words} --help."
        table[one.words] = Command(one.words, one.target, group, line, measures)
    return table


def _place(one: MarkedFunction) -> tuple[int, int, str]:
    """Where a command stands in the help: after those of its group with a smaller `order`."""
    group = one.settings.get("group")
    place = GROUPS.index(group) if group in GROUPS else len(GROUPS)
    if not one.module.startswith(f"{PACKAGE}."):
        place += 1
    return place, one.settings.get("order") or _LAST, one.words
