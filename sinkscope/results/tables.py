"""Tables of results: cells as text, and columns that fit the width."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sinkscope.files.plain import plain, visible
from sinkscope.results.notation import percent as percent_of

MOST_ROWS = 64
"""Rows of a table that are shown; a file of it holds all."""
WIDEST = 10_000
"""The longest line of a table that shows every column."""
Table = list[dict[str, Any]]
"""One dict per row."""
_NUMBER = re.compile(r"[-+]?[\d.,]*\d(e[-+]?\d+)?%?( \(± [\d.,%]+\))?|-|nan|yes|no|")


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        columns: The cells of each column, by its name.
        important: Names of the columns that a terminal shows; empty: all.
    """

    columns: Mapping[str, Sequence[str]]
    important: Sequence[str] = ()

    def text(self, width: int | None = None, most: int = MOST_ROWS) -> str:
        """Return the important columns, or all if there are none such, and what is left out; numbers stand right.

        Args:
            width: Characters of a line; cells that do not fit take several lines. None: every column is shown.
            most: Rows that are shown at most.
        """
        from rich.console import Console
        from rich.table import Table as RichTable

        names = [name for name in self.important if name in self.columns and width is not None] or [*self.columns]
        shown = Grid({name: self.columns[name] for name in names})
        table = RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
        for name, side in zip(names, shown.sides(), strict=True):
            table.add_column(name.replace("_", " "), justify=side, overflow="fold")
        for row in shown.rows(most):
            table.add_row(*row)
        printed = io.StringIO()
        plain_text: Any = {"markup": False, "highlight": False, "emoji": False, "force_jupyter": False}
        Console(file=printed, width=width or WIDEST, **plain_text).print(table)
        lines = [*printed.getvalue().splitlines(), self.note(most, len(names))]
        return "\n".join(filter(None, map(str.rstrip, lines)))

    def note(self, most: int = MOST_ROWS, columns: int | None = None) -> str:
        """Return the line below the table when not all rows and columns are shown."""
        every = max(map(len, self.columns.values()), default=0)
        shown = columns or len(self.columns)
        if most >= every and shown == len(self.columns):
            return ""
        return f"{min(most, every)} of {every} rows, {shown} of {len(self.columns)} columns (--csv FILE has all)."

    def rows(self, most: int = MOST_ROWS) -> list[tuple[str, ...]]:
        """Return the cells of each row, of at most so many rows."""
        return list(zip(*self.columns.values(), strict=True))[:most]

    def sides(self) -> list[Literal["left", "right"]]:
        """Return on which side the cells of each column stand: numbers right, words left."""
        return ["right" if all(map(_NUMBER.fullmatch, cells)) else "left" for cells in self.columns.values()]


def cell(value: Any, *, percent: bool = False) -> str:
    """Return a value as text: four digits or per cent, yes or no, a dash for None; outer spaces stand in quotes."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if percent:
            return percent_of(value, 1)
        return f"{value:.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(cell(item, percent=percent) for item in value)
    text = visible(str(value)).replace("\n", "\\n")
    return text if text == text.strip() else f'"{text}"'


def strings(rows: Sequence[Mapping[str, Any]], percent: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return columns of strings; those that are empty in every row are dropped.

    Args:
        rows: One mapping per row; a key that it lacks is None.
        percent: Columns shown in per cent.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    shown = [name for name in names if any(row.get(name) not in (None, "") for row in rows)]
    return {name: [cell(row.get(name), percent=name in percent) for row in rows] for name in shown}


def long_table(arrays: Mapping[str, Any], **axes: Sequence[Any]) -> Table:
    """Return a row for each entry of arrays that have the same axes, with the labels of its place; NaN becomes None.

    Arrays that are None are left out.
    """
    import numpy as np  # slow to load, and few results hold arrays
    import pandas as pd

    places = pd.MultiIndex.from_product([*axes.values()], names=[*axes])
    columns = {name: np.ravel(values) for name, values in arrays.items() if values is not None}
    return plain(pd.DataFrame(columns, index=places).reset_index().to_dict("records"))
