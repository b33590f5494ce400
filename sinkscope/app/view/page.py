"""The page of a view: one file with the module, the style and the data, which fetches nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from html import escape
from importlib.resources import files
from string import Template

from sinkscope.files.plain import visible
from sinkscope.results.result import Result

START = "\nstart(document);\n"
"""The last line of the module in a page; a notebook imports the module without it."""


SCRIPTS = ("drawing.js", "panels.js", "text.js", "circuit.js", "view.js", "start.js")
"""The parts of the module, in their order; a page holds them as one."""


@cache
def source(*names: str) -> str:
    """Return the text of files beside this one, one after the other."""
    folder = files("sinkscope.app.view")
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def view_page(view: Result | None, title: str) -> str:
    """Return the page.

    Args:
        view: The `ModelView` that is shown. None: the page asks the server that it came from.
        title: Name of the model.
    """
    style, script = source("view.css"), source(*SCRIPTS) + START
    connect = "'self'" if view is None else "'none'"
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src {connect}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    data = "null" if view is None else json.dumps(view.to_dict(), allow_nan=False, separators=(",", ":"))
    return Template(source("page.html")).substitute(
        policy=policy,
        title=escape(visible(title)),
        style=style,
        data=data.replace("<", "\\u003c"),  # no token of a text can end the element
        module=script,
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
