"""Numbers of `find_sinks` and `why_sink`: each is that of plain hooks, in planted models and in that of the package."""

from __future__ import annotations

from statistics import median

import plain_hooks as plain
import pytest
import torch
from attack_kit import measured_spikes

import sinkscope as ss
from sinkscope.results.notation import Component, Neuron
from sinkscope.sinks.spikes.conditions import conditions_of
from sinkscope.sinks.spikes.controls import MOST, by_norm
from sinkscope.sinks.spikes.find import find_sinks, sinks_of, why_sink
from sinkscope.sinks.spikes.result import FindSinks
from sinkscope.sinks.spikes.sentences import sufficient
from sinkscope.sinks.spikes.survey import ratios_of
from sinkscope.sinks.spikes.tables import Done, Edit
from sinkscope.sinks.spikes.why_tables import Cause

NEEDED = (
    "Zeroing L1.N338 at the first token leaves 0% of its norm spike and 2 of the 20 heads that attend to it, and "
    "adds 0.15 (± 0.05) nats a token to the loss of later tokens. There is no fair control: no other neurons of these "
    "layers write as much."
)
"""What is said of the model in the package: two thirds of its small MLP write less, in norm, than that neuron."""


@pytest.mark.few_texts
@pytest.mark.parametrize("kind", ["sink", "redundant_pair"])
def test_shares_and_what_is_left_are_those_of_plain_hooks(kind):
    o, setup, found = measured_spikes(why_sink, kind)
    model, sinks, (spike,) = o.model, sinks_of(setup), found.spikes
    ids = sinks.report.ids
    (own,) = plain.spikes(plain.run(model, ids))
    assert (spike.layers, spike.peak) == ((own.first, own.last), own.peak)
    assert spike.size.norm_after.value == pytest.approx(own.norm, rel=1e-3)
    shares = plain.mlp_shares(own)
    for row in spike.components:
        if row.key.kind == "mlp":
            assert row.share.value == pytest.approx(shares[row.key.layer], abs=1e-3)
    needed = [one.site for one in spike.needed_neurons]
    layer = needed[0][0]
    norms = plain.written_norms(model, sinks.survey.ids, layer)
    order = [number for number in norms.argsort(descending=True).tolist() if (layer, number) not in needed]
    total = sum(norms[neuron] for _, neuron in needed)
    count = 1 + int((norms[order].cumsum(0) - total).abs().argmin())
    effects = {row.key: row for row in spike.effects}
    busiest = Edit(Done.BUSIEST, everywhere=True)
    if count > MOST * len(norms):  # no other neurons write as much
        busiest = Edit(Done.AS_MANY, everywhere=True)
        count = len(needed)
    assert effects[busiest]["size"].value == count
    others = [(layer, number) for number in order[:count]]
    cases = [
        (Edit(Done.NEEDED), needed, 0),
        (Edit(Done.NEEDED, everywhere=True), needed, None),
        (busiest, others, None),
    ]
    for key, neurons, at in cases:
        with plain.zeroed(model, neurons, at):
            left = plain.left(model, ids, own)
        numbers = [effects[key][number].value for number in ("left", "loss", "heads", "tokens", "intact")]
        wanted = [left.left, left.loss, left.heads, left.tokens, plain.readers(own.seen, own)]
        assert numbers == pytest.approx(wanted, abs=1e-3)


def test_a_dimension_that_is_large_everywhere_hides_no_spike():
    states = torch.randn(1, 4, 32, 64, generator=torch.Generator().manual_seed(0))
    states[:, :, 0, :8] += 20
    states[..., 9] += 500
    assert torch.equal(ratios_of(states)[0] > 3, torch.arange(32).expand(4, -1) == 0)
    torch.testing.assert_close(ratios_of(states), plain.ratios(states))


# --- the model in the package ---


def test_the_model_in_the_package_has_the_planted_neuron_and_the_file_returns_it(bundled, tmp_path):
    found = find_sinks.on(bundled)
    assert found.needed == (Neuron(1, None, 338),)
    assert found.conclusion() == NEEDED
    again = FindSinks.load(found.save(tmp_path / "sinks.json"))
    assert again.to_dict() == found.to_dict() and again.text() == found.text()
    assert ss.SinkPatch.from_result(again).sites == (Neuron(1, None, 338),)


def test_the_circuit_says_what_marks_the_place_beside_other_components_as_plain_hooks_do(bundled):
    """The mark is measured in texts that did not choose it, the others in those that did."""
    model, sinks, found = bundled.target.model, sinks_of(bundled), why_sink.on(bundled)
    outcomes = []
    for ids, parts in ((sinks.report.ids, ["attention 0"]), (sinks.survey.ids, ["embedding", "mlp 0", "attention 1"])):
        seen = plain.run(model, ids)
        (own,) = plain.spikes(seen)
        for part in parts:
            with plain.replaced(model, ids, part, own.ordinary):
                outcomes.append(plain.left(model, ids, own).left)
    (row,) = (row for row in found.spikes[0].marks if row.key == (Component("attention", 0),))
    assert [row["left"].value, row["others"].value] == pytest.approx([outcomes[0], median(outcomes[1:])], abs=1e-3)
    assert found.details()[0] == NEEDED
    assert found.conclusion().startswith("An ordinary token that sees only itself gets ")


def test_another_seed_draws_other_positions_and_says_the_same(bundled):
    spike = sinks_of(bundled).spikes[0].reported
    first, second = (conditions_of([spike], seed)[0] for seed in (0, 1))
    assert first != second
    assert sufficient(first) == sufficient(second) == [(Cause.ALONE,)]


# --- controls that write as much ---


def test_the_last_digits_of_norms_decide_no_order():
    """Two machines give norms that differ in the last digits, and one draw of random sets."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.rand(200, generator=generator).repeat(2) + 0.5  # each norm twice
    noisy = exact * (1 + 2e-7 * (torch.rand(400, generator=generator) - 0.5))
    order = by_norm(torch.arange(400), exact)
    assert torch.equal(by_norm(torch.arange(400), noisy), order)
    assert not torch.equal(noisy.argsort(descending=True, stable=True), order)  # else nothing was asked
    assert bool((exact[order].diff() <= 2e-3).all())
