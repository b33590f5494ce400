"""The HTML of a report: text is escaped, data stands in blocks of JSON, and nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from sinkscope import __version__
from sinkscope._plain import visible
from sinkscope.errors import SinkscopeError
from sinkscope.html import entries
from sinkscope.report.record import Record
from sinkscope.results import Result

_PICTURE = 4 << 20  # bytes of a PNG beside a record: a larger one is left out
# plotly renders a few tags; any other came from a file, and shall be read
_TAG = re.compile(r"<(?!/?(?:b|i|u|s|br|em|strong|sub|sup|extra)\s*/?>)", re.I)
_SCRIPTS = re.compile(r"<script>(.*?)</script>", re.S)  # those that run; blocks of data have a type


@dataclass(frozen=True)
class Section:
    """A result as it stands in the report.

    Attributes:
        kind: of the result.
        model: name of the model, "" where there is none.
        file: where it was read, as it is shown.
        html: the section without its heading, everything escaped.
    """

    kind: str
    model: str
    file: str
    html: str


def section(found: Result | Record, file: str, path: Path) -> Section:
    """One result: how it was made, what it says, its tables, its figure, and model, settings and provenance.

    Args:
        found: the result.
        file: how its file is called.
        path: the file itself; the PNG beside a record is shown.
    """
    if isinstance(found, Record):
        lists, shown = found.lists, _picture(path.with_suffix(".png")) + _tables(found)
    else:
        data = found.to_dict()
        lists = {name: data[name] for name in ("model", "settings", "provenance")}
        shown = found.to_html() + _figure(found)
    model = lists.get("model", {}).get("name", "")
    parts = [_made(file, lists["provenance"]), shown]
    parts += [f"<details><summary>{name}</summary><dl>{entries(v)}</dl></details>" for name, v in lists.items()]
    return Section(found.kind, str(model), file, _clean("\n".join(parts)))


def document(name: str, sections: Sequence[Section], skipped: Sequence[tuple[str, str]]) -> str:
    """The whole file: contents, sections, what was left out, and plotly.js once.

    Args:
        name: what the report is of.
        sections: in their order.
        skipped: names of files and why they are not in it.
    """
    from plotly.io import templates
    from plotly.offline import get_plotlyjs

    themes = {mode: templates[f"plotly_{mode}"].to_plotly_json() for mode in ("white", "dark")}
    body = "".join(_numbered(i, one) for i, one in enumerate(sections, 1))
    drawn = any('<div class="plot"' in one.html for one in sections)
    scripts = [*([get_plotlyjs()] if drawn else []), _asset("page.js")]
    ours = "".join(f"<script>{script}</script>\n" for script in scripts)
    allowed = " ".join(dict.fromkeys(map(_hash, [*scripts, *_SCRIPTS.findall(body)])))
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {allowed}"
    count = f"{len(sections)} result{'s' if len(sections) != 1 else ''}"
    left = f"{len(skipped)} file{'s' if len(skipped) != 1 else ''} left out"
    about = f'{count}, <a href="#skipped">{left}</a>' if skipped else count
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{escape(name)}: {count}</title>\n'
        f"<style>{_asset('page.css')}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(name)}</h1><p>{about} · sinkscope {escape(__version__)}</p>"
        "<noscript><p>Figures need JavaScript; tables are whole without.</p></noscript></header>\n"
        f"{_contents(sections, skipped)}\n<main>\n{body}{_skipped(skipped)}</main>\n"
        f'<script type="application/json" id="themes">{_inert(_compact(themes))}</script>\n{ours}</body>\n</html>\n'
    )


def _compact(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _inert(text: str) -> str:
    """JSON that may stand in a `<script>`: nothing in it can end the block or begin a comment."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _numbered(number: int, one: Section) -> str:
    model = f" <small>{_text(one.model)}</small>" if one.model else ""
    return f'<section id="r{number}">\n<h2>{_text(one.kind)}{model}</h2>\n{one.html}\n</section>\n'


def _contents(sections: Sequence[Section], skipped: Sequence[object]) -> str:
    items = "".join(
        f'<li><a href="#r{i}">{_text(one.kind)} <small>{_text(one.file)}</small></a></li>'
        for i, one in enumerate(sections, 1)
    )
    last = '<li><a href="#skipped">left out</a></li>' if skipped else ""
    return f'<nav aria-label="Contents"><ol>{items}{last}</ol></nav>'


def _skipped(skipped: Sequence[tuple[str, str]]) -> str:
    if not skipped:
        return ""
    items = "".join(f"<li><b>{_text(file)}</b>: {_text(reason)}</li>" for file, reason in skipped)
    return f'<section id="skipped">\n<h2>Left out</h2>\n<ul>{items}</ul>\n</section>\n'


def _made(file: str, made: Mapping[str, Any]) -> str:
    """The file, what it took to make it, and the command, as far as the provenance knows."""
    argv = [str(word) for word in made.get("argv") or ()]
    if argv and argv[0].endswith("__main__.py"):
        argv[0] = "sinkscope"
    command = f"<code>{escape(shlex.join(argv))}</code>" if len(argv) > 1 else ""
    facts = [file, *(str(made[key]) for key in ("device", "dtype") if made.get(key))]
    if isinstance(seconds := made.get("seconds"), int | float):
        facts.append(f"{seconds:.3g} s" if seconds < 1000 else f"{seconds / 60:.0f} min")
    if isinstance(peak := made.get("peak_memory_bytes"), int):
        facts.append(f"{peak / 1e9:.2g} GB")
    if made.get("seed") is not None:
        facts.append(f"seed {made['seed']}")
    return f'<p class="made">{_text(" · ".join(facts))}<br>{command}</p>'


def _figure(result: Result) -> str:
    """The figure as JSON, without its template: each page has one of light and one of dark."""
    try:
        figure = result.figure()
    except SinkscopeError:  # not every kind has a drawing
        return ""
    # Six digits are more than a screen has pixels, and a third of the file.
    drawn = json.loads(str(figure.to_json()), parse_float=lambda number: float(f"{float(number):.6g}"))
    layout = drawn["layout"]
    layout.pop("template", None)
    height = int(layout.setdefault("height", 480))
    layout.setdefault("width", 1000)
    text = _TAG.sub("&lt;", _compact({"data": drawn["data"], "layout": layout}))
    return (
        f'<div class="plot" style="min-height:{height}px"><script type="application/json">{_inert(text)}</script></div>'
    )


def _picture(path: Path) -> str:
    """The PNG beside a record, which has no other drawing."""
    if not path.is_file() or path.stat().st_size > _PICTURE:
        return ""
    content = path.read_bytes()
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        return ""
    data = base64.b64encode(content).decode()
    return f'<div class="picture"><img alt="{_text(path.name)}" src="data:image/png;base64,{data}"></div>'


def _tables(record: Record) -> str:
    parts: list[str] = []
    for table in record.tables():
        left = f" (the first {len(table.rows):,} of {table.total:,} rows)" if len(table.rows) < table.total else ""
        if table.title or left:
            parts.append(f"<h3>{escape(table.title + left)}</h3>")
        rows = "".join(f"<tr>{_cells('td', line)}</tr>" for line in table.rows)
        parts.append(f"<table><thead><tr>{_cells('th', table.head)}</tr></thead><tbody>{rows}</tbody></table>")
    return "\n".join(parts)


def _cells(tag: str, cells: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)


def _text(text: str) -> str:
    return escape(visible(text))


def _clean(html: str) -> str:
    """Control characters, which HTML does not know, written out."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: f"\\x{ord(m[0]):02x}", html)


def _hash(script: str) -> str:
    """What lets a browser run just this script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return (files("sinkscope.report") / name).read_text(encoding="utf-8")
