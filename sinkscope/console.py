"""What the commands print: results on stdout, progress and notes on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from sinkscope.output import write_atomic
from sinkscope.progress import ProgressBar as Progress

__all__ = ["Progress", "emit", "note", "print_result", "print_rows"]


def note(message: str) -> None:
    """A line for the reader, not for the next program."""
    print(message, file=sys.stderr)


def emit(path: str, text: str) -> None:
    """`text` to a file, or to standard output for `-`."""
    if path == "-":
        sys.stdout.write(text)
    else:
        write_atomic(path, text)


def print_result(result: Any) -> None:
    """A rich table on a terminal, plain aligned text anywhere else."""
    if not sys.stdout.isatty():
        print(result.text())
        return
    from rich.console import Console

    Console().print(result.table())


def print_rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows of words: a rich table on a terminal, plain aligned text anywhere else."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*head, header_style="bold")
        for row in rows:
            table.add_row(*map(Text, row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
