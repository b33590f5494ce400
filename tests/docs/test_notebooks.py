"""What the notebooks store was made by their code, is small, and names no folder of a machine."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from refusals import refused

from tools import notebooks
from tools.notebooks import FOLDER, LARGEST, MODEL, PLOTLY, check, digest, executed, text_of

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
EVERY = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def stored(path: Path):
    notebook = nbformat.read(path, as_version=4)
    if "sinkscope" not in notebook.metadata:
        pytest.skip(f"no outputs are stored: python -m tools.notebooks {path.name[:2]}")
    return notebook


@EVERY
def test_outputs_are_those_of_the_code(path):
    notebook = stored(path)
    assert notebook.metadata["sinkscope"]["code"] == digest(notebook), f"python -m tools.notebooks {path.name[:2]}"
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == [*range(1, len(counts) + 1)]
    kinds = {kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})}
    assert {"image/png", PLOTLY} <= kinds
    check(path.name, path.read_text())


@EVERY
def test_another_model_is_one_line(path):
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert cells[0] == MODEL
    loads = [line for cell in cells for line in cell.splitlines() if "ss.load(" in line]
    assert loads and all("ss.load(MODEL" in line for line in loads)


def test_large_notebooks_and_folders_are_refused():
    with refused("expected at most"):
        check("x.ipynb", "a" * (LARGEST + 1))
    with refused("names the folder"):
        check("x.ipynb", f"saved {Path.home()}/x.json")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@EVERY
def test_running_it_again_says_the_same(path, monkeypatch):
    monkeypatch.setattr(notebooks, "picture_of", lambda _: "")  # what drawing needs is not there in all environments
    assert text_of(executed(path)) == text_of(stored(path))
