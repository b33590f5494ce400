"""A measurement's JSON and its drawing, side by side in one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sinkscope.console import note
from sinkscope.errors import SinkscopeError
from sinkscope.html import check_png
from sinkscope.output import write_atomic


def save(name: str, text: str, figure: Any, folder: Path) -> None:
    """Write NAME.json, NAME.html, and NAME.png where a browser can draw it: a small figure at twice its size."""
    write_atomic(folder / f"{name}.json", text)
    write_atomic(folder / f"{name}.html", figure.to_html(include_plotlyjs=True, config={"displaylogo": False}))
    try:
        check_png()
        write_atomic(folder / f"{name}.png", figure.to_image(format="png", scale=_scale(figure)))
    except SinkscopeError as error:
        note(f"no PNG: {error}")


def _scale(figure: Any) -> int:
    """Pixels per pixel: files stay below 200 kB."""
    return 2 if (figure.layout.width or 0) * (figure.layout.height or 0) < 600_000 else 1
