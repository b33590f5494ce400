"""The picture beside a measurement's JSON, and tables of pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from experiments.record import Row
from sinkscope.files.envelope import kinds
from sinkscope.files.output import write_atomic
from sinkscope.results.console import note
from sinkscope.results.result import Result
from sinkscope.results.style import WIDTH_OF_FRAME


def draw(file: Path, figure: Callable[[Row], Any]) -> None:
    """Draw what a record holds as NAME.png beside NAME.json, where a browser can."""
    try:
        write_png(figure(json.loads(file.read_text())), file.with_suffix(".png"))
    except (ValueError, RuntimeError) as error:  # kaleido or the browser is missing
        note(f"no PNG: {error}")


def write_png(figure: Any, path: Path) -> None:
    """Write a picture of a figure, in its own size."""
    width = (figure.layout.meta or {}).get("width", WIDTH_OF_FRAME)
    write_atomic(path, figure.to_image(format="png", width=width, scale=2))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def put_table(page: Path, module: str, made: str) -> None:
    """Replace what stands in a page between the two comments that name a module of `experiments`."""
    text = page.read_text(encoding="utf-8")
    begin = f"<!-- made by experiments.{module} -->"
    end = f"<!-- end of experiments.{module} -->"
    before, found, rest = text.partition(begin)
    _, ends, after = rest.partition(end)
    if not found or not ends:
        raise SystemExit(f"{page}: expected a part between {begin} and {end}")
    write_atomic(page, f"{before}{begin}\n\n{made}\n\n{end}{after}")


def pictures(folder: Path) -> list[Path]:
    """The pictures of a folder that were drawn from a JSON file beside them."""
    return sorted(path for path in folder.glob("*.png") if path.with_suffix(".json").is_file())


def figure_of(picture: Path) -> Any:
    """The plotly figure of a picture, from the JSON beside it: of a result, or of the script that drew it."""
    file = picture.with_suffix(".json")
    data = json.loads(file.read_text(encoding="utf-8"))
    if data["kind"] in kinds():
        return Result.load(file).figure()
    argv = data["provenance"]["argv"]
    return import_module(argv[argv.index("-m") + 1]).figure(data)
