"""Runs the notebooks of docs/notebooks and stores their outputs, so that readers need not run them.

python -m tools.notebooks [01 02 ...] [--out docs/notebooks]

A figure is stored as plotly's data, which Jupyter and the site draw and which one can zoom, and as a small PNG for
readers that run no scripts. No machine names and no times are stored, so the same code stores the same bytes.
`tests/docs/test_notebooks.py` compares them with the code.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import nbformat
import plotly.io
from nbclient import NotebookClient

from experiments.script import run
from sinkscope.errors import SinkscopeError
from sinkscope.files.output import write_atomic

FOLDER = Path(__file__).parents[1] / "docs/notebooks"
PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
FOLDED = {"jupyter": {"source_hidden": True}, "tags": ["checks"]}  # of the last cell, which holds the checks
WORD = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?|[^\d\s]+")
"""A number, or a word without digits."""
LARGEST = 300_000  # bytes of a notebook
MODEL = 'MODEL = None  # or "../../real/smollm2-135m.gguf"'
"""The first code cell of a notebook, which chooses the model; None: the one in the package."""


def ran(path: Path, model: Path | None = None) -> Any:
    """Run a notebook and return it with all outputs; a cell that fails raises.

    Args:
        path: The notebook, which is left as it is.
        model: What to run it with instead of the model in the package.
    """
    notebook: Any = nbformat.read(path, as_version=4)
    if model is not None:
        chosen = next(cell for cell in notebook.cells if cell.source == MODEL)
        chosen.source = f"MODEL = {str(model)!r}"
    environment = {**os.environ, "PLOTLY_RENDERER": "plotly_mimetype", "OMP_NUM_THREADS": "1"}
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=resources)
    client.execute(env=environment)
    return notebook


def executed(path: Path) -> Any:
    """Run a notebook and return it with its outputs as they are stored."""
    notebook = ran(path)
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            kept = [output for output in cell.outputs if output.get("name") != "stderr"]
            kept = [output for output in kept if WIDGET not in output.get("data", {})]  # progress
            cell.outputs = [_stored(output) for output in kept]
    notebook.cells[-1].metadata = FOLDED
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {
        "kernelspec": kernel,
        "language_info": {"name": "python"},
    }
    return notebook


def _stored(output: Any) -> Any:
    """An output with a PNG beside an interactive figure, and without what a page does not show."""
    output.pop("metadata", None)
    data = output.get("data")
    if data is not None:
        output["metadata"] = {}
        if PLOTLY in data:
            shown = {name: data[PLOTLY][name] for name in ("data", "layout")}
            output["data"] = {PLOTLY: shown, "image/png": picture_of(data[PLOTLY]), "text/plain": "<Figure>"}
        elif "text/html" in data:  # the plain form of a result holds times and paths
            kind = re.match(r"\w+(?=\()", data["text/plain"])
            output["data"] = {"text/html": data["text/html"], "text/plain": kind[0] if kind else "table"}
    return output


def picture_of(figure: Any) -> str:
    """A small PNG of plotly's data, in base64."""
    drawn = plotly.io.from_json(json.dumps(figure), skip_invalid=True)
    drawn.update_layout(template="plotly_white")
    return base64.b64encode(fewer_colours(drawn.to_image(format="png", width=900))).decode()


def fewer_colours(picture: bytes) -> bytes:
    """A PNG in 256 colours, which has about a third of the bytes."""
    images: Any = import_module("PIL.Image")
    smaller = io.BytesIO()
    images.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(smaller, "png", optimize=True)
    return smaller.getvalue()


def text_of(notebook: Any) -> list[str]:
    """Return what the cells say, without figures and times.

    What a cell prints is one text, which a kernel sends in pieces of any size.
    """
    found: list[str] = []
    for cell in notebook.cells:
        printed = ""
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            printed += output.get("text", "")
            said = data.get("text/html") or data.get("text/plain", "")
            if data:
                found.append(said)
        found.append(printed)
    return [re.sub(r"\d[\d.,]* ?(s|ms|seconds|MB|GB)\b", "TIME", said) for said in found]


def apart(one: Sequence[str], other: Sequence[str]) -> str:
    """Return where two notebooks say something else, or nothing: of numbers the last digit may differ by one.

    Processors add in different orders.
    """
    if len(one) != len(other):
        return f"{len(one)} outputs became {len(other)}"
    for said, now in zip(one, other, strict=True):
        words, words_now = (WORD.findall(text) for text in (said, now))
        if len(words) != len(words_now):
            return f"{said!r} became {now!r}"
        for word, word_now in zip(words, words_now, strict=True):
            if word != word_now and not near(word, word_now):
                return f"{word!r} became {word_now!r} in {now!r}"
    return ""


def near(word: str, now: str) -> bool:
    """Whether two words are numbers that rounding explains: off by one in the last digit, or by one in a hundred."""
    try:
        one, other = (float(text.replace(",", "")) for text in (word, now))
    except ValueError:
        return False
    last = 10.0 ** -len(word.partition(".")[2].partition("e")[0])
    smallest = 1e-4  # what is nearly zero is rounding
    return abs(one - other) <= max(1.01 * last, abs(one) / 100) or max(abs(one), abs(other)) < smallest


def check(name: str, text: str) -> None:
    """Refuse a notebook that is too large, or that names folders of this machine.

    Raises:
        SinkscopeError: it does.
    """
    if len(text) > LARGEST:
        raise SinkscopeError(f"{name} has {len(text)} bytes, expected at most {LARGEST}: show fewer or smaller figures")
    for place in (str(Path.home()), tempfile.gettempdir(), str(FOLDER.parents[1])):
        if len(place) > 1 and place + os.sep in text:
            raise SinkscopeError(f"{name} names the folder {place}: print base names or relative paths in it")


def main(numbers: Sequence[str] = (), *, out: Path = FOLDER) -> None:
    """Make what the module describes.

    Args:
        numbers: Beginnings of names, such as 01; none: all notebooks.
        out: Folder to write to.
    """
    for path in sorted(FOLDER.glob("*.ipynb")):
        if numbers and not path.name.startswith(tuple(numbers)):
            continue
        started = time.perf_counter()
        text = nbformat.writes(executed(path), indent=1) + "\n"
        check(path.name, text)
        write_atomic(out / path.name, text)
        print(f"{path.name}: {len(text):,} bytes, {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    run(main)
