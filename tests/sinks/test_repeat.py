"""`repeat` of norms and of attention: against planted truth and against the long way; what is refused."""

from __future__ import annotations

import pytest
import torch
from attack_kit import measured_spikes, setup_of
from organisms import organism
from raw_kit import residuals
from refusals import refused

from sinkscope.measure import Setup
from sinkscope.sinks.first_tokens import spike_of
from sinkscope.sinks.repeat import half_reached, repeat
from sinkscope.sinks.spikes.find import find_sinks

pytestmark = pytest.mark.few_texts


def along(setup: Setup, rows: torch.Tensor) -> torch.Tensor:
    """Projection of each position of rows on the spike's direction, over that of the first one, from plain passes."""
    spike = spike_of(setup).spike
    reached = spike.along(residuals(setup.target.model, rows)[spike.peak])
    return reached / reached[:, :1]


@pytest.fixture(scope="module")
def llama():
    """One sink neuron."""
    return organism("llama", 2)


@pytest.fixture(scope="module")
def setup(llama):
    return setup_of(llama)


# --- norms ---------------------------------------------------------------------------------------------------------


def test_where_no_spike_is_at_the_first_token_nothing_is_said_of_copies():
    m, setup, _ = measured_spikes(find_sinks, "two_delimiters", "llama")
    delimiter = m.tokenizer.decode([m.truth.delimiters[0]])
    result = repeat.on(setup, tokens=[delimiter], max_repeats=6)
    assert result.conclusion().startswith("No norm spike was found at the first token") and result.values is None
    attended = repeat.on(setup, quantity="attention", max_repeats=6)
    assert f"{delimiter!r} wherever it stands" in attended.tokens[0]


def test_a_single_position_that_stands_out_is_not_made_by_repetition():
    shares = torch.tensor([0.1, 0.1, 0.9, 0.1, 0.9, 0.9, 0.9])
    assert [half_reached(shares[:end]) for end in (4, 6, 7)] == [None, 5, 5]


# --- attention -----------------------------------------------------------------------------------------------------


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": ["poem book"]}, r"'poem book' is not one known token here, but \['poem', 'book'\]; give a string"),
        ({"tokens": ["poem"], "prefix": "a poem of"}, r"--prefix 'a poem of' contains a repeated token"),
        ({"max_repeats": 2048}, r"--max-repeats 2048 and .* the context of .* is 2048: there is room for \d+$"),
        ({"prefix": "of " * 2048, "tokens": ["poem"]}, r"2\d\d\d tokens around them .*: there is room for 0"),
    ],
)
def test_bad_input_is_refused_in_one_line(setup, options, message):
    with refused(message):
        repeat.on(setup, **options)
