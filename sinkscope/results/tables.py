"""Tables of results: columns that fit the width, and the meaning of the columns."""

from __future__ import annotations

import html
import inspect
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from itertools import product
from textwrap import fill, wrap
from typing import Any, get_args, get_type_hints

from sinkscope.files.plain import plain, visible
from sinkscope.results.notation import head_name, neuron_name
from sinkscope.results.options import descriptions_of

WIDTH = 80
"""Characters of a line where there is no terminal."""
SCREEN = 23
"""Lines of a terminal of 24 lines beside the next prompt."""
ROUNDING = 1e-6
"""Below it a number in a table is what float32 leaves of zero."""
BETWEEN, WIDEST = 2, 10_000
"""Spaces between columns, and the longest line of a table that shows every column."""
PLAIN = frozenset(
    "layer layers head neuron expert position token tokens text model name method seed step prompt kind id task set "
    "revision group component patched source dialogues questions prompts runs texts temperature norm file".split()
)
"""Names of columns that need no explanation."""
Table = list[dict[str, Any]]
"""One dict per row."""
_NUMBER = re.compile(r"[-+]?[\d.,]*\d(e[-+]?\d+)?%?|-|nan|yes|no|about 0|")


@dataclass(frozen=True)
class Grid:
    """A table as plain text and as HTML.

    Attributes:
        columns: The cells of each column, by its name.
        title: Title above the table.
        note: Note below the table.
        important: Names of the columns that are shown if not all fit; their cells take several lines where they must.
            Empty: the first columns that fit.
        total: Number of rows of the whole table, if it has more than these.
    """

    columns: Mapping[str, Sequence[str]]
    title: str = ""
    note: str = ""
    important: Sequence[str] = ()
    total: int = 0

    def narrow(self, width: int | None) -> Grid:
        """The table with the columns that fit into a width, and a note that names the others; None: every column."""
        important = [name for name in self.important if name in self.columns]
        ends, end = dict[str, int](), -BETWEEN
        for name in dict.fromkeys([*important, *self.columns]):
            end += BETWEEN + _width(name, self.columns[name])
            ends[name] = end
        shown = list(ends)
        if width is not None and end > width:
            shown = important or [name for name in ends if ends[name] <= width] or shown[:1]
        note = self.note
        left_out = [_words(name) for name in ends if name not in shown]
        if left_out:
            note += f"\nNot shown: {', '.join(left_out)} (--csv FILE writes all columns)."
        return replace(self, columns={name: self.columns[name] for name in shown}, note=note.strip())

    def notes(self, rows: int | None = None) -> list[str]:
        """The lines below the table, of which so many rows are shown; None: all that it has."""
        every = max(map(len, self.columns.values()), default=0)
        count = every if rows is None else min(rows, every)
        notes = self.note.splitlines()
        if count < max(every, self.total):
            notes.append(f"{count} of {max(every, self.total)} rows are shown (--csv FILE writes them all).")
        return notes

    def text(self, width: int | None = None, rows: int | None = None) -> str:
        """Title, the columns that fit, aligned, and note. Heads may take several lines; numbers are right-aligned.

        Args:
            width: Characters of a line. None: every column is shown, and the note is not broken.
            rows: Rows that are shown, which the note then says. None: all.
        """
        from rich.console import Console
        from rich.table import Table as RichTable

        shown, printed = self.narrow(width), io.StringIO()
        table = RichTable(box=None, padding=(0, BETWEEN, 0, 0), pad_edge=False, header_style="")
        for name, cells in shown.columns.items():
            side = "right" if _are_numbers(cells) else "left"
            head = "\n".join(wrap(_words(name), _width(name, cells)))
            table.add_column(head, justify=side, overflow="fold")
        for row in list(zip(*shown.columns.values(), strict=True))[:rows]:
            table.add_row(*row)
        options: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False, "force_jupyter": False}
        console = Console(file=printed, width=width or WIDEST, **options)
        console.print(table)
        lines = [self.title, *printed.getvalue().splitlines()]
        for note in shown.notes(rows):
            lines.append(note if width is None else fill(note, width))
        return "\n".join(filter(None, map(str.rstrip, lines)))

    def html(self) -> str:
        """The same as HTML with every column, fully escaped; words stand left, and numbers right."""
        title, note = html.escape(self.title), html.escape("\n".join(self.notes()))
        numbers = list(map(_are_numbers, self.columns.values()))
        head = _html_row("th", map(_words, self.columns), numbers)
        body = "".join(_html_row("td", row, numbers) for row in zip(*self.columns.values(), strict=True))
        table = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
        return f"{title and f'<h3>{title}</h3>'}{note and f'<p>{note}</p>'}{table}"


def _width(name: str, cells: Sequence[str]) -> int:
    """The width of a column: that of its widest cell or word of the head."""
    from rich.cells import cell_len  # some characters take two places

    return max(map(cell_len, [*name.split("_"), *cells]))


def _are_numbers(cells: Sequence[str]) -> bool:
    """Whether every cell of a column is a number, a share, yes or no, or empty."""
    return all(map(_NUMBER.fullmatch, cells))


def height(blocks: Sequence[str], width: int) -> int:
    """Number of lines that texts take on a terminal, for which long ones are broken between words."""
    lines = 0
    for line in "\n".join(blocks).splitlines():
        lines += max(1, len(wrap(line, width, break_on_hyphens=False)))
    return lines


def _html_row(tag: str, texts: Iterable[str], numbers: Sequence[bool]) -> str:
    cells: list[str] = []
    for text, is_number in zip(texts, numbers, strict=True):
        kind = "" if is_number else ' class="words"'
        cells.append(f"<{tag}{kind}>{html.escape(text)}</{tag}>")
    return f"<tr>{''.join(cells)}</tr>"


def _words(name: str) -> str:
    return name.replace("_", " ")


def cell(value: Any, *, percent: bool = False) -> str:
    """A value as text: four significant digits or per cent, "about 0" below 1e-6, yes or no, and a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and percent:
        return f"{value:.1%}".replace("-0.0%", "0.0%")
    if isinstance(value, float) and 1e4 <= abs(value) < 1e7:
        return f"{value:.0f}"
    if isinstance(value, float) and 0 < abs(value) < ROUNDING:
        return "about 0"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(cell(one, percent=percent) for one in value)
    return visible(str(value)).replace("\n", "\\n")


def percent(value: float | None) -> str:
    """A share in whole per cent; a dash for None."""
    if value is None:
        return "-"
    return f"{value:.0%}".replace("-0%", "0%")


def strings(rows: Sequence[Mapping[str, Any]], percent: Sequence[str] = ()) -> dict[str, list[str]]:
    """Columns of strings. A neuron or head becomes one column; columns that are empty in every row are dropped.

    Args:
        rows: One mapping per row, with the same keys in all.
        percent: Columns shown in per cent.
    """
    named = [_with_site_names(row) for row in rows]
    columns: dict[str, list[str]] = {}
    for name in named[0] if named else ():
        values = [row.get(name) for row in named]
        if values.count(None) < len(values):
            columns[name] = [cell(value, percent=name in percent) for value in values]
    return columns


def _with_site_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its layer and neuron, or layer and head, merged into one name."""
    named = dict(row)
    if "layer" in row and "neuron" in row:
        named["neuron"] = neuron_name(named.pop("layer"), named.pop("expert", None), row["neuron"])
    elif isinstance(row.get("layer"), int) and isinstance(row.get("head"), int):
        named["head"] = head_name(named.pop("layer"), row["head"])
    return named


def long_table(arrays: Mapping[str, Any], **axes: Sequence[Any]) -> Table:
    """A row for each entry of arrays that have the same axes, with the labels of its place; NaN becomes None.

    Arrays that are None are left out.
    """
    import numpy as np  # slow to load, and few results hold arrays

    rows: Table = []
    shape = [len(labels) for labels in axes.values()]
    arrays = {name: np.reshape(values, shape) for name, values in arrays.items() if values is not None}
    for place, labels in zip(np.ndindex(*shape), product(*axes.values()), strict=True):
        row = dict(zip(axes, labels, strict=True))
        for name, values in arrays.items():
            row[name] = plain(values[place])
        rows.append(row)
    return rows


def glossary(cls: type[Any], names: Sequence[str], own: Mapping[str, str]) -> dict[str, str]:
    """The meaning of columns whose names are not plain words.

    Args:
        cls: Class of the result. Its docstring and those of the classes of its fields describe the columns; of several
            that describe one, the class counts that describes most of the columns.
        names: Names of the columns.
        own: Explanations that take precedence over the docstrings.
    """
    parts: list[Any] = [cls]
    by_class: list[dict[str, str]] = []
    for part in parts:  # the list grows by what is inside
        inside = [*get_args(part)]
        if isinstance(part, type) and is_dataclass(part):
            inside += [*get_type_hints(part).values(), *part.__bases__]
            by_class.append(descriptions_of(inspect.cleandoc(part.__doc__ or ""), "Attributes"))
        parts += [one for one in inside if one not in parts]
    descriptions: dict[str, str] = {}
    for words in sorted(reversed(by_class), key=lambda words: len(words.keys() & set(names))):
        descriptions |= words  # of several that describe as many columns, the first class counts
    meaning: dict[str, str] = {}
    for name in names:
        description = own.get(name, "" if name in PLAIN else descriptions.get(name, ""))
        if description:
            sentence = re.split(r"; |\. (?=[A-Z])", description)[0].rstrip(".")
            meaning[_words(name)] = f"{sentence[:1].upper()}{sentence[1:]}."
    return meaning
