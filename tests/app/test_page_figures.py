"""Figures on pages: SVG in every browser, nothing that cannot be seen, and no more of plotly.js than they need."""

from __future__ import annotations

import re

import plotly.express as px
import plotly.graph_objects as go
import pytest
from refusals import refused
from repository import FIGURES

from sinkscope.results.pages import DRAWN, Section, document, plot
from sinkscope.results.result import Result

GL = re.compile(r'"type":\s*"scattergl"')
LARGEST = 2_500_000
"""Bytes of a page."""


@pytest.mark.parametrize("name", ["attack", "barcode", "repeat-attention"])
def test_a_page_is_svg_and_small(name):
    result = Result.load(FIGURES / f"{name}.json")
    assert {one.type for one in result.figure().data} <= DRAWN
    text = result.to_html()
    assert len(text.encode(errors="backslashreplace")) < LARGEST
    assert "svg" in text and not GL.search(text)


def test_a_figure_that_the_page_cannot_draw_is_refused():
    text = document("x", [Section("x", plot(go.Figure(go.Scatter(x=[1], y=[2]))))])
    assert len(text) < LARGEST and text.count("Copyright 2012") == 1
    with refused("a page draws no scatter3d"):
        plot(go.Figure(go.Scatter3d(x=[1], y=[2])))


def test_a_token_that_is_a_tag_is_shown_as_text():
    """Such as the BOS token <s>, in a drawing of another package; new lines and hover boxes stay."""
    words = ["<s>", "<b>", "</b>", "%{hovertext}<i>", "a<br>b"]
    fig = px.bar({"x": words, "y": range(5), "name": list("abcde")}, x="x", y="y", hover_name="name")
    plain = plot(fig)
    for code in ("0026", "003c", "003e", "002f"):
        plain = plain.replace(f"\\u{code}", chr(int(code, 16)))
    for tag in ("s>", "b>", "/b>", "i>"):
        assert f"&lt;{tag}" in plain
    assert "a<br>b" in plain and "<b>%{hovertext}</b>" in plain and "<s>" not in plain and "<i>" not in plain


def test_a_character_that_turns_text_around_is_written_out_in_a_drawing():
    page = plot(px.bar(x=["a\u202eb"], y=[1], title="c\x1bd"))
    assert r"a\\u202eb" in page and r"c\\x1bd" in page
