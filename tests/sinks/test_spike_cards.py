"""Cards of spikes: no sign and no size of a number makes a line that is wrong, too long, or says nothing."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_results import FIRST, WITHOUT, sample_find_sinks, spike

from sinkscope.results.cards import Card
from sinkscope.results.effect import Effect
from sinkscope.sinks.spikes.cards import readers, spike_card
from sinkscope.sinks.spikes.records import (
    Alone,
    Chance,
    MarkLeft,
    Needed,
    NeuronShare,
    PartShare,
    Readers,
    Removal,
)

SHARES = st.floats(-5, 5) | st.sampled_from([0.0, -0.0, 0.004, -0.004, 1.0, 40.0])
SIZES = st.floats(0, 1e6) | st.sampled_from([0.0, 1e-6, 0.004, 0.99, 1.0, 9.99, 10.0])
MARGINS = st.none() | SIZES
TIMES = st.none() | st.floats(1e-7, 1e7)
HEADS = st.integers(0, 5000)
LAYERS = st.integers(0, 127)
WRITER = st.builds(NeuronShare, LAYERS, st.none() | st.integers(0, 9), st.integers(0, 50000), SHARES, MARGINS, SHARES)
PART = st.builds("mlp {}".format, LAYERS) | st.builds("attention {}".format, LAYERS) | st.just("embedding")
CHANCE = st.none() | st.builds(Chance, SHARES, HEADS, TIMES, SHARES, st.integers(1, 12))
MARK = st.builds(MarkLeft, PART, SHARES, MARGINS, st.none() | st.tuples(HEADS, HEADS))
COUNTS = {"heads": st.tuples(HEADS, HEADS), "heads_margin": st.tuples(MARGINS, MARGINS)}
RISES = {"perplexity": TIMES, "perplexity_margin": MARGINS}
FIXED = {"parts": st.just(("L1.N2",)), "texts": st.just(12)}
REMOVAL = st.builds(
    Removal, left=SHARES, left_margin=MARGINS, attention=SHARES, random=CHANCE, **COUNTS, **RISES, **FIXED
)


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
        "without_writers": st.none() | REMOVAL,
        "marks": some(MARK, 3),
        "heads": HEADS,
    }
)


@st.composite
def spikes(draw):
    neurons = tuple(draw(st.lists(WRITER, max_size=9, unique_by=lambda one: str(one.address))))
    members = tuple(one.address for one in neurons[: draw(st.integers(0, 9))])
    parts = tuple(map(str, members)) or draw(st.sampled_from([(), ("mlp 3",), ("embedding", "attention 11")]))
    needed = Needed(members, parts, draw(SHARES), draw(MARGINS)) if parts else None
    alone = [Alone(one.layer, one.expert, one.neuron, draw(SHARES), draw(HEADS), draw(TIMES), 0.1) for one in neurons]
    own = {"neurons": neurons, "needed": needed, "alone": tuple(alone), "backups": ()}
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
        assert label and said.strip() and not re.search(r"nan|None|(?<!\d)-0%|-0\.0|, ,|\(\)|  \S  {4}", said), said
        assert not re.search(r"\b1 heads\b|\b[^1\D] head\b|x 0\.0+(?![\d])", said), said
    said = dict(card.rows)
    assert {"norm", "needed"} <= set(said)
    assert ("without" in said) == (one.without_writers is not None)
    assert ("random" in said) == (one.without_writers is not None and one.without_writers.random is not None)
    assert ("writers" in said) >= bool(one.neurons) and ("also at" in said) == bool(others)
    shown = " ".join(text.split())
    assert shown == " ".join(f"{card.title} {' '.join(f'{label} {said}' for label, said in card.rows)}".split())


@given(st.integers(0, 9999), st.integers(1, 9999), MARGINS, st.integers(1, 40), SHARES, SHARES)
def test_the_conclusion_has_a_count_its_margin_neurons_and_the_control(heads, total, margin, count, value, beside):
    without = replace(WITHOUT, parts=tuple(f"L{number}.E7.N50000" for number in range(count)))
    one = replace(spike(FIRST, 232.0), without_writers=without)
    read = Readers("the first token", heads, total, margin, 12)
    said = readers(read, one, Effect(value, None, {"random neurons": beside}))
    assert said.startswith(f"{heads:,} of {total:,} heads give the first token more than 0.3 of their attention")
    assert ("±" in said) == (margin is not None and margin >= 0.5) and len(said.split()) <= 30
    assert "; ablating L0.E7.N50000" in said and ("more" in said.partition(";")[2]) == (count > 2)
    assert re.search(r"by -?[\d.,]+% \(random neurons: -?[\d.,]+%\)\.$", said)
    assert readers(read).endswith((" attention.", ")."))


def test_equal_neurons_are_named_together_and_many_small_ones_are_one_clause():
    parts = [NeuronShare(3, None, number, 0.145, None, 0.0) for number in (7, 900, 901, 902, 903)]
    small = [NeuronShare(2, None, number, 0.03 + 0.004 * number, None, 0.0) for number in range(4)]
    against = [NeuronShare(1, None, 5, -0.4, None, 0.0)]
    one = replace(spike(FIRST, 40.0), neurons=(*parts, *small, *against), writers=())
    said = dict(spike_card(one).rows)["writers"]
    assert said == "L3.N7, N900, N901 and 2 more 14% each   L1.N5 -40%   4 others 14%"


def test_the_same_card_is_in_the_text_and_on_the_page():
    found = sample_find_sinks()
    cards = found.cards()
    assert [card.title for card in cards] == ["Spike at the first token, layers 2-4", "Elsewhere"]
    for card in cards:
        assert card.text(80) in found.text(80, brief=True) and card.text() in found.summary()
        assert card.html() in found.to_html()
    assert "remaining" not in found.text(80, brief=True) and "remaining" in found.text(80)
    assert "L2.N412" in found.to_csv()


def test_what_comes_from_a_tokenizer_is_escaped():
    card = Card("<b>", (("a&b", "<script>"),))
    assert "<script>" not in card.html() and "&lt;script&gt;" in card.html() and "a&amp;b" in card.html()


@pytest.mark.parametrize("width", [30, 80, 200])
def test_what_does_not_fit_goes_on_under_its_own_numbers(width):
    lines = Card("title", (("norm", "word " * 60), ("without", "2"))).text(width).splitlines()
    assert all(line.startswith(" " * 11) for line in lines[2:-1]) and max(map(len, lines)) <= max(width, 31)
