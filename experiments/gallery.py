"""The gallery page of the documentation: every picture in figures/, what it shows, and the command that makes it.

python -m experiments.gallery [--out docs/gallery.md]
"""

from __future__ import annotations

import os
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

from experiments.record import Row
from experiments.script import run as run_script
from sinkscope.files.kinds import kind_modules
from sinkscope.files.output import read_json, write_atomic
from sinkscope.results.result import Result

FIGURES = Path(__file__).parents[1] / "figures"
DOCS = FIGURES.with_name("docs")
_HEAD = """---
hide: [toc]
---

# Gallery

A heading leads to the page that explains the picture, and the command below made it. The model is the one in
the package, unless the command names another. Files and folders in a command are outputs of earlier commands. On the
site, a click on a picture opens it as an interactive figure. In a clone, `sinkscope report figures` makes one page of
all results ([report](report.md)), and `python -m experiments.gallery` makes this page.
"""
_OUTPUTS = ("--json", "--html", "--png", "--out", "--resume")


def entry(picture: Path) -> str:
    """Return a cell of the grid: a heading that leads to the page, the picture, and the command."""
    data = read_json(picture.with_suffix(".json"))
    title = picture.stem.replace("_", "-")
    shown = f"![{title}](../figures/{picture.name})"
    return f"<div markdown>\n\n## [{title}]({_page(picture, data)})\n\n{shown}\n\n`{_command(data)}`\n\n</div>"


def figure_of(picture: Path) -> Any:
    """The plotly figure of a picture, from the JSON beside it."""
    data = read_json(picture.with_suffix(".json"))
    if data["kind"] in kind_modules():
        return Result.load(picture.with_suffix(".json")).figure()
    argv = data["provenance"]["argv"]
    return import_module(argv[argv.index("-m") + 1]).figure(data)


def pictures(folder: Path = FIGURES) -> list[Path]:
    """Return the pictures that were drawn from a JSON file beside them."""
    return sorted(path for path in folder.glob("*.png") if path.with_suffix(".json").is_file())


def _page(picture: Path, data: Row) -> str:
    """Return the page of the result, or the first one that shows or names the picture of a script."""
    if data["kind"] in kind_modules():
        return type(Result.load(picture.with_suffix(".json"))).link().removeprefix("docs/")
    pages = [*sorted(DOCS.rglob("*.md")), *sorted(FIGURES.glob("*.md"))]
    texts = {each: each.read_text(encoding="utf-8") for each in pages if each.stem != "gallery"}
    for name in (f"figures/{picture.name})", f"figures/{picture.stem}.", f"]({picture.name})"):
        for path in (path for path, text in texts.items() if name in text):
            return os.path.relpath(path, DOCS)
    raise SystemExit(f"error: no page shows figures/{picture.name}: show it, or delete it")


def gallery() -> str:
    """Return the page: find-sinks first, then in the order of the kinds; kinds without a class come last."""
    order = ["find-sinks", *kind_modules()]
    kinds = {picture: read_json(picture.with_suffix(".json"))["kind"] for picture in pictures()}
    places = {path: order.index(kind) if kind in order else len(order) for path, kind in kinds.items()}
    shown = sorted(kinds, key=lambda path: (places[path], path.name))
    cells = [entry(picture) for picture in shown]
    return "\n\n".join([_HEAD.rstrip(), '<div class="gallery" markdown>', *cells, "</div>"]) + "\n"


def _command(data: Row) -> str:
    """Return the command without the names of the files that it wrote."""
    words = list(data["provenance"]["argv"])
    if words and words[0].endswith("__main__.py"):
        words[0] = "sinkscope"
    kept: list[str] = []
    for i, word in enumerate(words):
        if word not in _OUTPUTS and not (i and words[i - 1] in _OUTPUTS):
            kept.append(word)
    return shlex.join(kept)


def main(*, out: Path = Path("docs/gallery.md")) -> None:
    """Write the page of the documentation."""
    write_atomic(out, gallery())


if __name__ == "__main__":
    run_script(main)
