"""The commands and the kinds of results, as data: nothing is imported before it is used.

`python -m tools.commands` writes the data from what `@measurement`, `@command` and the classes of results state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from sinkscope.errors import SinkscopeError

MEASUREMENTS = "sinkscope.measurements"
"""Group of entry points by which other packages add measurements."""
COMMANDS_FILE = Path(__file__).parents[1] / "app" / "commands.json"
ELSEWHERE = "Other packages"


@dataclass(frozen=True)
class Command:
    """A line of the table of commands.

    Attributes:
        words: What is typed, such as "find-sinks" or "patch make".
        target: Its function, as "module:function".
        group: Heading under which the help lists it.
        help: One line.
        measures: Whether it is a measurement, which `sinkscope` has as a public name.
        outline: What the command line knows of its function before it is imported, as `tools.commands` writes
            it. None: the function belongs to another package and is imported for its help.
    """

    words: str
    target: str
    group: str
    help: str
    measures: bool
    outline: Mapping[str, Any] | None = field(default=None, hash=False, repr=False)

    @property
    def module(self) -> str:
        """Module of its function."""
        return self.target.partition(":")[0]

    @property
    def name(self) -> str:
        """Name of its function."""
        return self.target.partition(":")[2]

    def load(self) -> Any:
        """Return its function; this imports its module."""
        return resolve_name(self.target)


@cache
def _written() -> dict[str, Any]:
    """What the tool wrote."""
    return json.loads(COMMANDS_FILE.read_text(encoding="utf-8"))


@cache
def commands() -> dict[str, Command]:
    """Return every command by its words: those of sinkscope by their groups, then those of other packages.

    Raises:
        SinkscopeError: A function of another package has words or a name that are taken.
    """
    table = {row["words"]: Command(**row) for row in _written()["commands"]}
    for point in sorted(entry_points(group=MEASUREMENTS)):
        target = point.value.replace(" ", "")
        name = target.partition(":")[2]
        words = name.replace("_", "-")
        if words in table or any(name == one.name for one in table.values() if one.measures):
            raise SinkscopeError(
                f"{target} is registered under the name of another command, {words}: give the function another name"
            )
        table[words] = Command(words, target, ELSEWHERE, f"See sinkscope {words} --help.", True)
    return table


@cache
def kind_modules() -> dict[str, str]:
    """Return each kind of result that can be read, with the module that defines it."""
    kinds: dict[str, str] = {}
    for one in commands().values():
        if one.outline is None:
            kinds[one.words] = one.module
    return kinds | _written()["kinds"]
