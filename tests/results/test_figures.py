"""Figures of answers: bars of rows, and no text of a file is markup."""

from __future__ import annotations

from dataclasses import replace

from sample_results import sample_find_sinks

from sinkscope.results.mean import Mean
from sinkscope.results.style import BLUE, GREY
from sinkscope.sinks.spikes.result import WhySink
from sinkscope.sinks.spikes.why_tables import AS_IT_IS, ONE_OTHER, Cause, Condition, Conditioned, Purpose, PurposeKey


def test_answers_are_bars_of_rows_with_their_controls_in_grey_and_no_text_is_markup():
    conditions = (
        Conditioned(key=AS_IT_IS, left=Mean(0.01, 0.02)),
        Conditioned(key=Condition((Cause.ALONE,)), left=Mean(0.9, 0.1)),
        Conditioned(key=ONE_OTHER, left=Mean(0.2, 0.1)),
    )
    purpose = (
        Purpose(key=PurposeKey.HIDDEN, since=2, loss=Mean(0.5, 0.2)),
        Purpose(key=PurposeKey.OTHER_HIDDEN, since=2, other=4, loss=Mean(0.01)),
    )
    found = sample_find_sinks()
    spike = replace(found.spikes[0], conditions=conditions, purpose=purpose)
    made = replace(found, spikes=(spike,), model=replace(found.model, name="<b>"))
    figure = WhySink(**vars(made)).figure()
    drawn: dict[str, tuple[float, float, str]] = {}
    for trace in figure.data:
        for name, value, margin, colour in zip(trace.x, trace.y, trace.error_y.array, trace.marker.color, strict=True):
            drawn[name] = (value, margin, colour)
    labels = [row.short_label for row in (*conditions, *purpose)]
    assert drawn[labels[0]] == (0.01, 0.02, GREY)
    assert drawn[labels[1]] == (0.9, 0.1, BLUE)
    assert drawn[labels[3]] == (0.5, 0.2, BLUE)
    assert drawn[labels[4]] == (0.01, 0, GREY)
    assert figure.layout.title.text.startswith("&lt;b&gt;: ")


def test_spikes_and_norms_differ_by_more_than_their_colour():
    found = sample_find_sinks()
    (first, _) = found.spikes
    figure = replace(found, spikes=(first, replace(first, layers=(3, 5), effects=()))).figure()
    bars = [trace for trace in figure.data if trace.type == "bar" and trace.name]
    assert [bar.marker.pattern.shape for bar in bars] == ["", "/"]
    assert [bar.name for bar in bars] == ["layers 1-5", "layers 3-5"]
    words = [shape.text for shape in figure.layout.annotations if shape.text.startswith("layers")]
    assert words == ["layers 1-5", "layers 3-5"], "beside their shades"
    norms = [trace for trace in figure.data if trace.type == "scatter"]
    assert len({trace.line.dash for trace in norms}) == len(norms)
