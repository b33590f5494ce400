"""Patches on SmolLM2, beside plain hooks on the same token ids; spikes are in `test_spikes`."""

from __future__ import annotations

import json

import plain
import pytest
import torch

from sinkscope.hooks.edit import SinkPatch
from sinkscope.measure import Setup
from sinkscope.models.text import text_rows
from sinkscope.sinks.patch import AFTER, patch
from sinkscope.sinks.spikes.spike import first_spikes
from sinkscope.sinks.spikes.survey import survey_of
from sinkscope.sinks.tokens import held_out

SPIKE = ((11, 1229), (11, 1487))
"""The neurons that write the spike: 72 % and 28 % of it."""

pytestmark = pytest.mark.few_texts


@pytest.fixture(scope="module")
def setup(smollm2) -> Setup:
    return Setup.open(smollm2.model)


@pytest.mark.slow
def test_a_patch_that_is_given_says_of_each_spike_what_plain_hooks_read(setup):
    """The patch of the late spike: norm, attention and next token at copies in both spikes, and ordinary text."""
    values = dict.fromkeys(SPIKE, 0.05)
    made = patch.on(setup, file=SinkPatch(sites=SPIKE, calibrated=values), max_repeats=512, pieces=2, length=64)
    rows_of = {(row.name, row.about): row for row in made.proof}
    model, said = setup.target.hf, rows_of["one more copy", ""].texts
    words = [setup.tokenizer(word, add_special_tokens=False).input_ids[0] for word in said]
    rows = torch.tensor([[setup.bos] + made.repeats * [word] for word in words])
    ids = torch.cat([rows, text_rows(setup.tokenizer, setup.halves.report, 1, AFTER, None).expand(len(rows), -1)], 1)
    survey = survey_of(setup)
    end, spikes, received = rows.shape[1], first_spikes(survey, setup.tokenizer), survey.attention[..., 0].mean(-1)
    pieces = held_out(setup, 2, 64)
    assert [one.layers[1] for one in spikes] == [8, 29]
    for case, held in {"intact": {}, "patched": values}.items():
        with plain.held(model, held):
            states = plain.residuals(model, rows)
            given = [
                torch.stack([a[0, :, end:, 1:end].sum(-1).mean(-1) for a in plain.attentions(model, row[None])])
                for row in ids
            ]
            chances = [model(row[None]).logits[0, -1].softmax(-1)[row[-1]].item() for row in rows]
            perplexity = plain.nll(model, pieces)[:, 1:].mean().exp().item()
        for spike in spikes:
            along = (states[spike.peak, :, -1] - spike.mean) @ spike.direction / spike.size
            norm = rows_of["norm of copies", spike.name]
            shown = [said.index(word) for word in norm.texts]
            assert norm.note and norm.numbers[case].by_text == pytest.approx(along[shown].numpy(), rel=1e-3, abs=1e-4)
            some = slice(spike.layers[0] + 1, spike.layers[1] + 2)
            layers = torch.stack(given)[:, some][:, received[some] > 0.3].mean(1)  # of the heads that read it
            attention = rows_of["attention to copies", spike.name]
            assert attention.get(case) == pytest.approx(layers[shown].mean().item(), rel=1e-3)
        assert rows_of["one more copy", ""].numbers[case].by_text == pytest.approx(chances, rel=1e-2)
        cost = rows_of["change of the perplexity", ""]
        assert cost.get("perplexity") * (1 + cost.get(case)) == pytest.approx(perplexity, rel=2e-5)
    assert abs(rows_of["change of the perplexity", ""].get("patched")) < 0.01  # ordinary text keeps its perplexity
    notes = {(row.name, row.about): row.note for row in made.proof}
    for name in ("norm of copies", "attention to copies"):
        assert (notes[name, "layers 11-29"], notes[name, "layers 1-8"]) == ("repaired", "not repaired")
    assert notes["one more copy", ""] == "not repaired"


def test_the_patch_keeps_copies_from_becoming_sinks(setup):
    """400 copies of "company": the norm falls from half of the first token's to a typical one, and the first stays."""
    model, tokenizer = setup.target.hf, setup.tokenizer
    (word,) = tokenizer(" company", add_special_tokens=False).input_ids
    ids = torch.tensor([[setup.bos] + 400 * [word]])
    intact = plain.norms(model, ids)[11, 0]
    with SinkPatch(sites=SPIKE, calibrated=dict.fromkeys(SPIKE, 0.05)).on(model):
        patched = plain.norms(model, ids)[11, 0]
    assert intact[-1] > 0.5 * intact[0] > 10 * patched[-1]
    assert patched[0] == intact[0]
    assert torch.equal(plain.norms(model, ids)[11, 0], intact)  # nothing is left on the model


@pytest.mark.slow
def test_no_head_of_layer_0_marks_the_first_token_alone(setup):
    """With every head of layer 0 at its mean the neuron still fires, so no set of them is its mark."""
    from sinkscope.sinks.spikes.find import spike_of
    from sinkscope.sinks.spikes.marks import heads_that_mark

    model, ids = setup.target.hf, setup.ids
    intact = plain.activations(model, ids, 11)[:, 0, 1229].mean()
    with plain.heads_replaced(model, 0, range(9), plain.heads_mean(model, ids, 0)):
        left = plain.activations(model, ids, 11)[:, 0, 1229].mean() / intact
    assert left > 0.3
    made = heads_that_mark(setup, spike_of(setup), count=8)
    (fewest,) = [row for row in made if row.name == "fewest heads"]
    assert fewest.get("heads") > model.config.num_attention_heads


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_patch_is_made_of_the_two_neurons(setup, tmp_path):
    made = patch.on(setup, max_repeats=128, pieces=4, length=64, out=tmp_path / "patch.json")
    assert set(map(str, made.sites)) <= {"L11.N1229", "L11.N1487", "L2.N90", "L2.N430"}
    if made.verdict == "made":
        assert {*json.loads((tmp_path / "patch.json").read_text())["sites"]} == set(map(str, made.sites))
