"""Figures of answers: bars of rows, and no text of a file is markup."""

from __future__ import annotations

from dataclasses import replace

from sample_results import sample_find_sinks, with_rows

from sinkscope.results.row import Mean, row_of
from sinkscope.results.style import BLUE, GREY
from sinkscope.sinks.spikes.result import ONE_OTHER, PURPOSE_CONTROLS, WhySink


def test_answers_are_bars_of_rows_with_their_controls_in_grey_and_no_text_is_markup():
    rows = (
        row_of("conditions", "as it is", left=Mean(0.01, 0.02)),
        row_of("conditions", "alone", left=Mean(0.9, 0.1)),
        row_of("conditions", ONE_OTHER, left=Mean(0.2, 0.1)),
        row_of("purpose", "hidden", loss=Mean(0.5, 0.2)),
        row_of(PURPOSE_CONTROLS, "<s> hidden", loss=Mean(0.01)),
    )
    found = sample_find_sinks()
    made = replace(found, spikes=(with_rows(found.spikes[0], *rows),), model=replace(found.model, name="<b>"))
    figure = WhySink(**vars(made)).figure()
    drawn = {trace.x[0]: (trace.y[0], trace.error_y.array[0], trace.marker.color) for trace in figure.data}
    assert drawn["alone"] == (0.9, 0.1, BLUE) and drawn["as it is"] == (0.01, 0.02, GREY)
    assert drawn["hidden"] == (0.5, 0.2, BLUE) and drawn["&lt;s&gt; hidden"] == (0.01, 0, GREY)
    assert figure.layout.title.text.startswith("&lt;b&gt;: ")
