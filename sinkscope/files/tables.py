"""Rows of CSV and parquet, and files that are packed by gzip: the content says what a file is, and then its name."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import PurePath
from typing import Any, cast

from sinkscope.errors import SinkscopeError
from sinkscope.files.opener import reason_of
from sinkscope.files.plain import parse_json
from sinkscope.files.provenance import install_command

CSV, PARQUET = (".csv", ".tsv"), (".parquet", ".pq")
LONGEST_CELL = 1 << 26  # characters
SEPARATORS = ",;\t|"
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"


def suffix_of(name: str) -> str:
    """Return the ending of a name in lower case, without that of gzip."""
    return PurePath(name.lower().removesuffix(".gz")).suffix


def unpacked(source: Any) -> Any:
    """Return a binary file, or what is packed in it by gzip, also if its name does not say so.

    Args:
        source: A file; one without `peek` is read as it is.

    Raises:
        OSError, EOFError: It cannot be read.
    """
    if type(source) is io.BytesIO:
        source = io.BufferedReader(cast(Any, source))
    while hasattr(source, "peek") and source.peek(2)[:2] == _GZIP:
        source = gzip.GzipFile(fileobj=source)
    return source


def is_parquet(source: Any, name: str) -> bool:
    """Return whether a file is parquet, by its first bytes if they can be looked at."""
    if hasattr(source, "peek"):
        return source.peek(4)[:4] == _PARQUET
    return suffix_of(name) in PARQUET


def rows_of_csv(lines: Iterable[str], name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a CSV whose first line names the columns; the separator is the one that this line has most.

    A cell that holds JSON, such as a list of messages, is that value.

    Raises:
        SinkscopeError: A row is no CSV.
    """
    rest = iter(lines)
    header = next((line for line in rest if line.strip()), "")
    separator = max(SEPARATORS, key=header.count)
    csv.field_size_limit(LONGEST_CELL)
    reader = csv.reader((line for part in ([header], rest) for line in part), delimiter=separator)
    columns: list[str] = []
    try:
        for cells in reader:
            if not columns:
                columns = [column.strip() for column in cells]
            elif cells:
                row: dict[str, Any] = {}
                for column, cell in zip(columns, cells, strict=False):
                    row[column] = _value_of(cell)
                yield row
    except csv.Error as error:
        raise SinkscopeError(f"{name} line {reader.line_num} is no row of a CSV: {error}") from None


def _value_of(cell: str) -> Any:
    """The value of a cell: a list or an object of JSON as such, anything else as a text."""
    if cell[:1] in ("[", "{") and cell.rstrip()[-1:] in ("]", "}"):
        with suppress(ValueError):
            return parse_json(cell)
    return cell


def rows_of_parquet(source: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file.

    Raises:
        SinkscopeError: pyarrow is missing, or the file is damaged.
    """
    if find_spec("pyarrow") is None:
        raise SinkscopeError(f"{name} is parquet, which needs pyarrow: {install_command('parquet')}")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(source if source.seekable() else io.BytesIO(source.read()))
        for batch in file.iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise SinkscopeError(f"{name} is no parquet file: {reason_of(error).splitlines()[0]}") from None
