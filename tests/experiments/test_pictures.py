from __future__ import annotations

import json

import pytest
from repository import FIGURES

from sinkscope.files.envelope import kinds
from sinkscope.results.result import Result

FILES = sorted(FIGURES.glob("*.json"))


def keys(data: object) -> object:
    """The names in a record, at every depth; of a list those of its first part."""
    if isinstance(data, dict):
        return {name: keys(value) for name, value in data.items()}
    return [keys(part) for part in data[:1]] if isinstance(data, list) else None


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_figure_has_the_present_form(file):
    """Its data have the names of today."""
    data = json.loads(file.read_text())
    made = data["provenance"]
    assert (
        (made.get("argv") or made["command"]) and isinstance(made["seed"], int) and {"python"} < set(made["versions"])
    )
    if data["kind"] in kinds():
        assert keys(json.loads(Result.load(file).to_json())["result"]) == keys(data["result"])
