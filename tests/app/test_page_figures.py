"""Figures on pages: SVG in every browser, nothing that cannot be seen, and no text that becomes markup."""

from __future__ import annotations

import plotly.express as px
import plotly.graph_objects as go
from refusals import refused

from sinkscope.results.pages import Section, document, plot


def test_a_figure_that_the_page_cannot_draw_is_refused():
    text = document("x", [Section("x", plot(go.Figure(go.Scatter(x=[1], y=[2]))))])
    assert len(text) < 2_500_000 and text.count("Copyright 2012") == 1
    with refused("a page draws no scatter3d"):
        plot(go.Figure(go.Scatter3d(x=[1], y=[2])))


def test_a_token_that_is_a_tag_or_turns_text_around_is_shown_as_text():
    """Such as the BOS token <s>, in a drawing of another package; new lines and hover boxes stay."""
    words = ["<s>", "%{hovertext}<i>", "a<br>b", "a\u202eb"]
    plain = plot(px.bar({"x": words, "y": range(4), "name": list("abcd")}, x="x", y="y", hover_name="name"))
    assert r"a\\u202eb" in plain
    for code in ("0026", "003c", "003e", "002f"):
        plain = plain.replace(f"\\u{code}", chr(int(code, 16)))
    assert "&lt;s>" in plain and "&lt;i>" in plain and "<s>" not in plain and "<i>" not in plain
    assert "a<br>b" in plain and "<b>%{hovertext}</b>" in plain
