"""Notebooks run and say what they store; they are small, and name no folder of a machine."""

from __future__ import annotations

import nbformat
import pytest
from covering import slow

from tools import notebooks
from tools.notebooks import FOLDER, check, executed, text_of

EVERY = sorted(FOLDER.glob("*.ipynb"))
QUICK = ("04_patch", "07_lines")
"""Notebooks that take seconds, and read most kinds of results between them."""


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_names_no_folder(path):
    check(path.name, path.read_text())


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "path", [path if path.stem in QUICK else slow(path) for path in EVERY], ids=lambda path: path.stem
)
def test_running_a_notebook_again_says_the_same(path, monkeypatch):
    monkeypatch.setattr(notebooks, "picture_of", lambda _: "")  # what drawing needs is not there in all environments
    stored = text_of(nbformat.read(path, as_version=4))
    assert text_of(executed(path)) == stored, f"its outputs are others now: python -m tools.notebooks {path.name[:2]}"
