"""What the notebooks store was made by their code, is small, and names no folder of a machine."""

from __future__ import annotations

import nbformat
import pytest

from tools import notebooks
from tools.notebooks import FOLDER, check, digest, executed, text_of

EVERY = pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)


@EVERY
def test_outputs_are_those_of_the_code(path):
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata["sinkscope"]["code"] == digest(notebook), f"python -m tools.notebooks {path.name[:2]}"
    check(path.name, path.read_text())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@EVERY
def test_running_it_again_says_the_same(path, monkeypatch):
    monkeypatch.setattr(notebooks, "picture_of", lambda _: "")  # what drawing needs is not there in all environments
    assert text_of(executed(path)) == text_of(nbformat.read(path, as_version=4))
