"""Plotly renders some tags in titles, labels and hover boxes: a text from a tokenizer or a file must not make one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from repository import FIGURES
from sample_results import sample_find_sinks

from sinkscope.app.compare import compare
from sinkscope.bench.table import BenchGroup, BenchTable
from sinkscope.files.envelope import kind_modules as kinds
from sinkscope.results.result import Result
from sinkscope.results.row import Mean, row_of

CHOICES = {  # one of a few words, or packed numbers
    "contexts",
    "quantity",
    "verdict",
    "records.verdict",
    "rounded.scheme",
    "kept.scheme",
    "rounded.kept",
    "spikes.needed",
    "spikes.rows.name",
    "kept_by",
    "tried.without",
}
BAD = "<img src=x onerror=alert(1)>"


def _by_hand() -> Iterator[Result]:
    """Kinds of which no file lies in figures/."""
    sample = sample_find_sinks()
    groups = tuple(
        BenchGroup("recall", name, 4, 0.5, 0.2, 0.8, scores={}, metrics={"read": 9.0}) for name in ("full", "a:b")
    )
    of_texts = (Mean(30.0, None, heads, "count") for heads in ((30.0, 34.0, 32.0, 31.0), (20.0, 23.0, 24.0, 22.0)))
    readers = (row_of("attention", "the first token", heads=heads, total=48) for heads in of_texts)
    yield compare(*(replace(sample, attention=(row, *sample.attention[1:])) for row in readers))
    yield BenchTable(model=sample.model, settings={}, provenance=sample.provenance, task="recall", groups=groups)


@cache
def _results() -> dict[str, Result]:
    found = {one.kind: one for one in _by_hand()}
    for file in sorted(FIGURES.glob("*.json")):
        kind = json.loads(file.read_text())["kind"]
        if kind in sorted(kinds()) and kind not in found:
            found[kind] = Result.load(file)
    return found


def _spoil(value, spare: set[str], path: str = ""):
    """`value` with markup after every text but those at some places."""
    if isinstance(value, str):
        return value if path in spare or path.endswith((".table", ".kind")) else value + BAD
    if isinstance(value, dict):
        return {key: _spoil(inside, spare, f"{path}.{key}") for key, inside in value.items()}
    return [_spoil(inside, spare, path) for inside in value] if isinstance(value, list) else value


def _texts(value) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inside in value.items():
            if key not in ("template", "legendgroup"):  # not shown
                yield from _texts(inside)
    elif isinstance(value, list | tuple):
        for inside in value:
            yield from _texts(inside)


WITHOUT_DRAWING = {
    "check-cache",
    "loops",
    "scan-table",
    "sink-card",
    "view",
}  # tables, or a page of their own


@pytest.mark.parametrize("kind", sorted(set(kinds()) - WITHOUT_DRAWING))
def test_no_text_of_a_file_is_markup_in_a_drawing(kind):
    data = _results()[kind].to_dict()
    spoilt = _spoil({key: data[key] for key in ("model", "result")}, {f".result.{place}" for place in CHOICES})
    texts = list(_texts(Result.from_dict({**data, **spoilt}).figure().to_plotly_json()))
    assert not [text for text in texts if "<img" in text]
    assert any("&lt;img src=x onerror=alert(1)&gt;" in text for text in texts)
