"""Figures: as wide as their frame, one panel alone, and the circuit from its marks to its readers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from refusals import refused
from repository import FIGURES
from sample_results import sample_find_sinks

from sinkscope.results.result import Result
from sinkscope.sinks.spikes.figure import draw_circuit


@pytest.mark.parametrize("name", ["find_sinks", "barcode", "lines"])
def test_a_figure_is_as_wide_as_its_frame(name):
    layout = Result.load(FIGURES / f"{name}.json").figure().layout
    assert layout.width is None and layout.height >= 300


def test_one_panel_stands_alone():
    found = sample_find_sinks()
    whole, heads = found.figure(), found.figure(panel="heads that")
    bars = [trace for trace in whole.data if trace.xaxis == "x4"]
    assert [trace.y for trace in heads.data] == [trace.y for trace in bars] and len(bars) == 3
    assert heads.layout.title.text == "Heads that attend to the place of each spike"
    assert heads.layout.xaxis.domain == (0, 1) and heads.layout.yaxis.title.text == "heads"
    norms = found.figure(panel="1")
    assert [trace.name for trace in norms.data] == ["the first token, median", "later tokens, median"]
    assert len(norms.layout.shapes) == 1 and norms.layout.shapes[0].xref == "x"
    with refused("panel='zebra'.*Norm of the residual stream"):
        found.figure(panel="zebra")


def test_a_circuit_is_drawn_from_marks_to_readers():
    """Every mark leads to every writer, these to the spike, as wide as their share, and the spike to its readers."""
    found = sample_find_sinks()
    drawn = draw_circuit(replace(found, spikes=found.spikes[:1]))
    places = {trace.text.partition("<br>")[0]: (trace.x[0], trace.y[0]) for trace in drawn.data if trace.text}
    lines = {(trace.x, trace.y): trace.line.width for trace in drawn.data if trace.mode == "lines"}
    edges = {}
    for one, other in product(places, places):
        ends = tuple(zip(places[one], places[other], strict=True))
        if ends in lines:
            edges[one, other] = lines[ends]
    spike, readers = "the first", "32 heads"
    assert edges.pop(("L2.N412", spike)) == pytest.approx(1 + 9 * 0.83)
    assert edges.pop(("L2.N77", spike)) == pytest.approx(1 + 9 * 0.14)
    assert edges.pop((spike, readers)) == pytest.approx(1 + 9 * 32 / 48)
    assert {*edges} == {(mark, writer) for mark in ("attention 0", "L0.H1 and") for writer in ("L2.N412", "L2.N77")}
