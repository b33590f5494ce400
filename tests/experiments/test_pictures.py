"""Every committed figure says how it was made, and those of commands are read as they would be written now."""

from __future__ import annotations

import json

import pytest
from repository import FIGURES
from same_kit import differences

from sinkscope.files.envelope import kinds
from sinkscope.results.result import Result


@pytest.mark.parametrize("file", sorted(FIGURES.glob("*.json")), ids=lambda file: file.stem)
def test_a_figure_has_the_present_form(file):
    data = json.loads(file.read_text())
    assert data["provenance"]["argv"] and isinstance(data["provenance"]["seed"], int)
    if data["kind"] in kinds():
        again = json.loads(Result.load(file).to_json())["result"]
        assert differences(data["result"], again) == []
