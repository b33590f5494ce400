"""Cards of spikes: no sign and no size of a number makes a line that is wrong, too long, or says nothing."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_results import FIRST, control, outcome, spike, with_rows

from sinkscope.errors import SinkscopeError
from sinkscope.results.row import Mean
from sinkscope.sinks.spikes.records import NO_EQUAL, needed_sentence, spike_card

NUMBERS = st.floats(-40, 40) | st.floats(0, 1e6) | st.sampled_from([0.0, -0.0, 0.004, -0.004, 0.99, 1.0, 9.99])
LOSSES = st.floats(-20, 20) | st.sampled_from([0.0, -0.0, -0.004])
MARGINS = st.none() | st.floats(0, 1e6) | st.just(0.004)
WRONG = re.compile(r"nan|None|(?<!\d)-0%|-0\.00\b|, ,|\(\)|\{|  \S  {4}")


@st.composite
def spikes(draw):
    """The sample with other numbers, some of which were not read, other layers, and other needs."""
    rows = []
    for row in spike(FIRST, draw(st.floats(1, 1e6))).rows:
        numbers = {}
        for name, mean in row.numbers.items():
            value = draw(st.integers(0, 5000) | st.just(1)) if mean.kind == "count" else draw(NUMBERS)
            if row.table == "spike" or name in ("left", "share") or draw(st.booleans()):
                numbers[name] = Mean(float(value), draw(MARGINS), (), mean.kind)
        rows.append(replace(row, numbers=numbers))
    first = draw(st.integers(0, 99))
    needed = draw(st.sampled_from([(), ("mlp 3",), ("L0.E3.N50000", "L2.N77"), tuple(f"L2.N{n}" for n in range(9))]))
    dims = tuple(draw(st.lists(st.integers(0, 9000), max_size=9)))
    layers = (first, first + draw(st.integers(0, 30)))
    made = replace(spike(FIRST, 1.0), layers=layers, needed=needed, dims=dims, rows=tuple(rows))
    return made, [made] * draw(st.integers(0, 4))


@settings(max_examples=30, deadline=None)
@given(spikes())
def test_no_number_makes_a_card_that_is_wrong_or_too_long(drawn):
    one, others = drawn
    card = spike_card(one, others)
    text, said = card.text(80), dict(card.rows)
    assert max(map(len, text.splitlines())) <= 80
    assert {"norm", "needed", "at place", "busiest"} <= set(said) and ("also at" in said) == bool(others)
    for label, words in said.items():
        assert label and words.strip() and not WRONG.search(words), words
        assert not re.search(r"(?<![\d,.])1 heads\b|(?<![\d,.(])(?!1 )[\d,]+ head\b", words), words
    assert " ".join(text.split()) == " ".join(f"{card.title} {' '.join(map(' '.join, card.rows))}".split())


@given(st.integers(1, 40), LOSSES, MARGINS, LOSSES, st.booleans())
def test_the_conclusion_names_the_fewest_neurons_and_says_whether_the_strongest_control_does_as_much(
    count, loss, margin, beside, random
):
    effect = outcome("effects", "at place", loss=loss)
    effect = replace(effect, numbers=effect.numbers | {"loss": Mean(loss, margin)})
    names = ("random", "busiest") if random else ("busiest", "random")
    strong, weak = (control(name, loss=value) for name, value in zip(names, (beside, beside - 1), strict=True))
    one = with_rows(spike(FIRST, 232.0), effect, strong, weak)
    said = needed_sentence(replace(one, needed=tuple(f"L{number}.E7.N50000" for number in range(count))))
    assert said.startswith("L0.E7.N50000 ") and ("more" in said.partition(" for ")[0]) == (count > 2)
    assert len(said.split()) <= 30 and not WRONG.search(said)
    assert ("as much" in said) == (beside >= loss - (margin or 0.0)) and (" nats a token" in said)
    assert ("random others" in said) == random and strong.numbers["loss"].digits(beside) in said


def test_a_control_that_is_most_of_its_layer_is_no_control_and_none_at_all_is_refused():
    most = [replace(control(name), note=NO_EQUAL) for name in ("busiest", "random")]
    said = needed_sentence(with_rows(spike(FIRST, 232.0), *most))
    assert said.endswith("they cost 0.34 (± 0.14) nats a token, no set of others writes as much (busiest: 0.01).")
    with pytest.raises(SinkscopeError, match="have no control: give the rows of its controls"):
        with_rows(spike(FIRST, 232.0), without=("controls",))
