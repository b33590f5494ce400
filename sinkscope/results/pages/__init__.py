"""Pages of results, made of templates in which every value is escaped. A page is one HTML file, and fetches nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import groupby
from operator import attrgetter
from typing import Any

from sinkscope import __version__
from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import visible
from sinkscope.results.notation import setting_text
from sinkscope.results.table import in_line, measured

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src 'unsafe-inline'"
"""What a browser lets a page of results do."""
DRAWN = {"bar", "box", "contour", "heatmap", "histogram", "histogram2d", "image", "pie", "scatter", "violin"}
"""What the part of plotly.js in this folder draws."""
# Plotly renders a few tags. Drawings need those of a new line and of its hover boxes; any other, such as the BOS token
# <s>, comes from a file and is shown as text.
_TAG = re.compile(r"<(?!br>|/?extra>|b>%\{hovertext\}</b>)(?!(?<=%\{hovertext\}<)/b>)")
_ESCAPED = re.compile(r'"[^"\\]*\\(?:[^"\\]|\\.)*"')
"""A string of ASCII JSON with an escape; the others have neither a tag, in JSON of plotly, nor a control character."""


@dataclass(frozen=True)
class Section:
    """A result on a page.

    Attributes:
        heading: Its heading.
        html: What stands below; everything in it is escaped.
        about: What it is about, such as a model: in the contents, a title above all sections about it.
        conclusion: What the contents say of it.
        file: Its file, which stands beside the heading.
        closed: Whether only the conclusion is seen until it is opened.
    """

    heading: str
    html: str
    about: str = ""
    conclusion: str = ""
    file: str = ""
    closed: bool = False


def render(name: str, **values: Any) -> str:
    """Return a template with its values, which are escaped; control characters become visible escapes.

    Args:
        name: The template, as a path below the folder of the package.
        values: Its values.
    """
    return visible(_templates().get_template(name).render(values))


@cache
def _templates() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # which only pages need

    loader = PackageLoader("sinkscope", "")
    made: Any = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.globals.update(source=source, setting_text=setting_text, measured=measured, in_line=in_line)
    made.filters.update(groupby_in_order=lambda rows, name: groupby(rows, attrgetter(name)))
    return made


def source(*names: str) -> str:
    """Return the joined text of files of the package, such as scripts."""
    return "\n".join((files("sinkscope") / name).read_text(encoding="utf-8") for name in names)


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
    return render(
        "results/pages/report.html",
        kind=kind,
        policy=POLICY,
        title=heading,
        about=about,
        version=__version__,
        plotted=any('class="plot' in section.html for section in sections),
        first=first,
        sections=sections,
    )


def plot(figure: Any) -> str:
    """Return a plotly figure as a part of a page.

    Args:
        figure: What is drawn; its lines and points become SVG, which every browser shows.
    """
    for trace in figure.data:
        if trace.type not in DRAWN:
            raise SinkscopeError(f"a page draws no {trace.type}: give a figure of {', '.join(sorted(DRAWN))}")
    drawing = _ESCAPED.sub(_shown, figure.to_json(engine="json")).replace('"type":"scattergl"', '"type":"scatter"')
    return render("results/pages/plot.html", drawing=drawing)


def _shown(string: re.Match[str]) -> str:
    """A string of JSON as a page shows it."""
    text = visible(_TAG.sub("&lt;", json.loads(string[0])))
    return json.dumps(text).replace("<", "\\u003c")  # it stands in a script, which no text ends
