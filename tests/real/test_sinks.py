"""Sinks of two real models: every number is that of plain hooks, and what is said of them is known from elsewhere."""

from __future__ import annotations

from importlib import resources

import plain_hooks as plain
import pytest
import torch

from sinkscope.hooks.edit import SinkPatch
from sinkscope.results.notation import Component, Neuron
from sinkscope.sinks.spikes.find import find_sinks, why_sink
from sinkscope.sinks.spikes.record import SpikeResult
from sinkscope.sinks.spikes.tables import Done, Edit, Effect, Role
from sinkscope.sinks.spikes.why_tables import ConstancyKey

LENGTH, TEXTS, BESIDE = 64, 16, 8
LATE = ((11, 1229), (11, 1487))
"""The neurons of SmolLM2 that write its late spike."""
RELAY = ((4, 84), (5, 584), (6, 1824), (7, 1455), (8, 188))
"""Those of Gemma that go on with what the first has begun."""


def pieces(tokenizer, half: str) -> torch.Tensor:
    """The texts of four kinds in turn, cut here once more: even documents choose, odd ones report."""
    rows: list[list[int]] = []
    for number in range(TEXTS):
        kind = ("prose", "dialogue", "code", "tables")[number % 4]
        text = resources.files("sinkscope.models.text").joinpath("kinds", f"{kind}.txt").read_text("utf-8")
        document = text.split("\n%%%\n")[2 * (number // 4) + (half == "report")]
        ids = tokenizer(document, add_special_tokens=False)["input_ids"]
        rows.append([tokenizer.bos_token_id, *ids[: LENGTH - 1]])
    return torch.tensor(rows)


@pytest.fixture(scope="module")
def of_smollm2(smollm2):
    return why_sink(smollm2.model, tokenizer=smollm2.tokenizer)


def effect_of(spike: SpikeResult, key: Edit) -> Effect:
    """What an edit does to a spike."""
    (row,) = [row for row in spike.effects if row.key == key]
    return row


def compare(real, found, step: int) -> list[plain.PlainSpike]:
    """Hold a result against plain hooks on the same texts, where the loss of every so many tokens is read."""
    model, ids = real.model, pieces(real.tokenizer, "report")
    own = plain.spikes(plain.run(model, pieces(real.tokenizer, "choose")))
    seen = plain.run(model, ids)
    for one in own:  # the same direction and layers in other texts
        one.seen = seen
    given = plain.received(seen).mean(-1)
    torch.testing.assert_close(torch.tensor(found.heads), given, atol=1e-3, rtol=0)
    spikes = sorted(found.first_spikes, key=lambda spike: spike.layers)
    assert [(spike.layers, spike.peak) for spike in spikes] == [((one.first, one.last), one.peak) for one in own]
    for spike, one in zip(spikes, own, strict=True):
        assert spike.size["norm_after"].value == pytest.approx(one.norm, rel=1e-3)
        shares = plain.mlp_shares(one)
        written = {row.key.layer: row.share.value for row in spike.components if row.key.kind == "mlp"}
        assert written
        for layer, share in written.items():
            assert share == pytest.approx(shares[layer], abs=1e-3)
        for everywhere, at, texts in ((False, 0, TEXTS), (True, None, BESIDE)):
            with plain.zeroed(model, [neuron.site for neuron in spike.needed_neurons], at):
                left = plain.left(model, ids[:texts], one, step)
            row = effect_of(spike, Edit(Done.NEEDED, everywhere))
            assert row["left"].value == pytest.approx(left.left, abs=1e-3)
            assert row["loss"].value == pytest.approx(left.loss, abs=1e-3)
            intact = plain.readers(seen, one, texts)
            assert [row[number].value for number in ("heads", "tokens", "intact")] == [left.heads, left.tokens, intact]
    return own


@pytest.mark.slow
def test_every_number_of_smollm2_is_that_of_plain_hooks(smollm2, of_smollm2):
    """Also what is left of the late spike without its mark, and the heads, most of which stay."""
    late = compare(smollm2, of_smollm2, 1)[-1]
    mark = of_smollm2.first_spikes[0].marks[0]
    ids = pieces(smollm2.tokenizer, "report")
    with plain.replaced(smollm2.model, ids, "mlp 8", late.ordinary):
        left = plain.left(smollm2.model, ids, late)
    assert mark.key == (Component("mlp", 8),)
    assert mark.left.value == pytest.approx(left.left, abs=1e-3)
    assert left.left < 0.25 and left.heads > 0.6 * of_smollm2.first_spikes[0].heads


@pytest.mark.slow
def test_every_number_of_gemma3_is_that_of_plain_hooks(gemma3):
    """It is a relay of which the first neuron is needed."""
    found = find_sinks(gemma3.model, tokenizer=gemma3.tokenizer)
    compare(gemma3, found, 2)
    relay, start = found.first_spikes
    assert (relay.layers, relay.dims, relay.needed) == ((3, 16), (163,), (Neuron(3, None, 1414),))
    assert (start.layers, start.dims) == ((0, 2), (400,))
    shares = {row.key.site: row.share.value for row in relay.writers}
    assert all(0.1 < shares[site] < 0.2 for site in RELAY)
    assert shares.get((11, 163), 0.0) < 0.05  # a third before the norm behind
    assert min(row.left.value for row in relay.writers if row.role is not Role.NEEDED) > 0.75


def test_smollm2_has_two_spikes_of_which_two_and_three_neurons_are_needed(of_smollm2):
    late, early = of_smollm2.first_spikes
    assert (late.layers, early.layers, late.dims) == ((11, 29), (1, 8), (507,))
    assert {*late.needed} == {*map(Neuron.of, LATE)}
    assert {*early.needed} == {*map(Neuron.of, [(1, 83), (2, 90), (2, 430)])}
    loss = late.effect["loss"].value
    assert effect_of(late, Edit(Done.BUSIEST, everywhere=True))["loss"].value < 0.2 * loss and loss > 1
    assert effect_of(late, Edit(Done.RANDOM, everywhere=True))["reached"].value == 0
    assert [row.key for row in late.erasers[:2]] == [Component("mlp", 28), Component("mlp", 29)]
    constant = {row.key: row for row in late.constant}  # why heads read it
    state, value = constant[ConstancyKey.STATE], constant[ConstancyKey.VALUE]
    assert state.after.value > 0.999 > state.ordinary_after.value and value.after.value < 0.3


def test_the_patch_keeps_copies_from_becoming_sinks_and_leaves_nothing(smollm2):
    """400 copies of "company": the norm falls from half of the first token's to a typical one, and the first stays."""
    (word,) = smollm2.tokenizer(" company", add_special_tokens=False).input_ids
    ids = torch.tensor([[smollm2.tokenizer.bos_token_id] + 400 * [word]])
    norms = [plain.norms(smollm2.model, ids)[11, 0]]
    with SinkPatch(sites=LATE, calibrated=dict.fromkeys(LATE, 0.05)).on(smollm2.model):
        norms.append(plain.norms(smollm2.model, ids)[11, 0])
    intact, patched = norms
    assert intact[-1] > 0.5 * intact[0] > 10 * patched[-1] and patched[0] == intact[0]
    assert torch.equal(plain.norms(smollm2.model, ids)[11, 0], intact)
