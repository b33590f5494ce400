"""Cards of spikes and the conclusion: no sign and no size of a number makes a line that is wrong or too long."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sample_results import FIRST, control, outcome, spike, with_rows, writer

from sinkscope.errors import SinkscopeError
from sinkscope.results.row import Mean
from sinkscope.sinks.spikes.records import NO_EQUAL, needed_sentence, spike_card


def test_a_card_says_numbers_in_words_that_fit_a_line():
    one = Mean(1.0, None, (), "count")
    hidden, busiest = outcome("effects", "hidden", 1.0, 0), control("busiest")
    rows = (
        outcome("effects", "at place", -0.004, 0, -0.004),
        replace(hidden, numbers=hidden.numbers | {"intact": one}),
        replace(busiest, numbers=busiest.numbers | {"size": one}),
        writer("L2.N412", -0.004, -1.5, "another spike", 0.004),
    )
    made = with_rows(spike(FIRST, 9.96), *rows)
    made = replace(made, needed=tuple(f"L2.N{n}" for n in range(9)), dims=tuple(range(9)))
    card = spike_card(made, [made] * 4)
    text, said = card.text(80), dict(card.rows)
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(text.split()) == " ".join(f"{card.title} {' '.join(map(' '.join, card.rows))}".split())
    assert said["norm"].endswith("along dimensions 0, 1, 2, 3, 4, 5, 6, 7 and 8") and "10.0 times" in said["norm"]
    assert said["needed"] == "L2.N0, L2.N1, L2.N2 and 6 more; 2% (± 1%) left without these 9 at the place"
    assert said["at place"].endswith("32 (± 2) heads, 0 (± 1) then, 0.00 (± 0.14) nats over 992 tokens")
    assert said["hidden"].startswith("100% (± 1%) of the spike, 1 head, 0 (± 1) then, ")
    assert said["busiest"].startswith("1 other neuron zeroed, ") and said["writers"].startswith("L2.N412 0%, another")
    assert said["also at"] == 3 * "the first token: 32 (± 2) heads   " + "and 1 more"


@pytest.mark.parametrize(
    ("count", "loss", "margin", "beside", "random", "words"),
    [
        (1, 0.34, 0.14, 0.01, False, "L0 suffices: it costs 0.34 (± 0.14), the busiest others 0.01."),
        (2, 0.34, 0.14, 0.3, True, "L0 and L1 suffice: they cost 0.34 (± 0.14), random others as much (0.30)."),
        (9, -0.004, None, -2.0, False, "L0 and 8 more suffice: they cost 0.00, the busiest others -2.00."),
    ],
)
def test_the_conclusion_names_the_fewest_neurons_and_the_strongest_control(count, loss, margin, beside, random, words):
    effect = outcome("effects", "at place", loss=loss)
    effect = replace(effect, numbers=effect.numbers | {"loss": Mean(loss, margin)})
    names = ("random", "busiest") if random else ("busiest", "random")
    strong, weak = (control(name, loss=value) for name, value in zip(names, (beside, beside - 1), strict=True))
    one = replace(with_rows(spike(FIRST, 232.0), effect, strong, weak), needed=tuple(f"L{n}.N5" for n in range(count)))
    said = needed_sentence(one).replace(" for the spike at the first token: zeroed there,", ":")
    assert said.replace(".N5", "").replace(" nats a token", "") == words


def test_a_control_that_is_most_of_its_layer_is_no_control_and_none_at_all_is_refused():
    most = [replace(control(name), note=NO_EQUAL) for name in ("busiest", "random")]
    said = needed_sentence(with_rows(spike(FIRST, 232.0), *most))
    assert said.endswith("they cost 0.34 (± 0.14) nats a token, no set of others writes as much (busiest: 0.01).")
    with pytest.raises(SinkscopeError, match="have no control: give the rows of its controls"):
        with_rows(spike(FIRST, 232.0), without=("controls",))
