"""Tables of results: columns that fit the width, constants in the note, and the meaning of the columns."""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
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
BETWEEN_COLUMNS = "  "
PLAIN = frozenset(
    "layer layers head neuron expert position token tokens text model name method seed step prompt kind id task set "
    "revision group component source dialogues questions prompts runs texts temperature norm file".split()
)
"""Names of columns that need no explanation."""
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
        constants = self._constants()
        first = [name for name in self.columns if name in self.head]
        order = first + [name for name in self.head if name not in first]
        varied = [name for name in order if name not in constants] or order[:1]
        shown = varied
        if not self._fits(varied, width):
            shown = self._largest_fitting([name for name in first if name in varied] or varied, width)
        notes = [self.note]
        unshown_constants = [name for name in constants if name not in shown]
        if unshown_constants:
            values = ", ".join(f"{_words(name)} {constants[name]}" for name in unshown_constants)
            notes.append(f"In every row: {values}.")
        left_out = [_words(name) for name in varied if name not in shown]
        if left_out:
            notes.append(f"Not shown: {', '.join(left_out)} (--csv FILE writes all columns).")
        note = "\n".join(line for line in notes if line)
        return replace(self._only(shown), note=note, same=tuple(unshown_constants))

    def _constants(self) -> dict[str, str]:
        """Columns of several rows that have one value, and that value."""
        constants: dict[str, str] = {}
        if len(self.cells) > 1:
            for number, name in enumerate(self.head):
                values = {row[number] for row in self.cells}
                if len(values) == 1:
                    constants[name] = values.pop()
        return constants

    def _largest_fitting(self, names: Sequence[str], width: int) -> list[str]:
        """The first of these columns, and all further ones for which there is room."""
        shown = [names[0]]
        for name in names[1:]:
            if self._fits([*shown, name], width):
                shown.append(name)
        return shown

    def _fits(self, names: Sequence[str], width: int) -> bool:
        """Whether these columns fit; heads are broken between words, cells never."""
        widths = self._only(names)._widths()
        return sum(widths) + len(BETWEEN_COLUMNS) * (len(names) - 1) <= max(width, NARROWEST)

    def _only(self, names: Sequence[str]) -> Grid:
        """The table with these columns, in this order."""
        places = [list(self.head).index(name) for name in names]
        return replace(self, head=names, cells=[[row[place] for place in places] for row in self.cells])

    def _widths(self) -> list[int]:
        """The width of each column: that of its widest cell or word of the head."""
        from rich.cells import cell_len  # some characters take two places

        widths: list[int] = []
        for number, name in enumerate(self.head):
            parts = name.split("_") + [row[number] for row in self.cells]
            widths.append(max(map(cell_len, parts)))
        return widths

    def text(self, width: int | None = None) -> str:
        """Title, aligned columns and note. Heads may take several lines; numbers are right-aligned, words left."""
        widths = self._widths()
        right = [all(_NUMBER.fullmatch(row[number]) for row in self.cells) for number in range(len(self.head))]
        heads = [wrap(_words(name), size) or [""] for name, size in zip(self.head, widths, strict=True)]
        height = max(map(len, heads), default=0)
        lines = [self.title]
        for number in range(height):
            parts = ["" if number < height - len(head) else head[number - height] for head in heads]
            lines.append(_aligned(parts, widths, right))
        lines += [_aligned(row, widths, right) for row in self.cells]
        for line in self.note.splitlines():
            lines.append(line if width is None else fill(line, width))
        return "\n".join(line for line in lines if line)

    def html(self) -> str:
        """The same as HTML with every column, fully escaped."""
        parts: list[str] = []
        if self.title:
            parts.append(f"<h3>{html.escape(self.title)}</h3>")
        if self.note:
            parts.append(f"<p>{html.escape(self.note)}</p>")
        parts.append(f"<table><thead>{_html_row('th', [_words(name) for name in self.head])}</thead><tbody>")
        parts += [_html_row("td", row) for row in self.cells]
        parts.append("</tbody></table>")
        return "".join(parts)


def height(blocks: Sequence[str], width: int) -> int:
    """Number of lines that texts take on a terminal, which breaks the long ones."""
    lines = 0
    for block in blocks:
        for line in block.split("\n"):
            lines += max(1, -(-len(line) // width))
    return lines


def shortened(grids: Sequence[Grid], room: int, width: int) -> list[str]:
    """Tables as text with so few rows, the longest table losing them first, that with a line behind each they fit.

    A table keeps a row at least; if that is not enough, the last tables are left out.
    """
    cut = list(grids)
    while cut and height(_cut_texts(cut, grids, width), width) + len(cut) > room:
        longest = max(cut, key=lambda grid: len(grid.cells))
        place = cut.index(longest)
        if len(longest.cells) > 1:
            cut[place] = replace(longest, cells=longest.cells[:-1])
        elif len(cut) > 1:
            cut.pop()
        else:
            break
    return _cut_texts(cut, grids, width)


def _cut_texts(cut: Sequence[Grid], whole: Sequence[Grid], width: int) -> list[str]:
    """Tables as text that say how many rows they had."""
    texts: list[str] = []
    for grid, before in zip(cut, whole, strict=False):
        if len(grid.cells) < len(before.cells):
            grid = replace(grid, note=f"{len(grid.cells)} of {len(before.cells)} rows are shown.")
        texts.append(grid.text(width))
    return texts


def _html_row(tag: str, texts: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"


def _aligned(parts: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    """One line of a table."""
    from rich.cells import cell_len

    padded: list[str] = []
    for part, width, is_number in zip(parts, widths, right, strict=True):
        space = " " * (width - cell_len(part))
        padded.append(space + part if is_number else part + space)
    return BETWEEN_COLUMNS.join(padded).rstrip()


def _words(name: str) -> str:
    return name.replace("_", " ")


def cell(value: Any, *, percent: bool = False) -> str:
    """A value as text: four significant digits or per cent, "about 0" below 1e-6, yes or no, and a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        if value:
            return "yes"
        return "no"
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
    head: list[str] = []
    if named:
        head = [name for name in named[0] if any(row.get(name) is not None for row in named)]
    return head, [[cell(row.get(name), percent=name in percent) for name in head] for row in named]


def _with_site_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its layer and neuron, or layer and head, merged into one name."""
    named = dict(row)
    if "neuron" in row and "layer" in row:
        layer, expert, neuron = named.pop("layer"), named.pop("expert", None), row["neuron"]
        if isinstance(layer, int) and isinstance(neuron, int):
            named["neuron"] = neuron_name(layer, expert, neuron)
    elif "head" in row and "layer" in row:
        layer, head = named.pop("layer"), row["head"]
        if isinstance(layer, int) and isinstance(head, int):
            named["head"] = head_name(layer, head)
    return named


def glossary(cls: type[Any], names: Sequence[str], own: Mapping[str, str]) -> dict[str, str]:
    """The meaning of columns whose names are not plain words.

    Args:
        cls: Class of the result. Its docstring and those of the classes of its fields describe the columns.
        names: Names of the columns.
        own: Explanations that take precedence over the docstrings.
    """
    descriptions: dict[str, str] = {}
    for one in (*_field_classes(cls), cls):
        for base in one.__mro__:
            described_here = described(inspect.cleandoc(base.__doc__ or ""), "Attributes")
            descriptions = described_here | descriptions
    descriptions |= own
    meaning: dict[str, str] = {}
    for name in names:
        if name in descriptions and (name in own or name not in PLAIN):
            sentence = re.split(r"; |\. (?=[A-Z])", descriptions[name])[0].rstrip(".")
            meaning[name] = f"{sentence[:1].upper()}{sentence[1:]}."
    return meaning


def _field_classes(cls: type[Any]) -> Iterator[type[Any]]:
    """Dataclasses of the fields, and of theirs."""
    classes: list[Any] = [cls]
    for one in classes:
        hints = [hint for name, hint in get_type_hints(one).items() if name not in ("model", "provenance")]
        for hint in hints:  # the list grows by the arguments of unions and tuples
            hints += get_args(hint)
            if isinstance(hint, type) and is_dataclass(hint) and hint not in classes:
                classes.append(hint)
                yield hint
