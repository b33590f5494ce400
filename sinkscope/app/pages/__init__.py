"""Write results as a self-contained HTML file or as a PNG.

All text is escaped, data is in blocks of JSON, only the page's own scripts may run, and nothing is fetched.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib
import importlib.util
import io
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from sinkscope import __version__
from sinkscope.errors import SinkscopeError
from sinkscope.files.output import write_atomic, write_output
from sinkscope.files.plain import visible
from sinkscope.files.result import Result

ENVELOPE = ("model", "settings", "provenance")
# Plotly renders a few tags; any other tag comes from a file and is shown as text.
_TAG = re.compile(r"<(?!/?(?:b|i|u|s|br|em|strong|sub|sup|extra)\s*/?>)", re.I)
_BESIDE = '<template id="plotly" data-src='
_SCRIPTS = re.compile(r"<script>(.*?)</script>", re.S)  # scripts that run; blocks of data have a type attribute


@dataclass(frozen=True)
class Section:
    """A result on a page.

    Attributes:
        kind: Kind of the result.
        model: Name of the model, or "" if there is none.
        file: Displayed name of the result's file, or "" if it was not read from one.
        html: The section without its heading; everything in it is escaped.
    """

    kind: str
    model: str
    file: str
    html: str


def page(result: Result, *more: Result, assets: bool = False) -> str:
    """Make one HTML document with summary, table, figures, settings and provenance; it contains plotly.js.

    All text is escaped because names, tokens and settings come from files. `more` results follow the first.
    """
    beside = result.beside()
    about = f"{len(beside)} results" if beside else ""
    sections = [result_section(one) for one in (result, *beside, *more)]
    return document(f"{result.kind}: {result.model.name}", sections, about, assets=assets)


def save_html(
    result: Result, path: str | os.PathLike[str], *more: Result, assets: bool = False, force: bool = False
) -> Path:
    """Write `page(result, *more)` to `path`, completely or not at all.

    Args:
        result: The result to show.
        path: The file.
        more: Results that follow the first.
        assets: Whether to store plotly.js beside the page, once for all pages of the folder, and not inside it.

    Raises:
        SinkscopeError: The file cannot be written.
    """
    return save_document(path, page(result, *more, assets=assets), force=force)


def save_document(path: str | os.PathLike[str], text: str, *, force: bool = False) -> Path:
    """Write a page, completely or not at all, and plotly.js beside it if the page refers to it there.

    An earlier page may be replaced.

    Raises:
        SinkscopeError: The file cannot be written, or it exists and is not a page.
    """
    # A token may contain a lone surrogate, which UTF-8 cannot encode.
    written = write_output(path, text.encode(errors="backslashreplace"), force=force)
    if _BESIDE in text and not (library := written.with_name(_library_name())).is_file():
        write_atomic(library, importlib.import_module("plotly.offline").get_plotlyjs())
    return written


def _library_name() -> str:
    """Name of the plotly.js file that pages of a folder share."""
    return f"plotly-{importlib.import_module('plotly').__version__}.min.js"


def result_section(result: Result, file: str = "") -> Section:
    """The section of a result: its text, table and figure, how it was made, and its settings and provenance."""
    data = result.to_dict()
    return section(result.kind, file, {name: data[name] for name in ENVELOPE}, result.to_html() + _figure(result))


def section(kind: str, file: str, lists: Mapping[str, Mapping[str, Any]], shown: str) -> Section:
    """Make a section of a page.

    Args:
        kind: Kind of the result.
        file: Displayed name of its file.
        lists: Model, settings and provenance, as far as they exist.
        shown: HTML in which everything is escaped.
    """
    details = (
        f"<details><summary>{name}</summary><dl>{_entries(values)}</dl></details>" for name, values in lists.items()
    )
    html = "\n".join([shown, _made(file, lists["provenance"]), *details])
    # HTML does not allow control characters, so they are shown as escapes.
    clean = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: f"\\x{ord(m[0]):02x}", html)
    return Section(kind, str(lists.get("model", {}).get("name", "")), file, clean)


def document(
    heading: str,
    sections: Sequence[Section],
    about: str = "",
    skipped: Sequence[tuple[str, str]] = (),
    *,
    assets: bool = False,
) -> str:
    """Make the whole page: contents, sections, files that were left out, and plotly.js once.

    Args:
        heading: Subject of the page.
        sections: The sections, in order.
        about: A few words beside the heading.
        skipped: Names of files that were left out, each with the reason.
        assets: Whether plotly.js is beside the page, where `save_document` writes it.
    """
    from plotly.io import templates

    themes = {mode: templates[f"plotly_{mode}"].to_plotly_json() for mode in ("white", "dark")}
    # A page with one result has the result's name as its heading.
    heads = [f"<h2>{text(one.kind)} <small>{text(one.model)}</small></h2>\n" for one in sections]
    if not about and len(sections) == 1:
        heads = [""]
    parts = enumerate(zip(heads, sections, strict=True), 1)
    body = "".join(f'<section id="r{i}">\n{head}{one.html}\n</section>\n' for i, (head, one) in parts)
    places = [(f"r{i}", one.kind, one.file) for i, one in enumerate(sections, 1)]
    words = [about, f"sinkscope {__version__}"] if about else []
    if skipped:
        left = "".join(f"<li><b>{text(file)}</b>: {text(reason)}</li>" for file, reason in skipped)
        body += f'<section id="skipped">\n<h2>Left out</h2>\n<ul>{left}</ul>\n</section>\n'
        places.append(("skipped", "left out", ""))
        words[0] += f', <a href="#skipped">{len(skipped)} file{"s" if len(skipped) != 1 else ""} left out</a>'
    links = (f'<li><a href="#{to}">{text(kind)} <small>{text(file)}</small></a></li>' for to, kind, file in places)
    library, hashes = _plotly(assets) if '<div class="plot"' in body else ("", [])
    script = _asset("page.js")
    # A script that is allowed by its hash may load plotly.js from beside the page.
    allowed = [*hashes, *map(_hash, [script, *_SCRIPTS.findall(body)]), *(["'strict-dynamic'"] if assets else [])]
    return Template(_asset("page.html")).substitute(
        allowed=" ".join(dict.fromkeys(allowed)),
        kind="report" if about else sections[0].kind,
        title=escape(f"{heading}: {about}" if about else heading),
        heading=escape(heading),
        about=" · ".join(words),
        contents=f'<nav aria-label="Contents"><ol>{"".join(links)}</ol></nav>' if about else "",
        style=_asset("page.css"),
        body=body,
        themes=_inert(json.dumps(themes, separators=(",", ":"))),
        plotly=library,
        script=script,
    )


def _plotly(beside: bool) -> tuple[str, list[str]]:
    """The part of the page that provides plotly.js, compressed to a third, and the hashes of its scripts."""
    if beside:
        return f'{_BESIDE}"{_library_name()}"></template>\n', []
    packed, hashed = _packed()
    return f'<script type="application/gzip" id="plotly">{packed}</script>\n', [hashed]


@cache
def _packed() -> tuple[str, str]:
    """The compressed plotly.js and its hash, made once for all pages of a process."""
    library: str = importlib.import_module("plotly.offline").get_plotlyjs()
    return base64.b64encode(gzip.compress(library.encode(), mtime=0)).decode(), _hash(library)


def text(words: str) -> str:
    """Words as HTML; control characters become visible escapes."""
    return escape(visible(words))


def _entries(data: Mapping[str, object]) -> str:
    """Names and values as the inside of a `<dl>`, everything escaped."""

    def show(value: object) -> str:
        if isinstance(value, list):
            return " ".join(map(str, value))
        if isinstance(value, dict):
            return ", ".join(f"{k} {v}" for k, v in value.items())
        return "-" if value is None else str(value)

    return "".join(f"<dt>{escape(str(key))}</dt><dd>{escape(show(value))}</dd>" for key, value in data.items())


def _made(file: str, made: Mapping[str, Any]) -> str:
    """The file, the time and memory it took, and the command, as far as the provenance knows them."""
    argv = [str(word) for word in made.get("argv") or ()]
    if argv and argv[0].endswith("__main__.py"):
        argv[0] = "sinkscope"
    command = f"<code>{escape(shlex.join(argv))}</code>" if len(argv) > 1 else ""
    facts = [*([file] if file else []), *(str(made[key]) for key in ("device", "dtype") if made.get(key))]
    if isinstance(seconds := made.get("seconds"), int | float) and seconds:
        facts.append(f"{seconds:.3g} s" if seconds < 1000 else f"{seconds / 60:.0f} min")
    if isinstance(peak := made.get("peak_memory_bytes"), int):
        facts.append(f"{peak / 1e9:.2g} GB")
    if made.get("seed") is not None:
        facts.append(f"seed {made['seed']}")
    return f'<p class="made">{text(" · ".join(facts))}<br>{command}</p>'


def _figure(result: Result) -> str:
    try:
        return plot(result.figure())
    except SinkscopeError:  # not every kind has a drawing
        return ""


def plot(figure: Any) -> str:
    """A plotly figure as a part of a page, without its template, because each page has a light and a dark one."""
    # Six digits are more than a screen has pixels, and a third of the file.
    drawn = json.loads(str(figure.to_json()), parse_float=lambda number: float(f"{float(number):.6g}"))
    layout = drawn["layout"]
    layout.pop("template", None)
    layout = {"height": 480, "width": 1000, **layout}
    data = _TAG.sub("&lt;", json.dumps({"data": drawn["data"], "layout": layout}, separators=(",", ":")))
    style = f"min-height:{int(layout['height'])}px"
    return f'<div class="plot" style="{style}"><script type="application/json">{_inert(data)}</script></div>'


def _inert(data: str) -> str:
    """JSON for a `<script>`: nothing in it can end the block or begin a comment."""
    return data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(script: str) -> str:
    """The source expression that lets a browser run only this script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return (files("sinkscope.app.pages") / name).read_text(encoding="utf-8")


def check_png() -> None:
    """Say now, before the work, if no PNG can be made here.

    Raises:
        SinkscopeError: kaleido, Pillow or the browser that draws is missing.
    """
    for module, name in (("kaleido", "kaleido"), ("PIL", "Pillow")):
        if importlib.util.find_spec(module) is None:
            raise SinkscopeError(
                f'a PNG needs {name}: pip install "sinkscope[png]" (and a browser: plotly_get_chrome); '
                "--html always works",
                page="png",
            )
    chromium: Any = importlib.import_module("choreographer.browsers.chromium").Chromium
    if chromium.find_browser(skip_local=False) is None:
        raise SinkscopeError(
            "a PNG needs Chrome or Chromium on this machine: plotly_get_chrome installs one; --html always works",
            page="png",
        )


def save_png(result: Result, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write the figure as a PNG at twice its size on screen, whole or not at all.

    Raises:
        SinkscopeError: there is no kaleido or no browser, it does not start, or the file cannot be written.
    """
    check_png()
    return write_png(result.figure(), path, kind=result.kind, force=force)


def write_png(figure: Any, path: str | os.PathLike[str], *, kind: str = "figure", force: bool = False) -> Path:
    """Write a plotly figure as `save_png` does.

    Raises:
        SinkscopeError: as for `save_png`.
    """
    return write_output(path, png(figure, kind=kind), force=force)


def png(figure: Any, scale: float = 2, most: int = 200_000, kind: str = "figure") -> bytes:
    """A plotly figure as a PNG of at most 256 colours, which is a third of the size and looks the same.

    Args:
        figure: what is drawn.
        scale: pixels of the picture for a pixel of the figure.
        most: bytes; with fewer colours if it needs more, down to 16.

    Raises:
        SinkscopeError: there is no kaleido, no Pillow or no browser, or it does not start.
    """
    check_png()
    image: Any = importlib.import_module("PIL.Image")
    notes: Any = importlib.import_module("PIL.PngImagePlugin").PngInfo()
    notes.add_text("Software", f"sinkscope {kind}")
    try:
        drawn = figure.to_image(format="png", scale=scale)
    except Exception as error:  # a browser can fail in any way
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SinkscopeError(f"the browser made no PNG ({reason}); --html always works", page="png") from error
    packed, pixels = io.BytesIO(), np.asarray(image.open(io.BytesIO(drawn)).convert("RGB")).astype(np.int32)
    codes, places, counts = np.unique(pixels @ (1 << 16, 1 << 8, 1), return_inverse=True, return_counts=True)
    found = np.stack([codes >> 16, codes >> 8 & 255, codes & 255], 1)
    for colours in (256, 64, 16):
        kept = found[np.argsort(-counts)[:colours]]  # a thin line keeps its colour
        nearest = np.array([np.abs(kept - one).sum(1).argmin() for one in found], dtype=np.uint8)
        few, packed = image.fromarray(nearest[places].reshape(pixels.shape[:2])).convert("P"), io.BytesIO()
        few.putpalette(kept.astype(np.uint8).tobytes())
        few.save(packed, "PNG", optimize=True, pnginfo=notes)
        if packed.tell() <= most:
            break
    return packed.getvalue()
