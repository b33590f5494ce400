"""A measurement's JSON and its drawing, side by side in one folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sinkscope.console import note
from sinkscope.errors import SinkscopeError
from sinkscope.html import document, save_document, write_png
from sinkscope.output import write_atomic
from sinkscope.report import record_section


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
    shown = record_section(data, path.name, path, drawn)
    save_document(folder / f"{name}.html", document(name.replace("_", " "), [shown] if shown else []))
    try:
        write_png(drawn, folder / f"{name}.png")
    except SinkscopeError as error:
        note(f"no PNG: {error}")
