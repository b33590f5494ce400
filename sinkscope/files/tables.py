"""Tables of results: columns that fit the width, constants in the caption, and the meaning of the columns."""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from textwrap import fill, wrap
from typing import Any, NamedTuple, get_args, get_type_hints

from sinkscope.files.notation import head_name, neuron_name
from sinkscope.files.options import described
from sinkscope.files.plain import visible

WIDTH = 80
"""Characters of a line where there is no terminal."""
_LEAST = 40  # a narrower terminal wraps the lines
_NUMBER = re.compile(r"[-+]?[\d.,]*\d(e[-+]?\d+)?%?|-|yes|no|")
PLAIN = frozenset(
    "layer layers head neuron expert position token tokens text model name method seed step prompt kind id task set "
    "revision group component source dialogues questions prompts runs texts temperature norm file".split()
)


@dataclass(frozen=True)
class Grid:
    """A table as plain text, as HTML, and as a rich renderable.

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

    def fitted(self, width: int | None, between: int = 2) -> Grid:
        """The table with the columns that fit into a width; None: every column.

        A column with the same value in all rows moves into the note, which also names the columns left out.

        Args:
            width: Characters per line.
            between: Characters between two columns.
        """
        if width is None or not self.cells:
            return self
        values = dict(zip(self.head, zip(*self.cells, strict=True), strict=True))
        same = {name: found[0] for name, found in values.items() if len(self.cells) > 1 and len({*found}) == 1}
        order = [*(name for name in self.columns if name in values), *(n for n in self.head if n not in self.columns)]
        varied = [name for name in order if name not in same] or order[:1]
        shown, room = varied, max(width, _LEAST)
        if not self._only(varied)._laid(room, between).fits:
            shown = []
            for name in [name for name in self.columns if name in varied] or varied:
                if not shown or self._only([*shown, name])._laid(room, between).fits:
                    shown.append(name)
        constant = [f"{_words(name)} {value}" for name, value in same.items() if name not in shown]
        left = [_words(name) for name in varied if name not in shown]
        said = [
            self.note,
            f"In every row: {', '.join(constant)}." * bool(constant),
            f"Not shown: {', '.join(left)} (--wide shows all columns, --csv FILE writes them)." * bool(left),
        ]
        same_names = tuple(name for name in same if name not in shown)
        return replace(self._only(shown), note="\n".join(filter(None, said)), same=same_names)

    def _only(self, names: Sequence[str]) -> Grid:
        """The table with these columns, in this order."""
        places = [list(self.head).index(name) for name in names]
        return replace(self, head=names, cells=[[line[i] for i in places] for line in self.cells])

    def _laid(self, width: int | None, between: int) -> _Laid:
        """The widths of its columns. Cells are never broken, and heads only if necessary, between words."""
        from rich.cells import cell_len  # some characters take two cells

        head = list(map(_words, self.head))
        columns = [list(column) for column in zip(*self.cells, strict=True)] or [[] for _ in head]
        widths = [max(map(cell_len, [name, *column])) for name, column in zip(head, columns, strict=True)]
        floors = [max(map(cell_len, [*name.split(), *column])) for name, column in zip(head, columns, strict=True)]
        excess = 0 if width is None else sum(widths) + between * (len(widths) - 1) - width
        while excess > 0 and widths != floors:
            widest = max(range(len(widths)), key=lambda i: widths[i] - floors[i])
            widths[widest] -= 1
            excess -= 1
        return _Laid(head, widths, [all(map(_NUMBER.fullmatch, column)) for column in columns], excess <= 0)

    def text(self, width: int | None = None) -> str:
        """Title, aligned columns and note. Heads may take several lines; numbers are right-aligned, words left."""
        from rich.cells import cell_len, set_cell_size

        laid = self._laid(width, 2)
        heads = [wrap(name, size) or [""] for name, size in zip(laid.head, laid.widths, strict=True)]
        height = max(map(len, heads), default=0)

        def line(parts: Sequence[str]) -> str:
            padded = (
                " " * (size - cell_len(part)) + part if number else set_cell_size(part, size)
                for part, size, number in zip(parts, laid.widths, laid.right, strict=True)
            )
            return "  ".join(padded).rstrip()

        tops = zip(*([""] * (height - len(lines)) + lines for lines in heads), strict=True)
        note = "\n".join(fill(said, width) if width else said for said in self.note.splitlines())
        around = [self.title, *map(line, tops), *map(line, self.cells), note]
        return "\n".join(one for one in around if one)

    def html(self) -> str:
        """The same as HTML with every column, fully escaped."""
        told = f"<h3>{html.escape(self.title)}</h3>" if self.title else ""
        told += f"<p>{html.escape(self.note)}</p>" if self.note else ""
        head, *body = (
            f"<tr>{''.join(f'<{tag}>{html.escape(one)}</{tag}>' for one in line)}</tr>"
            for tag, line in [("th", map(_words, self.head)), *(("td", line) for line in self.cells)]
        )
        return f"{told}<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"

    def __rich_console__(self, console: Any, options: Any) -> Any:
        """The table for rich: with rules if there is room for them, else plain text that the terminal wraps."""
        from rich.table import Table
        from rich.text import Text

        laid = self._laid(options.max_width - 4, 3)
        if not laid.fits:
            yield Text(self.text(options.max_width))
            return
        table = Table(
            header_style="bold",
            title=Text(self.title) if self.title else None,
            title_justify="left",
            caption=Text(self.note) if self.note else None,
            caption_justify="left",
        )
        for name, size, number in zip(laid.head, laid.widths, laid.right, strict=True):
            table.add_column(Text(name), justify="right" if number else "left", overflow="fold", width=size)
        for line in self.cells:
            table.add_row(*map(Text, line))
        yield table


class _Laid(NamedTuple):
    """The layout of a table: its head in words, its widths, the right-aligned columns, and whether it fits."""

    head: list[str]
    widths: list[int]
    right: list[bool]
    fits: bool


def _words(name: str) -> str:
    return name.replace("_", " ")


def cell(value: Any, *, percent: bool = False) -> str:
    """A value as text: four significant digits or per cent, yes or no, and a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if percent:
            return f"{value:.1%}".replace("-0.0%", "0.0%")
        return f"{value:.4g}" if abs(value) < 1e4 or abs(value) >= 1e7 else f"{value:.0f}"
    if isinstance(value, list | tuple):
        return ", ".join(cell(one, percent=percent) for one in value)
    return visible(str(value)).replace("\n", "\\n")


def percent(value: float | None) -> str:
    """A share in whole per cent; a dash for None."""
    return "-" if value is None else f"{value:.0%}".replace("-0%", "0%")


def strings(rows: Sequence[Mapping[str, Any]], percent: Sequence[str] = ()) -> tuple[list[str], list[list[str]]]:
    """Head and rows as strings. A neuron or head becomes one column; columns that are empty in every row are dropped.

    Args:
        rows: One mapping per row, with the same keys in all.
        percent: Columns shown in per cent.
    """
    named = [_named(row) for row in rows]
    names = [n for n in (named[0] if named else {}) if any(row.get(n) is not None for row in named)]
    return names, [[cell(row.get(name), percent=name in percent) for name in names] for row in named]


def _named(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its layer and neuron, or layer and head, merged into one name."""
    for key, parts, name in (("neuron", ("layer", "expert", "neuron"), neuron_name), ("head", _HEAD, head_name)):
        if {"layer", key} <= row.keys():
            known = isinstance(row["layer"], int) and isinstance(row[key], int)
            one = name(*(row[part] for part in parts if part in row)) if known else row[key]
            return {k: one if k == key else v for k, v in row.items() if k == key or k not in parts}
    return dict(row)


_HEAD = ("layer", "head")


def glossary(cls: type[Any], names: Sequence[str], own: Mapping[str, str]) -> dict[str, str]:
    """The meaning of columns whose names are not plain words.

    Args:
        cls: Class of the result. Its docstring and those of the classes of its fields describe the columns.
        names: Names of the columns.
        own: Explanations that take precedence over the docstrings.
    """
    classes = (base for one in (*_parts(cls), cls) for base in one.__mro__)
    found = [described(inspect.cleandoc(one.__doc__ or ""), "Attributes") for one in classes]
    found.sort(key=lambda known: -len(known.keys() & {*names}))  # the class of the rows takes precedence
    told: dict[str, str] = {}
    for name in dict.fromkeys(names):
        said = next((known[name] for known in (own, *found) if name in known), "")
        if said and (name in own or name not in PLAIN):
            short = re.split(r"; |\. (?=[A-Z])", said)[0].rstrip(".")
            told[name] = f"{short[:1].upper()}{short[1:]}."
    return told


def _parts(cls: type[Any]) -> Iterator[type[Any]]:
    """Dataclasses of the fields, and of theirs."""
    seen: list[Any] = [cls]
    for one in seen:
        hints = [hint for name, hint in get_type_hints(one).items() if name not in ("model", "provenance")]
        for hint in hints:  # the list grows by the arguments of unions and tuples
            hints += get_args(hint)
            if isinstance(hint, type) and is_dataclass(hint) and hint not in seen:
                seen.append(hint)
                yield hint
