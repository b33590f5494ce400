"""Texts of four kinds, from what ships with Python: nothing is downloaded, and nothing of the package is used."""

from __future__ import annotations

import inspect
import mimetypes
import pydoc_data.topics
import statistics
import textwrap
import unicodedata
from functools import cache


@cache
def prose() -> str:
    """Whole sentences: how Python runs a program."""
    return " ".join(pydoc_data.topics.topics["execmodel"].split())


@cache
def dialogue() -> str:
    """Questions and answers: what each function of the statistics module does."""
    turns: list[str] = []
    for name in statistics.__all__:
        answer = inspect.getdoc(getattr(statistics, name)) or ""
        turns.append(f"User: What does {name} do?\nAssistant: {answer.partition('>>>')[0].strip()}\n")
    return "\n".join(turns)


@cache
def code() -> str:
    """A program: the textwrap module."""
    return inspect.getsource(textwrap)


@cache
def table() -> str:
    """Rows of values: file types by suffix, and characters by number."""
    rows = ["suffix,type"]
    for suffix, kind in sorted(mimetypes.types_map.items()):
        rows.append(f"{suffix},{kind}")
    rows.append("number,character,category,name")
    for number in range(0xA1, 0x180):
        letter = chr(number)
        rows.append(f"{number},{letter},{unicodedata.category(letter)},{unicodedata.name(letter, '')}")
    return "\n".join(rows)


KINDS = {"prose": prose, "dialogue": dialogue, "code": code, "table": table}
