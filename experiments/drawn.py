"""A measurement's JSON and its drawing, side by side in one folder, and a page of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas

from experiments.record import Row
from sinkscope.app.pages import ENVELOPE, Section, document, plot, save_document, section, write_png
from sinkscope.display.console import note
from sinkscope.display.tables import Grid, cell
from sinkscope.errors import SinkscopeError
from sinkscope.files.output import write_atomic

ROWS = 2000  # of a table; the file holds them all
_WIDTH = 80  # characters of a list in a cell


def save(name: str, text: str, figure: Callable[[Row], Any], folder: Path) -> None:
    """Write NAME.json, NAME.html, and NAME.png where a browser can draw it.

    Args:
        name: of the files, without their endings.
        text: the record, as JSON.
        figure: draws what the record holds.
        folder: of the files.
    """
    path = write_atomic(folder / f"{name}.json", text)
    data = json.loads(text)
    drawn = figure(data)
    save_document(folder / f"{name}.html", document(name.replace("_", " "), [record_section(data, path.name, drawn)]))
    try:
        write_png(drawn, folder / f"{name}.png")
    except SinkscopeError as error:
        note(f"no PNG: {error}")


def record_section(data: Row, file: str, figure: Any = None) -> Section:
    """The section of a record, which has no result class: its figure, and all its data as tables.

    Args:
        data: the record.
        file: name of its file, as shown to the reader.
        figure: a plotly figure, if there is one.
    """
    lists = {}
    for name in ENVELOPE:
        if isinstance(data.get(name), dict):
            lists[name] = data[name]
    parts = []
    for part in tables(data["result"]):
        parts.append(part.html())
    shown = "\n".join(parts)
    return section(str(data["kind"]), file, lists, ("" if figure is None else plot(figure)) + shown)


def tables(result: Row) -> Iterator[Grid]:
    """Each list of records as a table, whose nested objects are columns, and all other values as one more."""
    single: Row = {}
    for name, value in pandas.json_normalize(result, sep=", ").iloc[0].items():
        if not isinstance(value, list) or not value or not isinstance(value[0], dict):
            single[str(name)] = value
            continue
        cut = ""
        if len(value) > ROWS:
            cut = f" (the first {ROWS:,} of {len(value):,} rows)"
        rows = pandas.json_normalize(value[:ROWS], sep=" ").astype(object)
        frame = rows.where(rows.notna(), None)  # what a record lacks
        yield Grid({str(column): [_in_a_cell(item) for item in frame[column]] for column in frame}, f"{name}{cut}")
    if single:
        yield Grid({"name": list(single), "value": [_in_a_cell(value) for value in single.values()]})


def _in_a_cell(value: Any) -> str:
    """A value; of a long list its beginning, and never a part of a number."""
    if not isinstance(value, list):
        return cell(value)
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= _WIDTH:
        return cell(text)
    return cell(f"{text[:_WIDTH].rpartition(', ')[0]}, … ({len(value)} values)")


def put_table(page: Path, module: str, made: str) -> None:
    """Replace what stands in a page between the two comments that name a module of `experiments`."""
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- made by experiments.{module} -->", f"<!-- end of experiments.{module} -->"
    before, found, rest = text.partition(begin)
    _, ends, after = rest.partition(end)
    if not found or not ends:
        raise SystemExit(f"{page}: expected a part between {begin} and {end}")
    write_atomic(page, f"{before}{begin}\n\n{made}\n\n{end}{after}")


def at_place(position: str) -> str:
    """The position of a question in words."""
    return {"begin": "at the beginning", "middle": "in the middle", "end": "at the end"}.get(position, position)


def powers(title: str | None = None, every: int = 1) -> Row:
    """Options of a logarithmic axis with a label at `every` so many powers of ten."""
    return {"title_text": title, "type": "log", "dtick": every, "exponentformat": "power"}
