"""Figures on pages: SVG in every browser, nothing that cannot be seen, and no more of plotly.js than they need."""

from __future__ import annotations

import re
from dataclasses import replace

import plotly.graph_objects as go
import pytest
from refusals import refused
from repository import FIGURES

from sinkscope.app.pages import DRAWN, Section, document, folded, page, plot, result_section
from sinkscope.files.output import write_output
from sinkscope.results.parts import Neuron
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


WRITERS = 22
LABELS = """[...document.querySelectorAll('.annotation-text, .xtick text, .ytick text, .bartext')].map((label) => {
  const { left, right, top, bottom } = label.getBoundingClientRect();
  return [label.textContent, left, right, top + scrollY, bottom + scrollY];
})"""
SCALE = "document.querySelector('.js-plotly-plot').data.find((one) => one.type === 'heatmap').colorscale"


def many_writers():
    """A result of Gemma whose first spike has 22 needed neurons, in layers that write the second one as well."""
    found = Result.load(FIGURES / "find_sinks_gemma3.json")
    spike = found.spikes[0]
    shares = [(0.6 if layer % 2 else 1.4) / WRITERS for layer in range(WRITERS)]
    writers = tuple(replace(spike.writers[0], part=f"mlp {layer}", share=share) for layer, share in enumerate(shares))
    needed = replace(spike.needed, neurons=tuple(Neuron(layer, None, 1000 + layer) for layer in range(WRITERS)))
    norms = [100.0, *[1e5] * WRITERS]
    first = replace(spike, writers=writers, needed=needed)
    return replace(
        found, spikes=(first, *found.spikes[1:]), layers_read=len(norms), first_token_norm=norms, typical_norm=norms
    )


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_no_label_lies_on_another_or_is_cut_with_22_named_neurons(width, dark, tmp_path, chrome):
    chrome.errors.clear()
    chrome.open(write_output(tmp_path / "many.html", page(many_writers())), width, dark=dark)
    chrome.wait("document.querySelector('.ytick')")
    labels = chrome.run(LABELS)
    named = " ".join(text for text, *_ in labels)
    assert all(f"N{1000 + layer}" in named for layer in range(WRITERS)) and "N1016 " in f"{named} "
    assert named.count("N1016") == 1  # and not on the bar of what layer 16 takes away
    assert "10,000" in named and "100%" in named
    for number, (text, left, right, top, bottom) in enumerate(labels):
        assert left >= 0 and right <= width, text
        for other, *box in labels[:number]:
            across = min(right, box[1]) - max(left, box[0])
            down = min(bottom, box[3]) - max(top, box[2])
            assert across < 2 or down < 2, (text, other)  # the box of a letter has room around it
    assert chrome.errors == []


def test_on_a_dark_page_the_end_of_a_scale_is_the_ground_and_not_white(tmp_path, chrome):
    path = write_output(tmp_path / "found.html", page(Result.load(FIGURES / "find_sinks.json")))
    for dark, ground in ((False, "#ffffff"), (True, "#24272c")):
        chrome.open(path, dark=dark)
        chrome.wait("document.querySelector('.ytick')")
        assert chrome.run(f"{SCALE}[0][1]") == ground


def test_a_link_in_the_contents_opens_the_closed_section(tmp_path, chrome):
    sections = [folded(result_section(Result.load(FIGURES / "find_sinks.json"), name), "closed") for name in ("a", "b")]
    chrome.open(write_output(tmp_path / "two.html", document("two", sections)))
    chrome.run("document.querySelector('nav a[href=\"#r1\"]').click()")
    chrome.wait("document.querySelector('#r1 .ytick')")
    assert chrome.run("[...document.querySelectorAll('section > details')].map((one) => one.open)") == [False, True]
