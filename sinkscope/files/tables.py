"""Tables of results: columns that fit the width, constants in the note, and the meaning of the columns."""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from textwrap import fill, wrap
from typing import Any, get_args, get_type_hints

from sinkscope.files.notation import head_name, neuron_name
from sinkscope.files.options import described
from sinkscope.files.plain import visible

WIDTH = 80
"""Characters of a line where there is no terminal."""
SCREEN = 23
"""Lines of a terminal of 24 lines beside the next prompt."""
NARROWEST = 40
"""A narrower terminal wraps the lines."""
ROUNDING = 1e-6
"""Below it a number in a table is what float32 leaves of zero."""
BETWEEN = "  "
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
        head: Names of the columns.
        cells: Rows of strings.
        title: Title above the table.
        note: Note below the table.
        columns: Names of the most important columns, shown if not all fit. Empty: the first columns that fit.
        same: Names of columns with one constant value, which the note gives.
    """

    head: Sequence[str]
    cells: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    columns: Sequence[str] = ()
    same: Sequence[str] = ()

    def fitted(self, width: int | None) -> Grid:
        """The table with the columns that fit into a width; None: every column.

        A column with the same value in all rows moves into the note, which also names the columns left out.
        """
        if width is None or not self.cells:
            return self
        constants: dict[str, str] = {}
        for name, column in self._columns().items():
            if len(column) > 1 and len(set(column)) == 1:
                constants[name] = column[0]
        important = [name for name in self.columns if name in self.head]
        names = list(dict.fromkeys([*important, *self.head]))
        varied = [name for name in names if name not in constants] or names[:1]
        shown = varied
        if not self._fits(varied, width):
            shown = self._fitting([name for name in important if name in varied] or varied, width)
        same = [name for name in constants if name not in shown]
        left_out = [_words(name) for name in varied if name not in shown]
        note = self.note
        if same:
            note += f"\nIn every row: {', '.join(f'{_words(name)} {constants[name]}' for name in same)}."
        if left_out:
            note += f"\nNot shown: {', '.join(left_out)} (--csv FILE writes all columns)."
        places = [self.head.index(name) for name in shown]
        cells = [[row[place] for place in places] for row in self.cells]
        return replace(self, head=shown, cells=cells, note=note.strip(), same=same)

    def _fitting(self, names: Sequence[str], width: int) -> list[str]:
        """The first of these columns, and each further one that fits beside those before it."""
        fitting = [names[0]]
        for name in names[1:]:
            if self._fits([*fitting, name], width):
                fitting.append(name)
        return fitting

    def _columns(self) -> dict[str, list[str]]:
        return {name: [row[number] for row in self.cells] for number, name in enumerate(self.head)}

    def _fits(self, names: Sequence[str], width: int) -> bool:
        """Whether these columns fit; heads are broken between words, cells never."""
        widths = self._widths()
        return sum(widths[name] + len(BETWEEN) for name in names) <= max(width, NARROWEST) + len(BETWEEN)

    def _widths(self) -> dict[str, int]:
        """The width of each column: that of its widest cell or word of the head."""
        from rich.cells import cell_len  # some characters take two places

        return {name: max(map(cell_len, [*name.split("_"), *cells])) for name, cells in self._columns().items()}

    def text(self, width: int | None = None, rows: int | None = None) -> str:
        """Title, aligned columns and note. Heads may take several lines; numbers are right-aligned, words left.

        Args:
            width: Characters of a line of the note. None: it is not broken.
            rows: Rows that are shown, which the note then says. None: all.
        """
        from rich.cells import cell_len

        cells, note = self.cells[:rows], self.note
        if len(cells) < len(self.cells):
            note = f"{len(cells)} of {len(self.cells)} rows are shown."
        widths = self._widths()
        numbers = {name: all(map(_NUMBER.fullmatch, column)) for name, column in self._columns().items()}
        heads = [wrap(_words(name), widths[name]) or [""] for name in self.head]
        height = max(map(len, heads), default=0)
        above = [[""] * (height - len(head)) + head for head in heads]
        lines = [self.title]
        for row in [*zip(*above, strict=True), *cells]:
            parts: list[str] = []
            for name, part in zip(self.head, row, strict=True):
                space = " " * (widths[name] - cell_len(part))
                parts.append(space + part if numbers[name] else part + space)
            lines.append(BETWEEN.join(parts).rstrip())
        for line in note.splitlines():
            lines.append(line if width is None else fill(line, width))
        return "\n".join(filter(None, lines))

    def html(self) -> str:
        """The same as HTML with every column, fully escaped."""
        title, note = html.escape(self.title), html.escape(self.note)
        head = _html_row("th", [_words(name) for name in self.head])
        body = "".join(_html_row("td", row) for row in self.cells)
        table = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
        return f"{title and f'<h3>{title}</h3>'}{note and f'<p>{note}</p>'}{table}"


def height(blocks: Sequence[str], width: int) -> int:
    """Number of lines that texts take on a terminal, which breaks the long ones."""
    lines = "\n".join(blocks).split("\n") if blocks else ()
    return sum(max(1, -(-len(line) // width)) for line in lines)


def shortened(grids: Sequence[Grid], room: int, width: int) -> list[str]:
    """Tables as text with so few rows that they fit with a line behind each.

    A table keeps a row at least; if that is not enough, the last tables are left out.
    """
    texts: list[str] = []
    most = max((len(grid.cells) for grid in grids), default=0)
    for count in range(len(grids), 0, -1):
        for rows in range(most, 0, -1):
            texts = [grid.text(width, rows) for grid in grids[:count]]
            if height(texts, width) + count <= room:
                return texts
    return texts


def _html_row(tag: str, texts: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"


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


def strings(rows: Sequence[Mapping[str, Any]], percent: Sequence[str] = ()) -> tuple[list[str], list[list[str]]]:
    """Head and rows as strings. A neuron or head becomes one column; columns that are empty in every row are dropped.

    Args:
        rows: One mapping per row, with the same keys in all.
        percent: Columns shown in per cent.
    """
    named = [_with_site_names(row) for row in rows]
    head = [name for name in (*named[:1], {})[0] if any(row.get(name) is not None for row in named)]
    return head, [[cell(row.get(name), percent=name in percent) for name in head] for row in named]


def _with_site_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its layer and neuron, or layer and head, merged into one name."""
    named = dict(row)
    kind = "neuron" if "neuron" in row else "head"
    if kind in row and "layer" in row:
        layer, expert, number = named.pop("layer"), named.pop("expert", None), row[kind]
        if isinstance(layer, int) and isinstance(number, int):
            named[kind] = head_name(layer, number) if kind == "head" else neuron_name(layer, expert, number)
    return named


def glossary(cls: type[Any], names: Sequence[str], own: Mapping[str, str]) -> dict[str, str]:
    """The meaning of columns whose names are not plain words.

    Args:
        cls: Class of the result. Its docstring and those of the classes of its fields describe the columns.
        names: Names of the columns.
        own: Explanations that take precedence over the docstrings.
    """
    parts: list[Any] = list(get_type_hints(cls).values())
    for part in parts:  # the list grows by what is inside
        parts += get_args(part)
    descriptions: dict[str, str] = {}
    for one in (*parts, cls):
        for base in getattr(one, "__mro__", ()):
            if is_dataclass(base):
                descriptions = described(inspect.cleandoc(base.__doc__ or ""), "Attributes") | descriptions
    meaning: dict[str, str] = {}
    for name in names:
        if name in own or (name in descriptions and name not in PLAIN):
            sentence = re.split(r"; |\. (?=[A-Z])", own.get(name, descriptions.get(name, "")))[0].rstrip(".")
            meaning[name] = f"{sentence[:1].upper()}{sentence[1:]}."
    return meaning
