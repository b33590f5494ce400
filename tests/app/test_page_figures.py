"""Figures on pages: SVG in every browser, nothing that cannot be seen, and no more of plotly.js than they need."""

from __future__ import annotations

import re
from pathlib import Path

import plotly.express as px
import plotly.graph_objects as go
import pytest

from sinkscope.app.pages import DRAWN, document, page, plot, section
from sinkscope.results.result import Result
from sinkscope.results.style import figure_of

FIGURES = Path(__file__).parents[2] / "figures"
MANY = range(1500)  # from 1,000 points on plotly express takes WebGL
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


def test_a_figure_of_another_package_becomes_svg():
    gl = px.line(x=MANY, y=MANY)
    assert gl.data[0].type == "scattergl"
    assert not GL.search(plot(gl)) and GL.search(gl.to_json())


@pytest.mark.parametrize(("trace", "whole"), [(go.Scatter, False), (go.Scatter3d, True)])
def test_only_a_figure_that_needs_it_brings_the_whole_of_plotly(trace, whole):
    text = document("x", [section("x", "", {}, plot(go.Figure(trace(x=[1], y=[2]))))])
    assert (len(text) > 4_000_000) == whole and text.count("Copyright 2012") == 1


@pytest.mark.parametrize("orientation", ["v", "h"])
def test_a_bar_of_zero_is_a_visible_line(orientation):
    values, names = [2.0, 0.0, 0.001, None, -1.0], list("abcde")
    x, y = (names, values) if orientation == "v" else (values, names)
    made = figure_of(
        go.Figure(go.Bar(x=x, y=y, orientation=orientation, marker_color="red")), None, width=500, height=300
    )
    (bar,) = made.data
    assert list(bar.marker.line.width) == [0, 4, 4, 4, 0] and bar.marker.line.color == "red"
    nothing = figure_of(go.Figure(go.Bar(x=["a", "b"], y=[0, 0])), None, width=500, height=300)
    assert list(nothing.data[0].marker.line.width) == [4, 4]
