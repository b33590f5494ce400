"""Write what the command line and `Result.load` know before a module is imported.

    python -m tools.commands

It imports every module, and writes commands, their options and kinds of results to `sinkscope/app/commands.json`, and a
line for each measurement to `sinkscope/__init__.pyi`.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import sinkscope
from sinkscope.app.command_run import outline_of
from sinkscope.files.catalog import COMMANDS_FILE, Command
from sinkscope.files.envelope import Envelope

STUB = Path(sinkscope.__path__[0]) / "__init__.pyi"
GROUPS = ("Sinks", "Repetition", "Loops", "Dialogues", "Benchmark", "Look")
"""Headings of the help, in their order; others come after them."""
ORDER = (
    *("find-sinks", "circuit", "heads", "patch make", "patch eval", "precision"),
    *("repeat", "attack", "loops", "barcode", "why", "lines", "bench", "bench table", "check-cache"),
    *("scan", "demo", "scan table", "view", "models", "generate", "report"),
)
"""The commands of each heading, in their order; others come after them."""


def written() -> str:
    """The content of the file."""
    for module in walk_packages(sinkscope.__path__, "sinkscope."):
        with suppress(ImportError):  # it needs a library that is not there, and holds no command
            import_module(module.name)
    rows: list[dict[str, Any]] = []
    for module in [name for name in sys.modules if name.startswith("sinkscope.")]:
        for name, value in vars(sys.modules[module]).items():
            command = getattr(value, "command", None)
            if isinstance(command, Command) and command.target == f"{module}:{name}":
                rows.append({**vars(command), "outline": outline_of(value)})
    rows.sort(key=_place)
    return json.dumps({"commands": rows, "kinds": dict(sorted(_kinds(Envelope)))}, indent=1) + "\n"


def _place(row: dict[str, Any]) -> tuple[int, int, str]:
    """The place of a command in the help."""
    group, words = row["group"], row["words"]
    return [*GROUPS, group].index(group), [*ORDER, words].index(words), words


def _kinds(base: type[Envelope]) -> list[tuple[str, str]]:
    """The kinds of results of the classes below one, each with its module."""
    kinds: list[tuple[str, str]] = []
    for cls in base.__subclasses__():
        if "kind" in vars(cls) and cls.__module__.startswith("sinkscope."):
            kinds.append((cls.kind, cls.__module__))
        kinds += _kinds(cls)
    return kinds


def stub(table: str) -> str:
    """The public names for type checkers, with the measurements of a table of commands."""
    head, *blocks = STUB.read_text(encoding="utf-8").split("\n\n")
    lines = set(blocks[0].splitlines())
    for row in json.loads(table)["commands"]:
        if row["measures"]:
            module, _, name = row["target"].removeprefix("sinkscope").partition(":")
            lines.add(f"from {module} import {name} as {name}")
    imports = sorted(lines, key=lambda line: line.split()[1:4])
    return "\n\n".join([head, "\n".join(imports), *blocks[1:]])


if __name__ == "__main__":
    table = written()
    COMMANDS_FILE.write_text(table, encoding="utf-8")
    STUB.write_text(stub(table), encoding="utf-8")
