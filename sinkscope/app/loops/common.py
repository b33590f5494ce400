"""What checking, following and the proxy share: the settings of the monitor, names of inputs, and lines of JSON."""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from sinkscope.errors import SinkscopeError
from sinkscope.files.opener import open_regular, reason_of
from sinkscope.files.output import path_of, read_json
from sinkscope.files.plain import in_one_line
from sinkscope.files.records import checked_value
from sinkscope.loops import MonitorSettings, PaperSettings
from sinkscope.loops.text.copies import Cut
from sinkscope.loops.text.monitor import Settings

Variant = Literal["repeats", "full"]


def monitor_of(settings: str | None, variant: Variant, cut: Cut) -> Settings:
    """Return the settings of the monitor.

    Args:
        settings: A file with settings, a JSON object.
        variant: Which rule decides.
        cut: Which repetitions are loops.

    Raises:
        SinkscopeError: A setting is not valid, or has no effect.
    """
    data: dict[str, Any] = {}
    if settings is not None:
        expected = 'expected an object such as {"window": 128}'
        data = checked_value(dict[str, Any], read_json(settings, expected), settings)
    if cut != "auto":
        if variant != "repeats":
            raise SinkscopeError(f"--cut has no effect with --variant {variant}: leave it out")
        data["cut"] = cut
    return PaperSettings(**data) if variant == "full" else MonitorSettings(**data)


def name_of(file: str) -> str:
    """Return the name of a file, for the result and errors."""
    return "standard input" if file == "-" else in_one_line(Path(file).name)


def open_bytes(file: str) -> Any:
    """Open a file, or standard input for "-", to read bytes.

    Raises:
        SinkscopeError: The file cannot be opened, or ends in .gz and is no gzip.
    """
    if file == "-":
        return getattr(sys.stdin, "buffer", io.BytesIO())  # there is none if it is closed
    remedy = "give another path, or - for standard input"
    source: Any = open_regular(path_of(file, remedy), file, remedy)
    try:
        begin = source.peek(2)[:2]  # what can be opened and not read says so here
        if file.endswith(".gz") and begin != b"\x1f\x8b":
            raise gzip.BadGzipFile("it is no gzip")
        return source
    except OSError as error:
        raise SinkscopeError(f"cannot read {file}: {reason_of(error)}; {remedy}") from None


@contextmanager
def json_writer(path: str | None) -> Iterator[Callable[[Mapping[str, Any]], None] | None]:
    """Give what writes a line of JSON at once, to a file or, for "-", to standard output; None without a path."""
    if path is None:
        yield None
        return
    with nullcontext(sys.stdout) if path == "-" else open(path, "w", encoding="utf-8") as file:
        yield lambda told: print(json.dumps(told), file=file, flush=True)
