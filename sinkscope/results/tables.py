"""Tables of results: columns that fit the width, and the meaning of the columns."""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from textwrap import fill
from typing import Any, Literal, get_args, get_type_hints

from sinkscope.files.docstrings import descriptions_of
from sinkscope.files.plain import plain, visible
from sinkscope.results.notation import percent as percent_of

MOST_ROWS = 64
"""Rows of a table that are shown; a file of it holds all."""
BETWEEN = 2
WIDEST = 10_000
"""Spaces between columns, and the longest line of a table that shows every column."""
Table = list[dict[str, Any]]
"""One dict per row."""
_NUMBER = re.compile(r"[-+]?[\d.,]*\d(e[-+]?\d+)?%?|-|nan|yes|no|")


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        columns: The cells of each column, by its name.
        important: Names of the columns that are shown first; their cells take several lines where they must.
    """

    columns: Mapping[str, Sequence[str]]
    important: Sequence[str] = ()

    def fitting(self, width: int | None) -> dict[str, Sequence[str]]:
        """Return the important columns and others that fit a line; None as the width keeps all."""
        shown: dict[str, Sequence[str]] = {}
        end = -BETWEEN
        for name in dict.fromkeys([*self.important, *self.columns]):
            if name in self.columns:
                end += BETWEEN + _width(name, self.columns[name])
                if width is None or end <= width or name in self.important or not shown:
                    shown[name] = self.columns[name]
        return shown

    def notes(self, rows: int = MOST_ROWS) -> list[str]:
        """Return the line below the table when at most `rows` of its rows are shown."""
        every = max(map(len, self.columns.values()), default=0)
        return [f"{rows} of {every} rows are shown (--csv FILE writes them all)."] if rows < every else []

    def text(self, width: int | None = None, rows: int = MOST_ROWS) -> str:
        """Return the columns that fit, and notes; a head may take several lines, and numbers stand right.

        Args:
            width: Characters of a line. None: every column is shown, and the notes are not broken.
            rows: Rows that are shown at most.
        """
        from rich.console import Console
        from rich.table import Table as RichTable

        shown = Grid(self.fitting(width))
        printed = io.StringIO()
        notes = self.notes(rows)
        table = RichTable(box=None, padding=(0, BETWEEN, 0, 0), pad_edge=False, header_style="")
        for (name, cells), side in zip(shown.columns.items(), shown.sides(), strict=True):
            table.add_column(_words(name), justify=side, overflow="fold", max_width=_width(name, cells))
        for row in shown.rows(rows):
            table.add_row(*row)
        options: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False, "force_jupyter": False}
        Console(file=printed, width=width or WIDEST, **options).print(table)
        left_out = ", ".join(_words(name) for name in self.columns if name not in shown.columns)
        if left_out:
            notes.insert(0, f"Not shown: {left_out} (--csv FILE writes all columns).")
        lines = printed.getvalue().splitlines()
        lines += notes if width is None else [fill(note, width) for note in notes]
        return "\n".join(filter(None, map(str.rstrip, lines)))

    def rows(self, most: int = MOST_ROWS) -> list[tuple[str, ...]]:
        """Return the cells of each row, of at most `most` rows."""
        return list(zip(*self.columns.values(), strict=True))[:most]

    def sides(self) -> list[Literal["left", "right"]]:
        """Return on which side the cells of each column stand: numbers right, words left."""
        return ["right" if all(map(_NUMBER.fullmatch, cells)) else "left" for cells in self.columns.values()]


def _width(name: str, cells: Sequence[str]) -> int:
    """The width of a column: that of its widest cell or word of the head."""
    from rich.cells import cell_len  # some characters take two places

    return max(map(cell_len, [*name.split("_"), *cells]))


def _words(name: str) -> str:
    return name.replace("_", " ")


def cell(value: Any, *, percent: bool = False) -> str:
    """Return a value as text: four digits or per cent, yes or no, a dash for None; outer spaces stand in quotes."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and percent:
        return percent_of(value, 1)
    if isinstance(value, float) and 1e4 <= abs(value) < 1e7:
        return f"{value:.0f}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(cell(item, percent=percent) for item in value)
    text = visible(str(value)).replace("\n", "\\n")
    return text if text == text.strip() else f'"{text}"'


def strings(rows: Sequence[Mapping[str, Any]], percent: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return columns of strings; those that are empty in every row are dropped.

    Args:
        rows: One mapping per row, with the same keys in all.
        percent: Columns shown in per cent.
    """
    shown: dict[str, list[str]] = {}
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows]
        if values.count(None) < len(values):
            shown[name] = [cell(value, percent=name in percent) for value in values]
    return shown


def long_table(arrays: Mapping[str, Any], **axes: Sequence[Any]) -> Table:
    """Return a row for each entry of arrays that have the same axes, with the labels of its place; NaN becomes None.

    Arrays that are None are left out.
    """
    import numpy as np  # slow to load, and few results hold arrays
    import pandas as pd

    places = pd.MultiIndex.from_product([*axes.values()], names=[*axes])
    columns = {name: np.ravel(values) for name, values in arrays.items() if values is not None}
    return plain(pd.DataFrame(columns, index=places).reset_index().to_dict("records"))


def glossary(classes: Sequence[type[Any]], names: Sequence[str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the meaning of columns.

    Args:
        classes: Classes of the rows and of the result. Their docstrings and those of the classes of their fields
            describe the columns; of several that describe one, the first counts.
        names: Names of the columns.
        own: Explanations that take precedence over the docstrings.
    """
    parts: list[Any] = list(classes)
    descriptions = dict(own)
    for part in parts:  # the list grows by what is inside
        inside = [*get_args(part)]
        if isinstance(part, type) and is_dataclass(part):
            inside += get_type_hints(part).values()
            descriptions = descriptions_of(inspect.getdoc(part) or "", "Attributes") | descriptions
        for hint in inside:
            if hint not in parts:
                parts.append(hint)
    meaning: dict[str, str] = {}
    for name in names:
        if name in descriptions:
            sentence = descriptions[name].rstrip(".")
            meaning[_words(name)] = f"{sentence[:1].upper()}{sentence[1:]}."
    return meaning
