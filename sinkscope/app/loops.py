"""`sinkscope loops`: whether the answers in files, or in a stream, repeat themselves. Loads no torch."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.output import open_regular, path_of
from sinkscope.files.plain import in_one_line, visible
from sinkscope.loops import CheckedOutput, LoopCheck, Watch
from sinkscope.loops.text.check import check_of
from sinkscope.results.console import note
from sinkscope.results.notation import count_of

REMEDY = "give another path, or - for standard input"


@checks_arguments
def loops(
    files: Sequence[str] = (),
    *,
    field: str | None = None,
    prompt: str = "",
    follow: bool = False,
    to_files: Mapping[str, str] | None = None,
) -> LoopCheck:
    """Check whether texts or a stream repeat themselves, and since when. Loads no model.

    Each answer loops, looped, is suspicious, is clean, or has no text. The exit status is 3 if one loops or looped, and
    else 1 if one has no text, or cannot be read. Of several files, each in which nothing can be read has a row.

    Args:
        files: Texts, JSON lines with an answer or a chat each, or what a server of OpenAI's form streamed. - is
            standard input.
        field: Where the answers of a line of JSON are, such as response.choices or turns.1. By default in the first of
            tokens, choices, message, response, completion, output, answer, generated_text, text and messages.
        prompt: What was asked; copies that it asks for, such as "ten lines", are no loop. By default what the record
            of an answer says.
        follow: Print each answer as soon as it loops, or is suspicious; of standard input if there is no file.
        to_files: What is written of the result. Beside one that goes to standard output, answers that loop are noted on
            standard error.

    Raises:
        SinkscopeError: Nothing can be read in any file.
    """
    if not files and not follow:
        raise SinkscopeError("give the file to check, or - for standard input")
    watch, started = Watch(prompt=prompt), time.perf_counter()
    tell = note if "-" in (to_files or {}).values() else partial(print, flush=True)
    files = files or ["-"]
    if len(files) == 1:
        _read(watch, files[0], field, tell if follow else None)
        return check_of(watch, _name_of(files[0]), started)
    errors: list[SinkscopeError] = []
    for file in files:
        name, before = _name_of(file), len(watch.checked)
        try:
            _read(watch, file, field, tell if follow else None)
        except SinkscopeError as error:  # of this file alone: the others have verdicts
            errors.append(error)
            watch.checked.append(CheckedOutput(name, "empty"))
            if str(error) not in watch.problems:
                watch.problems.append(str(error))
        for number, output in enumerate(watch.checked[before:], before):
            if output.name != name:  # else the file is one text
                watch.checked[number] = replace(output, name=f"{name} {output.name}")
    if len(errors) == len(files):
        raise errors[0]
    return check_of(watch, count_of(len(files), "file"), started)


def _read(watch: Watch, file: str, field: str | None, tell: Callable[[str], None] | None) -> None:
    """Read a file, and tell of each of its answers that loops."""
    with closing(_opened(file)) as source:
        for output in watch.read(source, _name_of(file), field):
            if tell is not None:
                tell(visible(str(output)))


def _name_of(file: str) -> str:
    """The name of a file, for the result and errors."""
    return "standard input" if file == "-" else in_one_line(Path(file).name)


def _opened(file: str) -> Any:
    """A file, or standard input for "-", to read bytes."""
    if file == "-":
        return getattr(sys.stdin, "buffer", io.BytesIO())  # there is none if it is closed
    return open_regular(path_of(file, REMEDY), file, REMEDY)
