from __future__ import annotations

import json
from typing import Any

from sample_results import sample_find_sinks, sample_without_sink


def _traces(figure) -> dict[str, Any]:
    return {trace["name"]: trace for trace in json.loads(figure.to_json())["data"] if trace.get("name")}


def test_figure_shows_the_numbers_of_the_result():
    found = sample_find_sinks()
    traces = _traces(found.figure())
    assert traces["the first token"]["y"] == [3.0, 20.0, 930.0, 931.0, None, None]
    assert traces["typical text, median"]["y"] == [2.0, 3.0, 4.0, 5.0, None, None]
    band = traces["typical text, 5-95 %"]
    assert band["x"] == [0, 1, 2, 3, 3, 2, 1, 0]  # up along 95 %, back along 5 %, only where it was read
    assert band["y"] == [2.5, 3.5, 4.5, 5.5, 4.5, 3.5, 2.5, 1.5]


def test_no_sink_is_drawn_and_said():
    figure = sample_without_sink().figure()
    assert "Neither an attention sink nor a norm spike" in figure.layout.title.text
    assert _traces(figure)["the first token"]["y"] == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert not figure.layout.shapes  # no layer is marked
