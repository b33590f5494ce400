"""Figures on pages: SVG in every browser, nothing that cannot be seen, and no text that becomes markup."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import plotly.express as px
import plotly.graph_objects as go
import pytest
from refusals import refused
from repository import FIGURES
from sample_results import sample_find_sinks

from sinkscope.app.compare import compare
from sinkscope.bench.table import BenchGroup, BenchTable
from sinkscope.files.envelope import kinds
from sinkscope.results.pages import Section, document, plot
from sinkscope.results.result import Result
from sinkscope.results.row import Mean, row_of

LARGEST = 2_500_000
"""Bytes of a page."""
WITHOUT_DRAWING = {"check-cache", "loops", "sink-card", "view"}  # tables, or a page of their own
CHOICES = re.compile(
    r"result\.(contexts|quantity|verdict|spikes\.(needed|rows\.name)|kept_by|tried\.without)$|\.(table|kind)$"
)
"""Places of one of a few words."""
BAD = "<img src=x onerror=alert(1)>"


@cache
def results() -> dict[str, Result]:
    """A result of each kind: from figures/, or made by hand."""
    sample = sample_find_sinks()
    groups = (BenchGroup("recall", "a:b", 4, 0.5, 0.2, 0.8, scores={}, metrics={"read": 9.0}),)
    found: dict[str, Result] = {
        "bench": BenchTable(model=sample.model, provenance=sample.provenance, task="recall", groups=groups)
    }
    readers = []
    for heads in ((30.0, 34.0, 32.0, 31.0), (20.0, 23.0, 24.0, 22.0)):
        row = row_of("attention", "the first token", heads=Mean(30.0, None, heads, "count"), total=48)
        readers.append(replace(sample, attention=(row, *sample.attention[1:])))
    found["compare"] = compare(*readers)
    for file in sorted(FIGURES.glob("*.json")):
        kind = json.loads(file.read_text())["kind"]
        if kind in kinds() and kind not in found:
            found[kind] = Result.load(file)
    return found


def spoilt(value: Any, place: str) -> Any:
    """`value` with markup after every text that is not one of a few words."""
    if isinstance(value, dict):
        return {key: spoilt(inside, f"{place}.{key}") for key, inside in value.items()}
    if isinstance(value, list):
        return [spoilt(inside, place) for inside in value]
    return value + BAD if isinstance(value, str) and not CHOICES.search(place) else value


def texts_in(value: Any) -> Iterator[str]:
    """The texts that a drawing shows."""
    if isinstance(value, str):
        yield value
    parts = (
        [inside for key, inside in value.items() if key not in ("template", "legendgroup")]
        if isinstance(value, dict)
        else value
    )
    if isinstance(parts, list | tuple):
        for part in parts:
            yield from texts_in(part)


@pytest.mark.parametrize("kind", sorted({*kinds()} - WITHOUT_DRAWING))
def test_no_text_of_a_file_is_markup_in_a_drawing(kind):
    data = results()[kind].to_dict()
    bad = {part: spoilt(data[part], part) for part in ("model", "result")}
    shown = list(texts_in(Result.from_dict(data | bad).figure().to_plotly_json()))
    assert not [text for text in shown if "<img" in text]
    assert any("&lt;img src=x onerror=alert(1)&gt;" in text for text in shown)


def test_a_figure_that_the_page_cannot_draw_is_refused():
    text = document("x", [Section("x", plot(go.Figure(go.Scatter(x=[1], y=[2]))))])
    assert len(text) < LARGEST and text.count("Copyright 2012") == 1
    with refused("a page draws no scatter3d"):
        plot(go.Figure(go.Scatter3d(x=[1], y=[2])))


def test_a_token_that_is_a_tag_or_turns_text_around_is_shown_as_text():
    """Such as the BOS token <s>, in a drawing of another package; new lines and hover boxes stay."""
    words = ["<s>", "<b>", "</b>", "%{hovertext}<i>", "a<br>b", "a\u202eb"]
    plain = plot(px.bar({"x": words, "y": range(6), "name": list("abcdef")}, x="x", y="y", hover_name="name"))
    assert r"a\\u202eb" in plain
    for code in ("0026", "003c", "003e", "002f"):
        plain = plain.replace(f"\\u{code}", chr(int(code, 16)))
    for tag in ("s>", "b>", "/b>", "i>"):
        assert f"&lt;{tag}" in plain
    assert "a<br>b" in plain and "<b>%{hovertext}</b>" in plain and "<s>" not in plain and "<i>" not in plain
