"""Cards of spikes: no sign and no size of a number makes a line that is wrong, too long, or says nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_results import FIRST, control, outcome, sample_find_sinks, spike, with_rows

from sinkscope.errors import SinkscopeError
from sinkscope.results.result import Result
from sinkscope.results.row import Card, Mean, Row, row_of
from sinkscope.sinks.spikes.records import NO_EQUAL, needed_sentence, spike_card

SHARES = st.floats(-5, 5) | st.sampled_from([0.0, -0.0, 0.004, -0.004, 1.0, 40.0])
SIZES = st.floats(0, 1e6) | st.sampled_from([0.0, 1e-6, 0.004, 0.99, 1.0, 9.99, 10.0])
LOSSES = st.floats(-20, 20) | st.sampled_from([0.0, -0.0, -0.004])
COUNTS = st.integers(0, 5000) | st.just(1)
MARGINS = st.none() | SIZES
LAYERS = st.integers(0, 127)
PARTS = st.builds("mlp {}".format, LAYERS) | st.builds("attention {}".format, LAYERS) | st.just("embedding")
NEURONS = st.builds("L{}.N{}".format, LAYERS, st.integers(0, 50000)) | st.builds("L{}.E3.N{}".format, LAYERS, LAYERS)


WRONG = re.compile(r"nan|None|(?<!\d)-0%|-0\.00\b|, ,|\(\)|\{|  \S  {4}")


def means(values, kind: str):
    return st.builds(Mean, values, MARGINS, st.just(()), st.just(kind))


NUMBERS = {
    "left": means(SHARES, "share"),
    "share": means(SHARES, "share"),
    "others": means(SHARES, "share"),
    "norm": means(SIZES, "share"),
    "heads": means(COUNTS, "count"),
    "intact": means(COUNTS, "count"),
    "tokens": means(COUNTS, "count"),
    "size": means(SIZES, "count"),
    "sets": means(st.integers(1, 8), "count"),
    "reached": means(st.integers(0, 8), "count"),
    "loss": means(LOSSES, "number"),
}


def rows(table: str, names, must: tuple[str, ...], may: tuple[str, ...] = (), notes=st.just("")):  # noqa: B008
    """Rows of a table, with numbers that they have and numbers that they may have."""
    has = {name: NUMBERS[name] for name in must}
    numbers = st.fixed_dictionaries(has, optional={name: NUMBERS[name] for name in may})
    one = st.builds(Row, st.just(table), names, numbers, notes)
    return st.lists(one, max_size=5, unique_by=lambda row: row.name)


EFFECT = ("heads", "intact", "loss", "tokens")
ROLES = st.sampled_from(["needed", "lowers", "backup", "raises", "another spike", "nothing"])
TABLES = st.tuples(
    rows("writers", NEURONS, ("share", "left"), notes=ROLES),
    rows("components", PARTS, ("share",)),
    rows("erasers", PARTS, ("share",)),
    rows("marks", PARTS, ("left",), ("others", "sets")),
    rows("effects", st.sampled_from(["everywhere", "hidden"]), ("left",), EFFECT),
    rows("controls", st.just("random"), ("left", "sets", "reached", "size"), (*EFFECT, "norm")),
    rows("alone", NEURONS, ("left", "heads"), ("loss",)),
)


@st.composite
def spikes(draw):
    drawn = [row for some in draw(TABLES) for row in some]
    if not draw(st.booleans()):
        drawn = [row for row in drawn if row.table not in ("effects", "controls")]
        effects: list[Row] = []
    else:
        effects = [outcome("effects", "at place", loss=draw(st.none() | LOSSES)), control("busiest", 8)]
    first = draw(LAYERS)
    needed = tuple(row.name for row in drawn if row.note == "needed") or draw(st.sampled_from([(), ("mlp 3",)]))
    made = replace(spike(FIRST, draw(SIZES)), layers=(first, first + draw(st.integers(0, 30))), needed=needed)
    made = replace(made, dims=tuple(draw(st.lists(st.integers(0, 9000), max_size=9))))
    one = replace(made, rows=(*made.rows[:3], *drawn, *effects))
    return one, [made for _ in range(draw(st.integers(0, 4)))]


@settings(max_examples=30, deadline=None)
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
        assert label and said.strip() and not WRONG.search(said), said
        assert not re.search(r"(?<![\d,.])1 heads\b|(?<![\d,.(])(?!1 )[\d,]+ head\b", said), said
    said = dict(card.rows)
    assert {"norm", "needed"} <= set(said)
    assert ("at place" in said) == ("busiest" in said) == bool(one.table("effects"))
    assert ("also at" in said) == bool(others)
    shown = " ".join(text.split())
    assert shown == " ".join(f"{card.title} {' '.join(f'{label} {said}' for label, said in card.rows)}".split())


@given(st.integers(0, 9999), st.integers(1, 9999), MARGINS)
def test_readers_are_a_count_with_its_margin(heads, total, margin):
    readers = row_of("attention", "the first token", heads=Mean(heads, margin, (), "count"), total=total)
    said = sample_find_sinks(spikes=(), attention=(readers,)).conclusion() if heads else f"0 of {total:,} heads give "
    assert said.startswith(f"{heads:,}") and f"of {total:,} heads give " in said
    assert not heads or (("±" in said) == (margin is not None and margin > 0.5) and len(said.split()) <= 30)


@given(st.integers(1, 40), LOSSES, MARGINS, LOSSES, st.booleans())
def test_the_conclusion_names_the_fewest_neurons_and_says_whether_the_strongest_control_does_as_much(
    count, loss, margin, beside, random
):
    effect = outcome("effects", "at place", loss=loss)
    effect = replace(effect, numbers=effect.numbers | {"loss": Mean(loss, margin)})
    strong, weak = (
        control(name, loss=loss) for name, loss in zip(("random", "busiest"), (beside, beside - 1), strict=True)
    )
    if not random:
        strong, weak = replace(strong, name="busiest"), replace(weak, name="random")
    one = with_rows(spike(FIRST, 232.0), effect, strong, weak)
    said = needed_sentence(replace(one, needed=tuple(f"L{number}.E7.N50000" for number in range(count))))
    assert said.startswith("L0.E7.N50000 ") and ("more" in said.partition(" for ")[0]) == (count > 2)
    assert len(said.split()) <= 30 and not re.search(r"nan|None|-0\.00\b|-0%", said)
    assert ("as much" in said) == (beside >= loss - (margin or 0.0)) and (" nats a token" in said)
    assert ("random others" in said) == random and strong.numbers["loss"].digits(beside) in said


def test_a_control_that_is_most_of_its_layer_is_no_control_and_the_sentence_says_so():
    one = with_rows(
        spike(FIRST, 232.0), replace(control("busiest"), note=NO_EQUAL), replace(control("random"), note=NO_EQUAL)
    )
    assert needed_sentence(one).endswith(
        "zeroed there, they cost 0.34 (± 0.14) nats a token, no set of others writes as much (busiest: 0.01)."
    )
    assert dict(spike_card(one).rows)["busiest"].startswith("40 other neurons zeroed, 100% of the written norm, 98%")


def test_effects_without_a_control_cannot_be_said():
    with pytest.raises(SinkscopeError, match="have no control: give the rows of its controls"):
        with_rows(spike(FIRST, 232.0), without=("controls",))


@dataclass(frozen=True, kw_only=True)
class Hostile(Result):
    """A result whose card has the words of a tokenizer."""

    kind = "test-hostile"

    def cards(self) -> list[Card]:
        return [Card("<b>", (("a&b", "<script>"),))]


def test_what_comes_from_a_tokenizer_is_escaped():
    page = Hostile().fragment()
    assert "<script>" not in page and "&lt;script&gt;" in page and "a&amp;b" in page
