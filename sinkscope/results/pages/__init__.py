"""The page of results: one self-contained HTML file of sections. All text is escaped, and nothing is fetched."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib import import_module
from importlib.resources import files
from itertools import groupby
from string import Template
from typing import Any

from sinkscope import __version__
from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import visible, with_strings

# Plotly renders a few tags. Drawings need those of a new line and of its hover boxes; any other, such as the BOS token
# <s>, comes from a file and is shown as text.
_TAG = re.compile(r"<(?!br>|/?extra>|b>%\{hovertext\}</b>)(?!(?<=%\{hovertext\}<)/b>)")
DRAWN = {"bar", "box", "contour", "heatmap", "histogram", "histogram2d", "image", "pie", "scatter", "violin"}
"""What the part of plotly.js in this folder draws."""


@dataclass(frozen=True)
class Section:
    """A result on a page.

    Attributes:
        heading: Its heading, escaped.
        html: What stands below; everything in it is escaped.
        about: What it is about, such as a model: in the contents, a title above all sections about it.
        conclusion: What the contents say of it.
    """

    heading: str
    html: str
    about: str = ""
    conclusion: str = ""


def folded(one: Section, sentence: str) -> Section:
    """Return the section closed, with a sentence shown."""
    return replace(one, html=closed(sentence, one.html))


def closed(words: str, html: str) -> str:
    """Return HTML below words that open it."""
    return f"<details><summary>{text(words)}</summary>{html}</details>"


def definitions(meanings: Mapping[str, str]) -> str:
    """Return names with what each is, as a list of HTML."""
    rows = [f"<dt>{text(name)}</dt><dd>{text(meaning)}</dd>" for name, meaning in meanings.items()]
    return f"<dl>{''.join(rows)}</dl>"


def document(
    heading: str,
    sections: Sequence[Section],
    about: str = "",
    *,
    kind: str = "report",
    first: str = "",
) -> str:
    """Make the whole page: contents, sections, and plotly.js once.

    Args:
        heading: Subject of the page.
        sections: The sections, in order.
        about: A few words below the heading.
        kind: What an earlier page must say so that this one may replace it.
        first: HTML above the contents, fully escaped.
    """
    body: list[str] = []
    for number, one in enumerate(sections):
        title = ""
        if about or len(sections) > 1:  # a page with one result has its name as the heading
            title = f"<h2>{one.heading}</h2>"
        body.append(f'<section id="r{number}">\n{title}{one.html}\n</section>')
    words = f"sinkscope {__version__}"
    if about:
        words = f"{text(about)} · {words}"
    html = "\n".join(body)
    plotly, figures = "", ""
    if 'class="plot' in html:
        plotly = f"<script>{_file('plotly-cartesian.min.js')}</script>"
        figures = f"<script>{_file('figures.js')}</script>"
    template = Template(_file("page.html"))
    return template.substitute(
        kind=kind,
        title=text(heading),
        heading=text(heading),
        about=words,
        first=first,
        contents=_contents(sections),
        plotly=plotly,
        body=html,
        figures=figures,
    )


def _contents(sections: Sequence[Section]) -> str:
    """Links to the sections with what they conclude, by what they are about; nothing for a single section."""
    if len(sections) < 2:
        return ""
    lists: list[str] = []
    for about, group in groupby(enumerate(sections), key=lambda numbered: numbered[1].about):
        lines: list[str] = []
        for number, one in group:
            said = f": {text(one.conclusion)}" if one.conclusion else ""
            lines.append(f'<li><a href="#r{number}">{one.heading}</a>{said}</li>')
        title = f"<h2>{text(about)}</h2>" if about else ""
        lists.append(f"{title}<ul>{''.join(lines)}</ul>")
    return f'<nav aria-label="Contents">{"".join(lists)}</nav>'


def _file(name: str) -> str:
    """The text of a file of this folder."""
    return (files("sinkscope.results.pages") / name).read_text(encoding="utf-8")


def text(words: str) -> str:
    """Return words as HTML; control characters become visible escapes."""
    return escape(visible(words))


def plot(figure: Any, file: str = "") -> str:
    """Return a plotly figure as a part of a page.

    Args:
        figure: What is drawn; its lines and points become SVG, which every browser shows.
        file: What tells it from the same figure of another file.
    """
    for one in figure.data:
        if one.type not in DRAWN:
            raise SinkscopeError(f"a page draws no {one.type}: give a figure of {', '.join(sorted(DRAWN))}")
    as_text = with_strings(json.loads(figure.to_json()), lambda text: visible(_TAG.sub("&lt;", text)))
    drawing = json.dumps(as_text, separators=(",", ":"))
    drawing = drawing.replace('"type":"scattergl"', '"type":"scatter"')
    name = f"plot-{hashlib.sha256((file + drawing).encode(errors='replace')).hexdigest()[:12]}"
    safe = import_module("plotly.io").from_json(drawing, skip_invalid=True)
    safe.layout.template.data.scattergl = None
    safe.update_layout(width=None)  # it takes the width of the page
    config = {"displaylogo": False}
    html = safe.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=config)
    return f'<div class="plot">{html}</div>'
