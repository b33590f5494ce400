"""What a docstring says: of the function as a whole, and of each name in one of its sections.

`docstring_at` reads a docstring from the source of sinkscope, so that a help need not import what it describes.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

_TITLE = re.compile(r"\n\n(Args|Attributes|Example|Example in Python|Raises|Returns):\n")
_PACKAGE = Path(__file__).parents[1]


@cache
def docstring_at(place: str) -> str:
    """Return the docstring of a function of sinkscope, without importing it.

    Args:
        place: Its module within sinkscope and its name, such as "sinks.repeat:repeat" or "measure.setup:Setup.open".
    """
    module, _, name = place.partition(":")
    path = _PACKAGE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
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
