"""Sinks of two real models: every number is that of plain hooks, and what is said of them is known from elsewhere."""

from __future__ import annotations

from importlib import resources

import plain_spikes as plain
import pytest
import torch

import sinkscope as ss
from sinkscope.hooks.edit import SinkPatch
from sinkscope.sinks.spikes.find import find_sinks, why_sink
from tests.real.plain import norms

LENGTH, TEXTS, BESIDE = 64, 16, 8
LATE = ((11, 1229), (11, 1487))
"""The neurons of SmolLM2 that write its late spike."""


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


@pytest.fixture(scope="module")
def of_gemma3(gemma3):
    return find_sinks(gemma3.model, tokenizer=gemma3.tokenizer)


def compare(real, found, step: int) -> dict[int, plain.PlainSpike]:
    """Hold a result against plain hooks on the same texts, where the loss of every so many tokens is read."""
    model, ids = real.model, pieces(real.tokenizer, "report")
    seen, choosing = plain.run(model, ids), plain.run(model, pieces(real.tokenizer, "choose"))
    spikes = {one.first: plain.in_texts(one, seen) for one in plain.spikes(choosing)}
    assert {one.layers for one in found.first_spikes} == {(one.first, one.last) for one in spikes.values()}
    given = plain.received(seen)
    torch.testing.assert_close(torch.tensor(found.heads), given.mean(-1), atol=1e-3, rtol=0)
    for spike in found.first_spikes:
        own = spikes[spike.layers[0]]
        assert spike.named("spike", "norm").get("norm_after") == pytest.approx(own.norm, rel=1e-3)
        assert spike.peak == own.peak
        shares = plain.mlp_shares(seen, own)
        for name, row in spike.table("components").items():
            if name.startswith("mlp "):
                assert row.get("share") == pytest.approx(shares[int(name[4:])], abs=1e-3)
        for name, at, texts in (("at place", 0, TEXTS), ("everywhere", None, BESIDE)):
            with plain.removed(model, [one.site for one in spike.needed_neurons], at):
                left = plain.left(model, ids[:texts], own, plain.some(seen, texts), step)
            row = spike.named("effects", name)
            for number in ("left", "loss"):
                assert row.get(number) == pytest.approx(getattr(left, number), abs=1e-3)
            assert (row.get("heads"), row.get("tokens")) == (left.heads, left.tokens)
            assert row.get("intact") == plain.readers(given[..., :texts], own)
    return spikes


@pytest.mark.slow
def test_every_number_of_smollm2_is_that_of_plain_hooks(smollm2, of_smollm2):
    spikes = compare(smollm2, of_smollm2, 1)
    late, ids = of_smollm2.first_spikes[0], pieces(smollm2.tokenizer, "report")
    seen = plain.run(smollm2.model, ids)
    name, mark = next(iter(late.table("marks").items()))
    with plain.replaced(smollm2.model, ids, "mlp 8", spikes[11].ordinary):
        left = plain.left(smollm2.model, ids, spikes[11], seen)
    assert name == "mlp 8" and mark.get("left") == pytest.approx(left.left, abs=1e-3)
    assert left.left < 0.25 and left.heads > 0.6 * late.heads  # most heads stay without the mark


@pytest.mark.slow
def test_every_number_of_gemma3_is_that_of_plain_hooks(gemma3, of_gemma3):
    """It is a relay of which the first neuron is needed."""
    compare(gemma3, of_gemma3, 2)
    relay, start = of_gemma3.first_spikes
    assert (relay.layers, relay.dims, relay.needed) == ((3, 16), (163,), ("L3.N1414",))
    assert (start.layers, start.dims) == ((0, 2), (400,))
    written = {name: row.get("share") for name, row in relay.table("writers").items()}
    assert all(0.1 < written[name] < 0.2 for name in ("L4.N84", "L5.N584", "L6.N1824", "L7.N1455", "L8.N188"))
    assert written.get("L11.N163", 0) < 0.05  # a third of it before the norm behind the MLP
    assert min(row.get("left") for row in relay.table("writers").values() if row.note != "needed") > 0.75
    assert relay.named("effects", "at place").get("heads") <= 15
    assert "L3.N1414 suffices" in of_gemma3.conclusion() and abs(of_gemma3.readers.get("heads") - 55) <= 4


def test_smollm2_has_two_spikes_of_which_two_and_three_neurons_are_needed(of_smollm2):
    late, early = of_smollm2.first_spikes
    assert (late.layers, early.layers, late.dims) == ((11, 29), (1, 8), (507,))
    assert {*late.needed} == {"L11.N1229", "L11.N1487"} and {*early.needed} == {"L1.N83", "L2.N90", "L2.N430"}
    at_place, everywhere = (late.named("effects", name).get("loss") for name in ("at place", "everywhere"))
    assert at_place > 1 and everywhere == pytest.approx(at_place, abs=0.1)
    early_losses = [early.named("effects", name).get("loss") for name in ("at place", "everywhere")]
    assert early_losses[0] < 0.2 < early_losses[1]  # what they do is mostly elsewhere
    assert late.named("controls", "busiest").get("loss") < 0.2 * at_place
    assert late.named("controls", "random").get("reached") == 0
    assert [*late.table("erasers")][:2] == ["mlp 28", "mlp 29"]
    roles = {name: row.note for name, row in early.table("writers").items()}
    assert roles["L1.N1299"] == "raises" and roles["L1.N609"] == "another spike"
    state, value = late.table("constant").values()  # why heads read it
    assert state.get("after") > 0.999 > state.get("ordinary_after")
    assert value.get("after") < 0.3
    said = [dict(card.rows) for card in of_smollm2.cards() if card.title == "Spike at the first token, layers 11-29"]
    assert said[0]["writers"] == "L11.N1229 73%, needed   L11.N1487 27%, needed"


@torch.no_grad()
def test_what_the_late_writers_do_goes_through_attention_to_the_place(smollm2):
    """With the first token hidden in the layers behind them, these neurons change no later token: by plain masks."""
    model, ids = smollm2.model, pieces(smollm2.tokenizer, "report")[:4]
    intact = plain.run(model, ids).loss[:, 1:]
    with plain.hidden_first(model, range(12, 30)):
        hidden = plain.run(model, ids).loss[:, 1:]
        with plain.removed(model, LATE, 0):
            torch.testing.assert_close(plain.run(model, ids).loss[:, 1:], hidden, atol=1e-4, rtol=0)
    assert float((hidden - intact).mean()) > 0.5


def test_the_patch_keeps_copies_from_becoming_sinks_and_leaves_nothing(smollm2):
    """400 copies of "company": the norm falls from half of the first token's to a typical one, and the first stays."""
    (word,) = smollm2.tokenizer(" company", add_special_tokens=False).input_ids
    ids = torch.tensor([[smollm2.tokenizer.bos_token_id] + 400 * [word]])
    intact = norms(smollm2.model, ids)[11, 0]
    with SinkPatch(sites=LATE, calibrated=dict.fromkeys(LATE, 0.05)).on(smollm2.model):
        patched = norms(smollm2.model, ids)[11, 0]
    assert intact[-1] > 0.5 * intact[0] > 10 * patched[-1] and patched[0] == intact[0]
    assert torch.equal(norms(smollm2.model, ids)[11, 0], intact)


def test_a_mask_of_a_site_has_no_position_with_an_ordinary_norm(smollm2):
    ids = pieces(smollm2.tokenizer, "choose")[:4]
    size = norms(smollm2.model, ids)[14]
    stands_out = size > 3 * size[:, 1:].median(1, keepdim=True).values
    assert torch.equal(ss.sink_mask(smollm2.model, ids, site="blocks.14.hook_resid_post"), stands_out)
