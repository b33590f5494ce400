"""Measurements that have no class of their own: their data as tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from sinkscope.html import ENVELOPE, Section, picture, section
from sinkscope.results import SCHEMA, cell, html_table

ROWS = 2000  # of a table; the file holds them all
PICTURE = 4 << 20  # bytes of a PNG beside a record: a larger one is left out
_WIDTH = 80  # characters of a list in a cell


class RecordTable(NamedTuple):
    """Part of a record.

    Attributes:
        title: the keys that lead to it.
        head: names of the columns.
        rows: cells as they are shown.
        total: number of rows in the data; `rows` may hold fewer.
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    total: int

    def to_html(self) -> str:
        """The table under its title, everything escaped."""
        cut = f" (the first {len(self.rows):,} of {self.total:,} rows)" if len(self.rows) < self.total else ""
        title = f"<h3>{escape(self.title + cut)}</h3>\n" if self.title or cut else ""
        return title + html_table(self.head, self.rows)


def record_section(data: dict[str, Any], file: str, path: Path) -> Section | None:
    """An envelope whose kind no class belongs to, with the PNG beside it; None if `data` is no envelope.

    Args:
        data: what the file holds.
        file: name of the file as it is shown.
        path: the file itself.
    """
    lists = {name: data[name] for name in ENVELOPE if isinstance(data.get(name), dict)}
    result = data.get("result")
    if data.get("schema") != SCHEMA or not isinstance(result, dict | list) or "provenance" not in lists:
        return None
    shown = "\n".join(part.to_html() for part in tables(result))
    return section(str(data["kind"]), file, lists, _picture(path.with_suffix(".png")) + shown)


def _picture(path: Path) -> str:
    """The PNG beside a record, which has no other drawing."""
    if not path.is_file() or path.stat().st_size > PICTURE:
        return ""
    content = path.read_bytes()
    return picture(path.name, content) if content.startswith(b"\x89PNG\r\n\x1a\n") else ""


def tables(value: Any, title: str = "") -> Iterator[RecordTable]:
    """All of the data: single values first, then a table per list of records."""
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


def _table(title: str, rows: list[dict[str, Any]]) -> RecordTable:
    head = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_shown(row.get(name)) for name in head] for row in rows[:ROWS]]
    return RecordTable(title, [name.replace("_", " ") for name in head], cells, len(rows))


def _shown(value: Any) -> str:
    if isinstance(value, list):
        parts = [f"[{_shown(v)}]" if isinstance(v, list) else _shown(v) for v in value]
        text = ", ".join(parts)
        if len(text) <= _WIDTH:
            return text
        fitting = text[:_WIDTH].count(", ") if all(", " not in part for part in parts) else 1
        return f"{', '.join(parts[:fitting])}, … ({len(parts)} values)"  # never a part of a number
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else cell(value)
