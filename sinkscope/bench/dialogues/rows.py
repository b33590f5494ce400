"""Rows of a file of someone else's: JSON lines, one JSON array, or parquet; with the place of each for messages."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sinkscope.errors import SinkscopeError


def read_rows(path: str | os.PathLike[str], expected: str) -> Iterator[tuple[str, Any]]:
    """Each row and where it stands, such as "chat.jsonl line 3".

    Args:
        path: `.parquet`, one JSON array, or a JSON value a line.
        expected: what such a file is, for messages.

    Raises:
        SinkscopeError: no such file, nothing in it, not UTF-8, a line that is not JSON (with its number), or parquet
            without a library for it.
    """
    file = Path(path).expanduser()
    if file.suffix == ".parquet":
        yield from _parquet(file, expected)
        return
    yield from rows_of(read(file, expected), file.name, expected)


def rows_of(text: str, name: str, expected: str) -> Iterator[tuple[str, Any]]:
    """Each row of a text: one JSON array or object, or a JSON value a line.

    Raises:
        SinkscopeError: a line is not JSON.
    """
    try:
        whole, problem = json.loads(text), ""
    except RecursionError:
        whole, problem = None, f"{name} is nested too deeply"
    except ValueError as error:
        whole, problem = None, f"{name} line {getattr(error, 'lineno', 1)} is not JSON"
    if not problem:
        if not isinstance(whole, list):
            yield f"{name} line {1 + text[: -len(text.lstrip())].count(chr(10))}", _whole(whole)
            return
        yield from ((f"{name} row {number}", _whole(row)) for number, row in enumerate(whole, 1))
        return
    first = True
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                # An array over many lines is broken elsewhere than in its first.
                where = problem if first else f"{name} line {number} is not JSON"
                raise SinkscopeError(f"{where}: give {expected}") from None
            first = False
            yield f"{name} line {number}", _whole(row)


def _whole(value: Any) -> Any:
    """Half a surrogate pair, which JSON can spell, is no text: a tokenizer or a file could not take it."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {key: _whole(inside) for key, inside in value.items()}
    return [_whole(inside) for inside in value] if isinstance(value, list) else value


def read(path: str | os.PathLike[str], expected: str) -> str:
    """The text of a file.

    Raises:
        SinkscopeError: no such file, nothing in it, or not UTF-8.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise SinkscopeError(f"{file.name} is not UTF-8 text: give {expected}") from None
    except OSError as error:
        reason = (error.strerror or "it cannot be read").lower()
        raise SinkscopeError(f"{os.fspath(path)!r}: {reason}; give {expected}") from None
    if not text.strip():
        raise SinkscopeError(f"{file.name} is empty: give {expected}")
    return text


def _parquet(file: Path, expected: str) -> Iterator[tuple[str, Any]]:
    if not file.is_file():
        raise SinkscopeError(f"{file.name!r}: no such file; give {expected}")
    import pandas as pd

    try:
        rows = json.loads(pd.read_parquet(file).to_json(orient="records") or "[]")
    except ImportError:
        raise SinkscopeError(f"{file.name} is a parquet file, which needs pyarrow: pip install pyarrow") from None
    except Exception as error:  # pyarrow's own kinds, which may not be there to be named
        raise SinkscopeError(f"{file.name} cannot be read as parquet ({error!s:.60}): give {expected}") from None
    if not rows:
        raise SinkscopeError(f"{file.name} is empty: give {expected}")
    yield from ((f"{file.name} row {number}", row) for number, row in enumerate(rows, 1))
