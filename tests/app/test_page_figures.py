"""Figures on pages: SVG in every browser, nothing that cannot be seen, and no more of plotly.js than they need."""

from __future__ import annotations

import re

import plotly.graph_objects as go
import pytest
from refusals import refused
from repository import FIGURES

from sinkscope.app.pages import DRAWN, Section, document, page, plot
from sinkscope.results.result import Result

GL = re.compile(r'"type":\s*"scattergl"')
LARGEST = 2_500_000
"""Bytes of a page."""


@pytest.mark.parametrize("name", ["attack", "barcode", "patch-eval", "patch-make", "repeat", "repeat-attention"])
def test_a_page_is_svg_and_small(name):
    result = Result.load(FIGURES / f"{name}.json")
    assert {one.type for one in result.figure().data} <= DRAWN
    text = page(result)
    assert len(text.encode(errors="backslashreplace")) < LARGEST
    assert "svg" in text and not GL.search(text)


def test_a_figure_that_the_page_cannot_draw_is_refused():
    text = document("x", [Section("x", plot(go.Figure(go.Scatter(x=[1], y=[2]))))])
    assert len(text) < LARGEST and text.count("Copyright 2012") == 1
    with refused("a page draws no scatter3d"):
        plot(go.Figure(go.Scatter3d(x=[1], y=[2])))
