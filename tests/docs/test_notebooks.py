"""What the notebooks store was made by their code, is small, and names no folder of a machine."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import nbformat
import pytest

from sinkscope.errors import SinkscopeError
from tools.notebooks import FOLDER, LARGEST, PLOTLY, check, digest, executed, text_of

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
    check(path.name, path.read_text(encoding="utf-8"))


@EVERY
def test_the_checks_stand_in_the_last_cell(path):
    """So that a reader reads what is shown, and the tests run what is checked."""
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    checks = ["assert" in source for source in cells]
    assert checks == [False] * (len(cells) - 1) + [True]


@EVERY
def test_a_notebook_imports_what_is_public_and_asks_its_reader(path):
    """A package of sinkscope at most, no file in it; and its last cell is folded."""
    cells = nbformat.read(path, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    modules = [node.module for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    inner = [module for module in modules if module.startswith("sinkscope") and not public(module)]
    assert not inner and not any(module.startswith("experiments") for module in modules), inner
    sections = sum(cell.source.startswith("## ") for cell in cells) - 1  # but that of the checks
    asked = sum(cell.source.startswith("**Try it.**") for cell in cells)
    assert asked >= min(sections, 2) and cells[-1].metadata["tags"] == ["checks"]


def public(module: str) -> bool:
    """Whether it is a package that says what is public."""
    return hasattr(importlib.import_module(module), "__all__") and module.count(".") <= 2


def test_other_code_has_another_digest():
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    before = digest(notebook)
    notebook.cells[0].source += "more words"
    assert digest(notebook) == before
    next(cell for cell in notebook.cells if cell.cell_type == "code").source += "\n1"
    assert digest(notebook) != before


def test_large_notebooks_and_folders_are_refused():
    with pytest.raises(SinkscopeError, match="expected at most"):
        check("x.ipynb", "a" * (LARGEST + 1))
    with pytest.raises(SinkscopeError, match="names the folder"):
        check("x.ipynb", f"saved {Path.home()}/x.json")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@EVERY
def test_running_it_again_says_the_same(path):
    pytest.importorskip("kaleido")  # figures are stored as pictures, too
    assert text_of(executed(path)) == text_of(stored(path))
