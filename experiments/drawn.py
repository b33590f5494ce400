"""A measurement's JSON and its drawing, side by side in one folder, and a page of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sinkscope.app.pages import ENVELOPE, Section, document, plot, save_document, section, write_png
from sinkscope.errors import SinkscopeError
from sinkscope.files.console import note
from sinkscope.files.output import write_atomic
from sinkscope.files.tables import Grid, cell

ROWS = 2000  # of a table; the file holds them all
_WIDTH = 80  # characters of a list in a cell


def save(name: str, text: str, figure: Callable[[dict[str, Any]], Any], folder: Path) -> None:
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


def record_section(data: dict[str, Any], file: str, figure: Any = None) -> Section:
    """The section of a record, which has no result class: its figure, and all its data as tables.

    Args:
        data: the record.
        file: name of its file, as shown to the reader.
        figure: a plotly figure, if there is one.
    """
    lists = {name: data[name] for name in ENVELOPE if isinstance(data.get(name), dict)}
    shown = "\n".join(part.html() for part in tables(data["result"]))
    return section(str(data["kind"]), file, lists, ("" if figure is None else plot(figure)) + shown)


def tables(value: Any, title: str = "") -> Iterator[Grid]:
    """All data as tables: single values first, then one table per list of records."""
    if isinstance(value, list):
        if _records(value):
            yield _table(title, [flat for row in value for flat in _flat(row)])
        elif value:
            yield _table(title, [{"value": item} for item in value])
        return
    inside = {key: v for key, v in value.items() if isinstance(v, dict) or _records(v)}
    single = [{"name": key, "value": v} for key, v in value.items() if key not in inside]
    if single:
        yield _table(title, single)
    if len(inside) > 1 and all(isinstance(v, dict) and not _nested(v) for v in inside.values()):
        yield _table(title, [{"name": key, **v} for key, v in inside.items()])
        return
    for key, v in inside.items():
        yield from tables(v, f"{title}, {key}" if title else key)


def _nested(value: dict[str, Any]) -> bool:
    return any(isinstance(v, dict) or _records(v) for v in value.values())


def _records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _flat(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The row itself, or one row for each record in its lists; objects in it become columns."""
    base: dict[str, Any] = {}
    lists: dict[str, list[dict[str, Any]]] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            base |= {f"{key} {name}": v for name, v in value.items()}
        elif _records(value):
            lists[key] = value
        else:
            base[key] = value
    if not lists:
        yield base
    for key, rows in lists.items():
        named = {"list": key} if len(lists) > 1 else {}
        for inner in rows:
            for flat in _flat(inner):
                yield {**base, **named, **{f"{key} {n}" if n in base else n: v for n, v in flat.items()}}


def _table(title: str, rows: list[dict[str, Any]]) -> Grid:
    head = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [_in_a_cell(row.get(name)) for row in rows[:ROWS]] for name in head}
    cut = f" (the first {ROWS:,} of {len(rows):,} rows)" if len(rows) > ROWS else ""
    return Grid(columns, title + cut)


def _in_a_cell(value: Any) -> str:
    if isinstance(value, list):
        parts = [f"[{_in_a_cell(v)}]" if isinstance(v, list) else _in_a_cell(v) for v in value]
        text = ", ".join(parts)
        if len(text) <= _WIDTH:
            return text
        fitting = text[:_WIDTH].count(", ") if all(", " not in part for part in parts) else 1
        return f"{', '.join(parts[:fitting])}, … ({len(parts)} values)"  # never a part of a number
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else cell(value)


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


def powers(title: str | None = None, every: int = 1) -> dict[str, Any]:
    """Options of a logarithmic axis with a label at `every` so many powers of ten."""
    return {"title_text": title, "type": "log", "dtick": every, "exponentformat": "power"}
