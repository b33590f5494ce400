"""Cards of spikes: no sign and no size of a number makes a line that is wrong, too long, or says nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import escape
from sample_results import CONTROL, CONTROLS, EFFECTS, FIRST, OUTCOME, sample_find_sinks, spike

from sinkscope.results.cards import Card
from sinkscope.results.result import Result
from sinkscope.sinks.spikes.cards import needed_sentence, readers_sentence, spike_card
from sinkscope.sinks.spikes.records import (
    Alone,
    Candidate,
    Control,
    Controls,
    Effects,
    MarkLeft,
    Needed,
    OtherLeft,
    Outcome,
    PartShare,
    Readers,
)

SHARES = st.floats(-5, 5) | st.sampled_from([0.0, -0.0, 0.004, -0.004, 1.0, 40.0])
SIZES = st.floats(0, 1e6) | st.sampled_from([0.0, 1e-6, 0.004, 0.99, 1.0, 9.99, 10.0])
MARGINS = st.none() | SIZES
LOSSES = st.none() | st.floats(-20, 20) | st.sampled_from([0.0, -0.0, -0.004])
INTERVALS = st.none() | st.tuples(st.floats(-20, 20), st.floats(0, 9)).map(lambda one: (one[0], sum(one)))
HEADS = st.integers(0, 5000)
LAYERS = st.integers(0, 127)
ROLES = st.sampled_from(["lowers", "backup", "raises", "another spike", "nothing"])
WRITER = st.builds(
    Candidate, LAYERS, st.none() | st.integers(0, 9), st.integers(0, 50000), SHARES, MARGINS, SHARES, SHARES, ROLES
)
PART = st.builds("mlp {}".format, LAYERS) | st.builds("attention {}".format, LAYERS) | st.just("embedding")
MARK = st.builds(MarkLeft, PART, SHARES, MARGINS, st.tuples(HEADS, HEADS), st.none() | SHARES, st.integers(0, 9))
SAID = {
    "left": SHARES,
    "left_margin": MARGINS,
    "heads": st.tuples(HEADS, HEADS),
    "heads_margin": st.tuples(MARGINS, MARGINS),
    "loss": LOSSES,
    "interval": INTERVALS,
    "tokens": st.integers(0, 9999),
    "others": st.lists(st.builds(OtherLeft, st.integers(0, 9), SHARES), max_size=5).map(tuple),
}
OUTCOMES = st.builds(Outcome, **SAID)
COUNTS = {"sets": st.integers(1, 8), "reached": st.integers(0, 8), "norm": st.none() | SHARES}
OTHERS = st.builds(Control, **SAID, **COUNTS, count=st.floats(1, 900))
FEW = st.none() | OUTCOMES
EFFECT = st.none() | st.builds(Effects, OUTCOMES, FEW, FEW, FEW, st.none() | SHARES)


def some(one, most: int):
    return st.lists(one, max_size=most).map(tuple)


FIELDS = st.fixed_dictionaries(
    {
        "layers": st.tuples(LAYERS, st.integers(0, 30)).map(lambda one: (one[0], sum(one))),
        "ratio": SIZES,
        "norm": SIZES,
        "before": SIZES,
        "ratio_beside": SIZES,
        "dims": some(st.integers(0, 9000), 9),
        "writers": some(st.builds(PartShare, PART, SHARES, MARGINS), 6),
        "erasers": some(st.builds(PartShare, PART, st.floats(-5, -0.05), MARGINS), 4),
        "effect": EFFECT,
        "controls": st.builds(Controls, st.none() | OTHERS, st.none() | OTHERS),
        "marks": some(MARK, 3),
        "heads": HEADS,
    }
)


@st.composite
def spikes(draw):
    drawn = draw(st.lists(WRITER, max_size=9, unique_by=lambda one: str(one.address)))
    count = draw(st.integers(0, 9))
    neurons = tuple(replace(one, role="needed") if number < count else one for number, one in enumerate(drawn))
    members = tuple(one.address for one in neurons[:count])
    parts = tuple(map(str, members)) or draw(st.sampled_from([(), ("mlp 3",), ("embedding", "attention 11")]))
    needed = Needed(members, parts, draw(SHARES), draw(MARGINS)) if parts else None
    alone = [Alone(one.layer, one.expert, one.neuron, draw(SHARES), draw(HEADS), draw(LOSSES), None) for one in members]
    own = {"neurons": neurons, "needed": needed, "alone": tuple(alone)}
    made = replace(spike(FIRST, 1.0), **own, **draw(FIELDS))
    return made, [replace(made, heads=draw(HEADS)) for _ in range(draw(st.integers(0, 4)))]


@settings(max_examples=60, deadline=None)
@given(spikes())
def test_no_number_makes_a_card_that_is_wrong_or_too_long(drawn):
    one, others = drawn
    card = spike_card(one, others)
    text = card.text(80)
    assert max(map(len, text.splitlines())) <= 80
    first, last = one.layers
    assert card.title == f"Spike at the first token, layer{'' if first == last else 's'} {first}" + (
        "" if first == last else f"-{last}"
    )
    for label, said in card.rows:
        assert label and said.strip() and not re.search(r"nan|None|(?<!\d)-0%|-0\.00\b|, ,|\(\)|  \S  {4}", said), said
        assert not re.search(r"\b1 heads\b|\b[^1\D] head\b", said), said
    said = dict(card.rows)
    assert {"norm", "needed"} <= set(said)
    assert ("at place" in said) == (one.effect is not None)
    assert ("busiest" in said) == (one.effect is not None and one.controls.busiest is not None)
    assert ("also at" in said) == bool(others)
    shown = " ".join(text.split())
    assert shown == " ".join(f"{card.title} {' '.join(f'{label} {said}' for label, said in card.rows)}".split())


@given(st.integers(0, 9999), st.integers(1, 9999), MARGINS)
def test_readers_are_a_count_with_its_margin(heads, total, margin):
    said = readers_sentence(Readers("the first token", heads, total, margin, 12))
    assert said.startswith(f"{heads:,} of {total:,} heads give the first token more than 0.3 of their attention")
    assert ("±" in said) == (margin is not None and margin >= 0.5) and len(said.split()) <= 30


@given(st.integers(1, 40), LOSSES, INTERVALS, LOSSES, st.booleans())
def test_the_conclusion_names_the_fewest_neurons_and_says_whether_the_strongest_control_does_as_much(
    count, loss, interval, beside, random
):
    parts = tuple(f"L{number}.E7.N50000" for number in range(count))
    outcome, control = replace(OUTCOME, loss=loss, interval=interval), replace(CONTROL, loss=beside)
    weak = replace(CONTROL, loss=None if beside is None else beside - 1, left=1.0)
    one = replace(
        spike(FIRST, 232.0),
        needed=replace(spike(FIRST, 1.0).needed, parts=parts),
        effect=replace(EFFECTS, at_place=outcome),
        controls=replace(CONTROLS, busiest=weak if random else control, random=control if random else weak),
    )
    said = needed_sentence(one)
    assert said.startswith("L0.E7.N50000 ") and ("more" in said.partition(" for ")[0]) == (count > 2)
    assert len(said.split()) <= 30 and not re.search(r"nan|None|-0\.00\b|-0%", said)
    if loss is not None and beside is not None:
        wins = beside >= loss - (outcome.margin or 0.0)
        assert ("no more than" in said) == wins and (" nats a token" in said)
        assert ("random others" in said) == random and (f"{beside:.2f}".replace("-0.00", "0.00")) in said


def test_needed_neurons_are_writers_equal_ones_together_and_the_others_stand_apart():
    def some(role, share, layer, left, *numbers):
        return [Candidate(layer, None, number, share, None, 0.0, left, role) for number in numbers]

    needed, lower = some("needed", 0.145, 3, 0.1, 7, 900, 901, 902, 903), some("lowers", 0.03, 2, 0.95, 1, 2)
    apart = [*some("raises", 0.04, 1, 1.73, 5), *some("another spike", 0.1, 1, 0.98, 6)]
    one = replace(spike(FIRST, 40.0), neurons=(*needed, *lower, *apart), writers=())
    said = dict(spike_card(one).rows)
    assert said["writers"] == "L3.N7, N900, N901 and 2 more 14% each   2 others that lower it 6%"
    assert said["not writers"] == ("L1.N5 4%, raises it (173% left)   L1.N6 10%, lowers another spike more (98% left)")
    assert set(one.calibrated) == {two.address for two in (*needed, *lower)}


def test_the_same_card_is_in_the_text_and_on_the_page():
    found = sample_find_sinks()
    cards = found.cards()
    assert [card.title for card in cards] == ["Spike at the first token, layers 2-4", "Attention"]
    for card in cards:
        assert card.text(80) in found.text(80, brief=True) and card.text() in found.summary()
        page = found.to_html()
        assert f"<b>{card.title}</b>" in page
        for label, said in card.rows:
            assert f'<th class="left">{escape(label)}</th><td class="left">{escape(said)}</td>' in page
    assert "remaining" not in found.text(80, brief=True) and "remaining" in found.text(80)
    assert "L2.N412" in found.to_csv()


@dataclass(frozen=True, kw_only=True)
class Hostile(Result):
    """A result whose card has the words of a tokenizer."""

    kind = "test-hostile"

    def cards(self) -> list[Card]:
        return [Card("<b>", (("a&b", "<script>"),))]


def test_what_comes_from_a_tokenizer_is_escaped():
    page = Hostile().fragment()
    assert "<script>" not in page and "&lt;script&gt;" in page and "a&amp;b" in page


@pytest.mark.parametrize("width", [30, 80, 200])
def test_what_does_not_fit_goes_on_under_its_own_numbers(width):
    lines = Card("title", (("norm", "word " * 60), ("without", "2"))).text(width).splitlines()
    assert all(line.startswith(" " * 11) for line in lines[2:-1]) and max(map(len, lines)) <= max(width, 31)
