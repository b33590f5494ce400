"""A result as one HTML file that needs nothing else, and as a PNG."""

from __future__ import annotations

import importlib
import importlib.util
import os
from html import escape
from pathlib import Path
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.output import write_atomic
from sinkscope.results import Result

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:1420px;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;margin:1em 0}th,td{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:right}
pre{font:14px/1.5 ui-monospace,monospace;white-space:pre-wrap}.figure{overflow-x:auto}
dl{display:grid;grid-template-columns:max-content auto;gap:.1em 1em}dt{color:#666}dd{margin:0;overflow-wrap:anywhere}
"""


def page(result: Result, *more: Result) -> str:
    """One HTML document with summary, table, figures, settings and provenance; plotly.js is inside it.

    All text is escaped: names, tokens and settings come from files. `more` results follow the first.
    """
    title = escape(f"{result.kind}: {result.model.name}")
    parts = [_section(one, first=one is result) for one in (result, *more)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body>{''.join(parts)}</body></html>\n"
    )


def _section(result: Result, *, first: bool) -> str:
    title = escape(f"{result.kind}: {result.model.name}")
    plot = result.figure().to_html(full_html=False, include_plotlyjs=first, config={"displaylogo": False})
    data = result.to_dict()
    lists = "".join(
        f"<details><summary>{name}</summary><dl>{entries(data[name])}</dl></details>"
        for name in ("model", "settings", "provenance")
    )
    return f'<h1>{title}</h1>\n{result.to_html()}\n<div class="figure">{plot}</div>\n{lists}\n'


def entries(data: dict[str, object]) -> str:
    """Names and values as the inside of a `<dl>`, everything escaped."""

    def show(value: object) -> str:
        if isinstance(value, list):
            return " ".join(map(str, value))
        if isinstance(value, dict):
            return ", ".join(f"{k} {v}" for k, v in value.items())
        return "-" if value is None else str(value)

    return "".join(f"<dt>{escape(str(key))}</dt><dd>{escape(show(value))}</dd>" for key, value in data.items())


def save_html(result: Result, path: str | os.PathLike[str], *more: Result) -> Path:
    """Write `page(result, *more)` to `path`, whole or not at all.

    Raises:
        SinkscopeError: the file cannot be written.
    """
    return write_atomic(path, page(result, *more))


def check_png() -> None:
    """Say now, before the work, if no PNG can be made here.

    Raises:
        SinkscopeError: kaleido or the browser it draws with is missing.
    """
    if importlib.util.find_spec("kaleido") is None:
        raise SinkscopeError(
            'a PNG needs kaleido: pip install "sinkscope[png]" (and a browser: plotly_get_chrome); --html always works',
            page="png",
        )
    chromium: Any = importlib.import_module("choreographer.browsers.chromium").Chromium
    if chromium.find_browser(skip_local=False) is None:
        raise SinkscopeError(
            "a PNG needs Chrome or Chromium on this machine: plotly_get_chrome installs one; --html always works",
            page="png",
        )


def save_png(result: Result, path: str | os.PathLike[str]) -> Path:
    """Write the figure as a PNG at twice its size on screen, whole or not at all.

    Raises:
        SinkscopeError: there is no kaleido or no browser, it does not start, or the file cannot be written.
    """
    check_png()
    drawn = result.figure()
    try:
        image = drawn.to_image(format="png", scale=2)
    except Exception as error:  # whatever a browser may say
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SinkscopeError(f"the browser made no PNG ({reason}); --html always works", page="png") from error
    return write_atomic(path, image)
