"""What makes a position the sink: planted truths are said, and cells are those of plain masks and plain positions."""

from __future__ import annotations

import pytest
from attack_kit import measured_spikes
from test_spikes import bundled  # noqa: F401  (a fixture)

from sinkscope.sinks.spikes.asked import conditions_of
from sinkscope.sinks.spikes.find import sinks_of, why_sink
from sinkscope.sinks.spikes.records import sufficient

pytestmark = pytest.mark.few_texts


def test_another_seed_draws_other_positions_and_says_the_same(bundled):  # noqa: F811
    spike = sinks_of(bundled).spikes[0].reported
    first, second = (conditions_of([spike], seed)[0] for seed in (0, 1))
    assert first != second
    assert sufficient(first) == sufficient(second) == [("alone",)]


def test_of_a_place_that_is_not_the_first_token_it_is_said_that_it_is_not_asked():
    with pytest.warns(UserWarning, match="is asked of the first token, and this spike is at"):
        _, _, found = measured_spikes(why_sink, "two_delimiters", "llama")
    assert found.answered is None and found.spikes[0].place.words != "the first token"
