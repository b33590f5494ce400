"""Notebooks run and say what they store; they are small, and name no folder of a machine."""

from __future__ import annotations

import nbformat
import pytest
from covering import slow

from tools import notebooks
from tools.notebooks import FOLDER, apart, check, executed, text_of

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
    assert apart(stored, text_of(executed(path))) == "", f"python -m tools.notebooks {path.name[:2]} stores them again"


def test_only_rounding_is_no_other_text():
    """A last digit may differ by one; a word, a number or how many there are may not."""
    said = ["Conclusion: 0.15 (± 0.05) nats, 20 heads, 3e-08"]
    assert apart(said, ["Conclusion: 0.16 (± 0.05) nats, 20 heads, 2e-08"]) == ""
    for other in ("0.18 (± 0.05) nats, 20 heads", "0.15 (± 0.05) nats, 22 heads", "0.15 (± 0.05) points, 20 heads"):
        assert apart(said, [f"Conclusion: {other}, 3e-08"]) != ""
    assert apart(said, [*said, ""]) != ""
