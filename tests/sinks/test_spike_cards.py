"""What is said of a spike: the fewest neurons, what they cost, and the strongest control."""

from __future__ import annotations

from dataclasses import replace

import pytest
from refusals import refused
from sample_results import sample_find_sinks, with_rows

from sinkscope.results.row import Mean, row_of
from sinkscope.sinks.spikes.result import NO_EQUAL, needed_sentence


def said_of(count: int, loss: float, busiest: float, random: float, note: str = "") -> str:
    """The sentence for so many neurons; what they cost, and what their controls do."""
    numbers = {"at place": Mean(loss, 0.14), "busiest": Mean(busiest), "random": Mean(random)}
    rows = []
    for name, value in numbers.items():
        table = "effects" if name == "at place" else "controls"
        rows.append(row_of(table, name, note if table == "controls" else "", left=0.02, loss=value))
    one = replace(sample_find_sinks().spikes[0], needed=tuple(f"L{n}.N5" for n in range(count)))
    said = needed_sentence(with_rows(one, *rows)).replace(" for the spike at the first token: zeroed there,", ":")
    return said.replace(".N5", "").replace(" nats a token", "")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((1, 0.34, 0.01, -0.9), "L0 suffices: it costs 0.34 (± 0.14), the busiest others 0.01."),
        ((2, 0.34, 0.1, 0.3), "L0 and L1 suffice: they cost 0.34 (± 0.14), random others as much (0.30)."),
        ((9, -0.004, -2.0, -3), "L0 and 8 more suffice: they cost 0.00 (± 0.14), the busiest others -2.00."),
        (
            (1, 0.3, 0.1, 0, NO_EQUAL),
            "L0 suffices: it costs 0.30 (± 0.14), no fair control: no other neurons write as much.",
        ),
    ],
)
def test_the_conclusion_names_the_fewest_neurons_and_the_strongest_control(given, words):
    assert said_of(*given) == words


def test_effects_without_a_control_are_refused():
    with refused("have no control: give the rows of its controls"):
        with_rows(sample_find_sinks().spikes[0], without=("controls",))
