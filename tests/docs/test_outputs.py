"""What pages show as the output of a command is what the command prints."""

from __future__ import annotations

import json
import os
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from repository import FIGURES, ROOT

from sinkscope.files.envelope import kinds
from sinkscope.results.result import Result
from tools import outputs

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKED = [page for page in PAGES if re.search(r"<!-- (output|columns): ", page.read_text(encoding="utf-8"))]
QUOTED = re.compile(r"^> Conclusion: (.*(?:\n> ?.+)*)", re.M)


@cache
def conclusions() -> set[str]:
    """What the results of all figures conclude, in the words of now."""
    found: set[str] = set()
    for file in FIGURES.rglob("*.json"):
        if json.loads(file.read_text(encoding="utf-8"))["kind"] in kinds():
            found.add(" ".join(Result.load(file).conclusion().split()))
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if QUOTED.search(page.read_text(encoding="utf-8"))], ids=str)
def test_a_quoted_conclusion_is_that_of_a_figure(page):
    for quoted in QUOTED.findall(page.read_text(encoding="utf-8")):
        words = " ".join(quoted.replace("\n>", " ").split())
        assert words in conclusions(), f"no figure concludes this: {words}"


@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_output_on_a_page_is_what_is_printed(page, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    text = page.read_text(encoding="utf-8")
    renewed = outputs.BLOCK.sub(outputs.renewed, text)
    renewed = outputs.with_columns(renewed)
    assert renewed == text, f"it prints something else now: python -m tools.outputs {page.relative_to(ROOT)}"
