"""Figures: as wide as their frame, one panel alone, and bars of rows."""

from __future__ import annotations

import pytest
from refusals import refused
from repository import FIGURES
from sample_results import sample_find_sinks, with_rows

from sinkscope.results.result import Result
from sinkscope.results.row import Mean, row_of
from sinkscope.results.style import BLUE, GREY
from sinkscope.sinks.spikes.records import ONE_OTHER, PURPOSE_CONTROLS
from sinkscope.sinks.spikes.result import WhySink


@pytest.mark.parametrize("name", ["find_sinks", "barcode", "lines"])
def test_a_figure_is_as_wide_as_its_frame(name):
    layout = Result.load(FIGURES / f"{name}.json").figure().layout
    assert layout.width is None and layout.height >= 300


def test_one_panel_stands_alone():
    found = sample_find_sinks()
    whole, heads = found.figure(), found.figure(panel="heads that")
    bars = [trace for trace in whole.data if trace.xaxis == "x4"]
    assert [trace.y for trace in heads.data] == [trace.y for trace in bars] and len(bars) == 2
    assert heads.layout.title.text == "Heads that attend to the place of each spike"
    assert heads.layout.xaxis.domain == (0, 1) and heads.layout.yaxis.title.text == "heads"
    norms = found.figure(panel="1")
    assert [trace.name for trace in norms.data] == ["the first token, median", "later tokens, median"]
    assert len(norms.layout.shapes) == 1 and norms.layout.shapes[0].xref == "x"
    with refused("panel='zebra'.*Norm of the residual stream"):
        found.figure(panel="zebra")


def test_answers_are_bars_of_rows_with_their_controls_in_grey():
    rows = (
        row_of("conditions", "as it is", left=Mean(0.01, 0.02)),
        row_of("conditions", "alone", left=Mean(0.9, 0.1)),
        row_of("conditions", ONE_OTHER, left=Mean(0.2, 0.1)),
        row_of("purpose", "hidden", loss=Mean(0.5, 0.2)),
        row_of(PURPOSE_CONTROLS, "ordinary key hidden", loss=Mean(0.01)),
    )
    one = with_rows(sample_find_sinks().spikes[0], *rows)
    found = WhySink(**vars(sample_find_sinks(spikes=(one,))))
    drawn = {trace.x[0]: (trace.y[0], trace.error_y.array[0], trace.marker.color) for trace in found.figure().data}
    assert drawn["alone"] == (0.9, 0.1, BLUE) and drawn["as it is"] == (0.01, 0.02, GREY)
    assert drawn["hidden"] == (0.5, 0.2, BLUE) and drawn["ordinary key hidden"] == (0.01, 0, GREY)
