"""Rows of a result: as aligned plain text, and on a terminal as a table if it is wide enough for their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def aligned(head: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of plain text, columns to the right."""
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    return ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in (head, *cells)]


class Grid:
    """A rich renderable: a table, or where it would cut numbers short, plain text that the terminal breaks."""

    def __init__(self, head: Sequence[str], cells: Sequence[Sequence[str]], title: str = "", note: str = "") -> None:
        self.head, self.cells, self.title, self.note = head, cells, title, note

    def __rich_console__(self, console: Any, options: Any) -> Any:
        """What rich draws."""
        from rich.table import Table
        from rich.text import Text

        widths = _widths(self.head, self.cells, options.max_width)
        if widths is None:
            around = [[self.title], aligned(self.head, self.cells), [self.note]]
            yield Text("\n".join(line for part in around for line in part if line))
            return
        table = Table(
            header_style="bold",
            title=Text(self.title) if self.title else None,
            title_justify="left",
            caption=Text(self.note) if self.note else None,
            caption_justify="left",
        )
        for name, width in zip(self.head, widths, strict=True):
            table.add_column(Text(name), justify="right", overflow="fold", width=width)
        for line in self.cells:
            table.add_row(*map(Text, line))
        yield table


def _widths(head: Sequence[str], cells: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Of columns that fit into `room` characters: lines break between words, then inside those of the head.

    None: they do not fit unless a word of the cells is broken. Rich itself would cut that.
    """
    from rich.cells import cell_len  # some signs take two places

    columns = [[name, *column] for name, column in zip(head, zip(*cells, strict=True), strict=True)]
    widths = [max(map(cell_len, column)) for column in columns]
    least = [max((cell_len(word) for text in column[1:] for word in text.split()), default=1) for column in columns]
    whole = [max((cell_len(word) for text in column for word in text.split()), default=1) for column in columns]
    excess = sum(widths) + 3 * len(widths) + 1 - room
    for floor in (whole, least):
        while excess > 0 and widths != floor:
            widest = max(range(len(widths)), key=lambda i: widths[i] - floor[i])
            widths[widest] -= 1
            excess -= 1
    return None if excess > 0 else widths
