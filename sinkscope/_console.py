"""What the commands print: results on stdout, progress and notes on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from sinkscope.output import write_atomic
from sinkscope.progress import ProgressBar as Progress

__all__ = ["Progress", "emit", "note", "print_models", "print_result"]


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


def print_models(entries: Sequence[Any]) -> None:
    """Name, hub id, published sink location and its source."""
    rows = [(e.name, e.hub_id, *_published(e.published)) for e in entries]
    head = ("name", "hub id", "published sink", "source")
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


def _published(sink: Any) -> tuple[str, str]:
    if sink is None:
        return "-", "-"
    parts = [f"layer {', '.join(map(str, sink.layers))}"] if sink.layers else []
    if sink.neurons:
        parts.append("neurons " + ", ".join(f"{layer}:{neuron}" for layer, neuron in sink.neurons))
    if sink.residual_dims:
        parts.append("dims " + ", ".join(map(str, sink.residual_dims)))
    return "; ".join(parts) or "-", sink.source
