"""Pieces of texts of four kinds: prose, code, tables and dialogue.

The defaults of LoopServe were chosen on other texts: the manual's first part, the module `tarfile`, LongEval's prompts
0 to 3, 6, 7, 10 and 11.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path

from torch import Tensor

from experiments.record import read_rows
from sinkscope.errors import SinkscopeError
from sinkscope.models.target import Target

CHARACTERS = 10  # of a token at most, on average
CHOSE_PROSE = 70_000  # characters of the manual that the default was chosen on
CHOSE_TALKS = (0, 1, 2, 3, 6, 7, 10, 11)


def prose(_: Sequence[Path]) -> str:
    """Python's manual."""
    import pydoc_data.topics

    return "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))[CHOSE_PROSE:]


def code(_: Sequence[Path]) -> str:
    """Modules of Python's library."""
    import argparse
    import inspect
    import subprocess
    import typing

    modules = argparse, typing, inspect, subprocess
    return "\n".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in modules)


def tables(_: Sequence[Path]) -> str:
    """Letters with their names and kinds, as CSV."""
    import unicodedata

    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(("name", "category", "number", "bidirectional", "width"))
    for number in (*range(0xC0, 0x250), *range(0x391, 0x700), *range(0x900, 0x1200)):
        letter = chr(number)
        name = unicodedata.name(letter, "none").title()
        kind, side = unicodedata.category(letter), unicodedata.bidirectional(letter)
        writer.writerow((name, kind, number, side, unicodedata.east_asian_width(letter)))
    return file.getvalue()


def dialogue(files: Sequence[Path]) -> str:
    """Turns of users (JSON lines with "turns"), with answers of other files between, and recorded prompts."""
    rows = [row for file in files for row in read_rows(file)]
    answers = {row["question_id"]: row["choices"][0]["turns"] for row in rows if "choices" in row}
    said: list[str] = []
    for row in rows:
        own = answers.get(row.get("question_id"), repeat(None))
        for turn, answer in zip(row.get("turns", ()), own, strict=False):
            said.append(f"User: {turn}")
            if answer is not None:
                said.append(f"Assistant: {answer}")
    recorded = [row["prompt"] for row in rows if "prompt" in row]
    said += [prompt for number, prompt in enumerate(recorded) if number not in CHOSE_TALKS]
    return "\n\n".join(said)


TEXTS = {"prose": prose, "code": code, "tables": tables, "dialogue": dialogue}


def piece(target: Target, kind: str, files: Sequence[Path], length: int, number: int) -> Tensor:
    """A piece of a kind of text, `[1 pos]`; dialogue is read from files."""
    enough = TEXTS[kind](files)[: CHARACTERS * (number + 1) * length]
    ids = target.tokenizer(enough, return_tensors="pt", verbose=False).input_ids
    ids = ids[:, number * length : (number + 1) * length]
    if ids.shape[1] < length:
        raise SinkscopeError(f"the {kind} has no {(number + 1) * length} tokens")
    return ids
