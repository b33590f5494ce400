"""Tables of results: columns that fit the width, constants in the note, and the meaning of the columns."""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from itertools import compress, product
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
BETWEEN = "  "
CONSTANT = "In every row shown: "
PLAIN = frozenset(
    "layer layers head neuron expert position token tokens text model name method seed step prompt kind id task set "
    "revision group component patched source dialogues questions prompts runs texts temperature norm file".split()
)
"""Names of columns that need no explanation."""
Table = list[dict[str, Any]]
"""One dict per row."""
_NUMBER = re.compile(r"[-+]?[\d.,]*\d(e[-+]?\d+)?%?|-|yes|no|about 0|")


@dataclass(frozen=True)
class Grid:
    """A table as plain text and as HTML.

    Attributes:
        columns: The cells of each column, by its name.
        title: Title above the table.
        note: Note below the table.
        important: Names of the columns that are shown if not all fit. Empty: the first columns that fit.
        kept: Names of the columns that are shown in any case; their cells take several lines where they must.
        matters: Which rows matter; empty: all.
        others: A line about the other rows, which stands for them on a terminal.
        total: Number of rows of the whole table, if it has more than these.
    """

    columns: Mapping[str, Sequence[str]]
    title: str = ""
    note: str = ""
    important: Sequence[str] = ()
    kept: Sequence[str] = ()
    matters: Sequence[bool] = ()
    others: str = ""
    total: int = 0

    def brief(self) -> Grid:
        """The rows that matter, and the line about the others; the whole table if all or none matter."""
        if not any(self.matters) or all(self.matters):
            return self
        columns = {name: list(compress(cells, self.matters)) for name, cells in self.columns.items()}
        return replace(self, columns=columns, note=f"{self.others}\n{self.note}".strip(), matters=())

    def heading(self, width: int | None = None) -> list[str]:
        """The lines above the rows: the title, and the heads of the columns that fit."""
        *lines, _ = replace(self.narrow(width), note="").text(None, 0).splitlines()  # the last one counts the rows
        return lines

    def narrow(self, width: int | None) -> Grid:
        """The table with the columns that fit into a width; None: every column.

        A column with the same value in all rows moves into the note, which also names the columns left out.
        """
        if width is None:
            return self
        sizes: dict[str, int] = {}
        constants: list[str] = []
        for name, cells in self.columns.items():
            if len(cells) > 1 and len(set(cells)) == 1 and name not in self.kept:
                if cells[0]:  # an empty column says nothing
                    constants.append(f"{_words(name)} {cells[0]}")
            else:
                sizes[name] = _width(name, cells) + len(BETWEEN)
        room = width + len(BETWEEN)
        columns = {**self.columns, **self._folded(sizes, room)}
        important = [name for name in (*self.kept, *self.important) if name in sizes]
        names = list(dict.fromkeys([*important, *sizes])) or list(columns)[:1]
        if sum(sizes.values()) > room:
            names = important or names
        shown: list[str] = []
        for name in names:
            if not shown or sizes[name] <= room:
                shown.append(name)
                room -= sizes.get(name, 0)
        left_out = [_words(name) for name in sizes if name not in shown]
        note = self.note
        if constants:
            note += f"\n{CONSTANT}{', '.join(constants)}."
        if left_out:
            note += f"\nNot shown: {', '.join(left_out)} (--csv FILE writes all columns)."
        return replace(self, columns={name: columns[name] for name in shown}, note=note.strip())

    def _folded(self, sizes: dict[str, int], room: int) -> dict[str, list[str]]:
        """The columns that are kept, folded so that all fit; the widest becomes narrower, in `sizes` too."""
        while sum(sizes[name] for name in self.kept) > room:
            sizes[max(self.kept, key=sizes.__getitem__)] -= 1
        columns: dict[str, list[str]] = {}
        for name in self.kept:
            columns[name] = ["\n".join(wrap(text, sizes[name] - len(BETWEEN))) for text in self.columns[name]]
        return columns

    def text(self, width: int | None = None, rows: int | None = None) -> str:
        """Title, the columns that fit, aligned, and note. Heads may take several lines; numbers are right-aligned.

        Args:
            width: Characters of a line. None: every column is shown, and the note is not broken.
            rows: Rows that are shown, which the note then says. None: all.
        """
        from rich.cells import set_cell_size  # some characters take two places

        shown = self.narrow(width)
        note = shown.note
        lines_of_rows = [max(map(_lines, row)) for row in zip(*shown.columns.values(), strict=True)]
        if rows is not None and rows < len(lines_of_rows):
            kept = [line for line in note.splitlines() if line.startswith(CONSTANT)]
            note = "\n".join([*kept, f"{rows} of {max(self.total, len(lines_of_rows))} rows are shown."])
        heads = {name: wrap(_words(name), _width(name, cells)) for name, cells in shown.columns.items()}
        height = max(map(len, heads.values()), default=0)
        blocks: list[list[str]] = []
        for name, cells in shown.columns.items():
            size = _width(name, cells)
            block = [*[""] * (height - len(heads[name])), *heads[name]]
            for cell, lines in zip(cells[:rows], lines_of_rows, strict=False):
                block += [*cell.split("\n"), *[""] * (lines - _lines(cell))]
            if all(map(_NUMBER.fullmatch, cells)):
                block = [part.rjust(size) for part in block]
            blocks.append([set_cell_size(part, size) for part in block])
        lines = [self.title]
        for row in zip(*blocks, strict=True):
            lines.append(BETWEEN.join(row).rstrip())
        for line in note.splitlines():
            lines.append(line if width is None else fill(line, width))
        return "\n".join(filter(None, lines))

    def html(self) -> str:
        """The same as HTML with every column, fully escaped; words stand left, and numbers right."""
        title, note = html.escape(self.title), html.escape(self.note)
        words = [any(map(_is_word, cells)) for cells in self.columns.values()]
        head = _html_row("th", map(_words, self.columns), words)
        body = "".join(_html_row("td", row, words) for row in zip(*self.columns.values(), strict=True))
        table = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
        return f"{title and f'<h3>{title}</h3>'}{note and f'<p>{note}</p>'}{table}"


def _width(name: str, cells: Sequence[str]) -> int:
    """The width of a column: that of its widest cell or word of the head."""
    from rich.cells import cell_len

    return max(map(cell_len, [*name.split("_"), *"\n".join(cells).split("\n")]))


def _lines(cell: str) -> int:
    """How many lines a cell takes."""
    return cell.count("\n") + 1


def height(blocks: Sequence[str], width: int) -> int:
    """Number of lines that texts take on a terminal, for which long ones are broken between words."""
    lines = 0
    for line in "\n".join(blocks).splitlines():
        lines += 1 if len(line) <= width else len(wrap(line, width, break_on_hyphens=False))
    return lines


def shortened(grids: Sequence[Grid], room: int, width: int) -> list[str]:
    """Tables as text with so few of the rows that matter that they fit with a line after each.

    A table keeps a row at least; if that is not enough, the last tables are left out.
    """
    texts: list[str] = []
    most = 0
    grids = [grid.brief() for grid in grids]
    for grid in grids:
        most = max(most, *map(len, grid.columns.values()))
    for count in range(len(grids), 0, -1):
        for rows in range(most, 0, -1):
            texts = [grid.text(width, rows) for grid in grids[:count]]
            if height(texts, width) + count <= room:
                return texts
    return texts


def _html_row(tag: str, texts: Iterable[str], words: Sequence[bool]) -> str:
    cells: list[str] = []
    for text, left in zip(texts, words, strict=True):
        kind = ' class="words"' if left else ""
        cells.append(f"<{tag}{kind}>{html.escape(text)}</{tag}>")
    return f"<tr>{''.join(cells)}</tr>"


def _is_word(cell: str) -> bool:
    """Whether a cell holds neither a number, a share, nor a dash."""
    return re.fullmatch(r"-|about 0|nan|[-+]?[\d.,]+(e[-+]?\d+)?%?", cell) is None


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
