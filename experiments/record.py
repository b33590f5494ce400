"""The envelope of everything under figures/: data, command, seed, versions."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sinkscope.files.envelope import provenance
from sinkscope.files.output import write_atomic
from sinkscope.files.plain import pathless, plain

STARTED = time.perf_counter()
Row = dict[str, Any]
"""The values of a record, by name."""


def earlier(file: Path) -> Row:
    """The result that a file holds, so that what is not measured again stays; empty if there is no file."""
    if file.is_file():
        return json.loads(file.read_text(encoding="utf-8"))["result"]
    return {}


def read_rows(file: Path) -> list[Row]:
    """The rows of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON lines."""
    write_atomic(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_record(
    file: Path, kind: str, result: Row, settings: Row, *, device: object = "cpu", dtype: object = "float32"
) -> Path:
    """Write the JSON of a measurement, in the shape of every result of sinkscope; returns the file."""
    made = provenance(
        started=STARTED,
        device=device,
        dtype=dtype,
        attention="sdpa",
        bos=True,
        seed=settings.get("seed", 0),
    )
    made = replace(made, argv=("python", "-m", *_module(), *map(pathless, sys.argv[1:])))
    envelope = {
        "schema": 1,
        "kind": kind,
        "result": plain(result),
        "settings": plain(settings),
        "provenance": plain(made),
    }
    write_atomic(file, json.dumps(envelope, indent=1, allow_nan=False) + "\n")
    return file


def _module() -> list[str]:
    spec = sys.modules["__main__"].__spec__
    if spec is not None:
        return [spec.name]
    return []
