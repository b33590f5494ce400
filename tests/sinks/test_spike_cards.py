"""What is said of a spike: the fewest neurons, what zeroing them does, and the strongest control."""

from __future__ import annotations

from dataclasses import replace

import pytest
from refusals import refused
from sample_results import sample_find_sinks

from sinkscope.results.mean import Mean
from sinkscope.results.notation import Neuron
from sinkscope.results.table import whole
from sinkscope.sinks.spikes.sentences import needed_sentence
from sinkscope.sinks.spikes.tables import Done, Edit, Effect


def sentence_of(count: int, loss: float, busiest: float, random: float, *, norm: float = 1.0, heads: int = 2) -> str:
    """The sentence for so many neurons: what zeroing them does, and what their controls do."""
    needed = tuple(Neuron(layer, None, 5) for layer in range(count))
    at_place = Effect(
        key=Edit(Done.NEEDED),
        parts=needed,
        left=Mean(0.02, kind="share"),
        heads=whole(heads),
        intact=whole(20),
        loss=Mean(loss, 0.14),
    )
    first = Done.BUSIEST if norm == 1.0 else Done.AS_MANY
    rows = [at_place]
    for done, value in ((first, busiest), (Done.RANDOM, random)):
        key = Edit(done, everywhere=True)
        rows.append(Effect(key=key, left=Mean(1.0), loss=Mean(value), norm=Mean(norm), size=whole(7)))
    spike = replace(sample_find_sinks().spikes[0], needed=needed, effects=tuple(rows))
    sentence = needed_sentence(spike)
    return sentence.replace(" nats a token to the loss of later tokens", "")


def test_the_conclusion_names_the_needed_neurons_and_the_strongest_control():
    assert sentence_of(1, 0.34, 0.01, -0.9) == (
        "Zeroing L0.N5 at the first token leaves 2% of its norm spike and 2 of the 20 heads that attend to it, and "
        "adds 0.34 (± 0.14). As a control, 7 other neurons that write as much add 0.01."
    )
    assert sentence_of(9, 0.34, 0.01, 0).startswith("Zeroing L0.N5 and 8 more at the first token leaves")


@pytest.mark.parametrize(("loss", "control"), [(0.34, 0.30), (-0.004, -0.1), (0.1, 2.0)])
def test_a_control_that_does_as_much_within_the_margin_is_said_first(loss, control):
    for busiest, random in ((control, -9.0), (-9.0, control)):
        sentence = sentence_of(2, loss, busiest, random)
        assert (
            f"Not shown to matter more than others: as a control, 7 other neurons that write as much add {control:.2f}"
            in sentence
        )


def test_a_control_that_does_less_is_not():
    assert "Not shown" not in sentence_of(2, 0.34, 0.1, 0.19)


def test_others_that_write_hardly_anything_are_no_control():
    sentence = sentence_of(1, 0.3, 2.5, 2.5, norm=0.01)
    assert sentence.endswith("There is no fair control: no other neurons of these layers write as much.")
    assert "2.5" not in sentence


def test_others_that_write_less_say_how_much():
    assert sentence_of(1, 0.3, 0.1, 0.0, norm=0.4).endswith(
        "No other neurons write as much: the busiest write 40% as much and add 0.10."
    )


def test_where_most_heads_still_attend_the_sink_is_not_gone():
    words = "most heads still attend, so the sink itself is not gone"
    assert words in sentence_of(1, 0.34, 0.01, 0, heads=15)
    assert words not in sentence_of(1, 0.34, 0.01, 0, heads=2)


def test_effects_without_a_control_are_refused():
    spike = sample_find_sinks().spikes[0]
    with refused("have no control: give its rows"):
        replace(spike, effects=tuple(row for row in spike.effects if not row.is_control))


@pytest.mark.parametrize("done", Done)
def test_each_edit_of_a_spike_has_its_words(done):
    effect = Effect(key=Edit(done, part=Neuron(1, None, 2)), since=3, left=Mean(1.0), norm=Mean(1.0), size=Mean(2.0))
    remedy = f"Effect in sinkscope/sinks/spikes/tables.py: what {done} is called in label, short_label and group"
    assert None not in (effect.label, effect.short_label, effect.group), remedy
    assert (effect.label == "nothing") == (done is Done.INTACT), remedy
