"""What pages show as the output of a command is what the command prints."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from repository import ROOT

from tools import outputs

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKED = [page for page in PAGES if re.search(r"<!-- (output|columns): ", page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_output_on_a_page_is_what_is_printed(page, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    text = page.read_text(encoding="utf-8")
    renewed = outputs.BLOCK.sub(outputs.renewed, text)
    renewed = outputs.with_columns(renewed)
    assert renewed == text, f"it prints something else now: python -m tools.outputs {page.relative_to(ROOT)}"
