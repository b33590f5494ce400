"""`patch`: planted neurons, the proof and the cost against slower ways, what is said, and the commands."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import plain_hooks as plain
import pytest
import torch
from attack_kit import setup_of, text_file
from organisms import Organism
from organisms import organism as new_organism
from refusals import refused

from sinkscope.hooks.edit import SinkPatch
from sinkscope.hooks.edit.base import under
from sinkscope.measure.margin import margin_of
from sinkscope.models.text import text_rows
from sinkscope.results.mean import Mean
from sinkscope.results.notation import Neuron
from sinkscope.sinks.patch import AFTER, PatchResult, copies_rows, patch_verdict
from sinkscope.sinks.patch import patch as measured
from sinkscope.sinks.patch_tables import Outcome, Patched, Reading
from sinkscope.sinks.spikes.controls import OtherNeurons, other_neurons
from sinkscope.sinks.spikes.find import sinks_of, spike_of
from sinkscope.sinks.spikes.survey import survey_of
from sinkscope.sinks.tokens import held_out

pytestmark = pytest.mark.few_texts

organism = functools.cache(new_organism)  # only read where nothing else is said


def made_of(o: Organism, folder: Path, **changes) -> PatchResult:
    options = {"max_repeats": 2 * o.truth.repeats_expected, "pieces": 6, "length": 48, "text": text_file(o, folder, 16)}
    return measured(o.model, tokenizer=o.tokenizer, **(options | changes))


def test_the_patch_is_the_planted_experts(tmp_path):
    o = organism("mixtral", 6)
    made = made_of(o, tmp_path)
    assert (made.verdict, {one.site for one in made.sites}) == ("made", set(o.truth.neurons))


def test_the_proof_is_what_the_patch_in_the_file_does(tmp_path, monkeypatch, typed):
    """States of the model itself under the loaded patch: the second way to the numbers of the table."""
    monkeypatch.chdir(tmp_path)
    o = organism("llama", 2)
    o.save("model")
    setup = setup_of(o, text=text_file(o, tmp_path, 16))
    few = "patch --model model --text words.txt --pieces 4 --length 24 --max-repeats 250"
    out, err = typed(f"{few} --out out/patch.json --json made.json")
    assert err == "JSON: made.json\n"
    assert " words need repair, because copies of them reach half of the norm spike" in " ".join(out.split())
    typed(f"{few} --file out/patch.json --json given.json")
    made, given, patch = PatchResult.load("made.json"), PatchResult.load("given.json"), SinkPatch.load("out/patch.json")
    assert (given.verdict, given.proof, given.sites) == ("given", made.proof, made.sites)
    assert {one.site for one in patch.sites} == set(o.truth.neurons) and made.patch.sites == patch.sites
    norm, given_to, likely = made.proof[:3]
    spike = spike_of(setup).spike
    ids = [o.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in norm.words]
    rows = torch.cat([o.repeated(made.repeats, token) for token in ids])
    ordinary = text_rows(o.tokenizer, setup.halves.report, 1, AFTER, None)
    after = torch.cat([rows, ordinary.expand(len(rows), -1)], 1)
    end, layers = rows.shape[1], slice(spike.layers[0] + 1, spike.layers[1] + 2)
    reading = plain.attention(o.model, sinks_of(setup).survey.ids)[layers, ..., 1:, 0].mean((1, 3)) > 0.3
    for case, edit in {"intact": None, "patched": patch}.items():
        with under(edit, setup.target), torch.no_grad():
            last = spike.along(plain.residuals(o.model, rows)[spike.peak, :, -1])
            given = plain.attention(o.model, after)[layers, :, :, end:, 1:end].sum(-1).mean((1, 3))[reading].mean()
            chances = o.model(after).logits[range(len(rows)), end - 1].softmax(-1)[range(len(rows)), ids]
        numbers = [*norm[case].by_text, given_to[case].value]
        assert numbers == pytest.approx([*last.tolist(), float(given)], rel=1e-3, abs=1e-4)
        assert likely[case].by_text == pytest.approx(chances.tolist(), rel=1e-3, abs=1e-6)
    assert norm["patched"].value < 0.5 <= min(norm["intact"].by_text)
    assert norm["one_copy"].value < 0.5
    assert norm["control"].by_text == pytest.approx(norm["intact"].by_text, rel=0.05)


def test_the_change_of_the_perplexity_is_that_of_single_texts(tmp_path, monkeypatch):
    """Of the intact model, under a loud patch, and under that of the control; four texts at a time."""
    monkeypatch.setattr("sinkscope.sinks.patch.PIECES", 4)
    o = organism("llama", 2)
    patch = SinkPatch(sites=o.truth.neurons, calibrated=dict.fromkeys(o.truth.neurons, 3.0))
    setup = setup_of(o, text=text_file(o, tmp_path), seed=4)
    change = measured.on(setup, file=patch, pieces=5, length=24, max_repeats=8).proof[-1]
    texts, losses = held_out(setup, 5, 24), []
    others = other_neurons(survey_of(setup), patch.sites, (), 4)
    assert not {*others.neurons} & {*patch.sites}
    for edit in (None, patch, SinkPatch(sites=others.neurons)):
        with under(edit, setup.target):
            losses.append(torch.cat([plain.losses(o.model, text[None])[:, 1:].mean(1) for text in texts]).double())
    perplexity, patched, drawn = (float(loss.mean().exp()) for loss in losses)
    margin = margin_of((losses[1] - losses[0]).numpy()) * patched / perplexity
    numbers = [change[name].value for name in ("perplexity", "patched", "control")] + [change.patched.margin]
    wanted = [perplexity, patched / perplexity - 1, drawn / perplexity - 1, margin]
    assert numbers == pytest.approx(wanted, rel=1e-3, abs=1e-6)
    assert abs(change.patched.value) > 10 * abs(change.control.value)


def planted(control: float, others: OtherNeurons) -> PatchResult:
    """A patch that repairs copies, beside a control that leaves so much of them."""
    numbers = {"intact": Mean(0.9), "patched": Mean(0.1), "control": Mean(control)}
    row = Patched(key=Reading.NORM, layers=(1, 5), words=("a",), outcome=Outcome.REPAIRED, **numbers)
    sites = (Neuron(1, None, 3),)
    return PatchResult(verdict="given", reason="", sites=sites, words=1, repeats=9, proof=(row,), control=others)


def test_a_control_that_repairs_as_well_is_said_first():
    others = OtherNeurons((Neuron(1, None, 4), Neuron(1, None, 5)), 1.0, as_many=False)
    words = "with a patch of 2 other neurons of these layers, which write as much, they have"
    assert planted(0.9, others).conclusion().endswith(f". As a control, {words} 90%.")
    won = planted(0.2, others)
    assert won.conclusion().endswith(f". Not shown that it matters which neurons: as a control, {words} 20%.")
    assert [headline.verdict.name for headline in won.headlines()] == ["SHOWN"]
    assert [headline.verdict.name for headline in planted(0.1, others).headlines()] == ["NOT_SHOWN"]


def test_others_that_write_hardly_anything_are_no_control():
    others = OtherNeurons((Neuron(1, None, 4),), 0.01, as_many=True)
    found = planted(0.9, others)
    assert found.conclusion().endswith("There is no fair control: no other neurons of these layers write as much.")
    assert found.headlines()[0].control == "no fair control"


# --- what is said ---

READ = torch.tensor([[0.1, 0.9], [0.8, 0.9], [0.1, 0.9], [0.9, 0.9], [0.1, 0.0]])  # norms, attention, next; by word
EARLY, LATE = (1, 2), (5, 9)
PATCHED = torch.tensor([[0.1, 0.9], [0.1, 0.1], [0.1, 0.9], [0.4, 0.2], [0.2, 0.1]])


def rows(patched=PATCHED, one_copy=0.0):
    read = torch.stack([READ, patched, READ])
    return copies_rows(("a", "b"), (EARLY, LATE), read, torch.full((2, 2), one_copy))


def test_rows_say_what_is_repaired_and_what_is_not():
    """A patch of the late of two spikes: the early one stays, one of two words reaches it, and text attends to it."""
    found = {(row.key, row.layers): row for row in rows()}
    repaired = [key for key, row in found.items() if row.outcome is Outcome.REPAIRED]
    assert repaired == [(Reading.NORM, LATE), (Reading.ATTENTION, LATE)]
    assert found[Reading.NORM, EARLY].words == ("b",)
    assert found[Reading.ATTENTION, LATE].words == ("a", "b")
    assert found[Reading.ATTENTION, LATE].patched.value == pytest.approx(0.3)
    again = PATCHED.clone()
    again[1, 0] = 0.8  # one of two words still reaches it
    assert rows(again)[1].outcome is Outcome.NOT_REPAIRED
    assert {row.outcome for row in rows(one_copy=0.9)} == {Outcome.NOTHING}  # one copy does as much


@pytest.mark.parametrize(
    ("outcomes", "change", "verdict"),
    [
        ((Outcome.REPAIRED, Outcome.REPAIRED), 0.01, "made"),
        ((Outcome.NOTHING, Outcome.NOTHING), 0.0, "no-repeats"),
        ((Outcome.REPAIRED, Outcome.NOT_REPAIRED), 0.0, "not-repaired"),
        ((Outcome.REPAIRED, Outcome.REPAIRED), 0.03, "refused"),
        ((Outcome.REPAIRED, Outcome.REPAIRED), np.nan, "refused"),  # an infinite perplexity is no harmless one
    ],
)
def test_a_patch_is_made_if_all_is_repaired_and_nothing_harmed(outcomes, change, verdict):
    copies: list[Patched] = []
    for key, outcome in zip((Reading.NORM, Reading.ATTENTION), outcomes, strict=True):
        copies.append(Patched(key=key, layers=EARLY, intact=Mean(0.0), patched=Mean(0.0), outcome=outcome))
    cost = Patched(key=Reading.PERPLEXITY, patched=Mean(change))
    found = PatchResult(verdict="given", reason="", words=3, repeats=9, proof=(*copies, cost))
    assert patch_verdict(found, 0.02)[0] == verdict


def test_a_model_without_a_spike_has_a_cost_only_and_no_file(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    o = organism("llama", 0, kind="none")
    found = made_of(o, tmp_path, file=SinkPatch(layer=1, neurons=[3]), max_repeats=8)
    assert "has nothing to repair: the first token has no spike" in found.conclusion()
    assert [row.key for row in found.proof] == [Reading.PERPLEXITY]
    assert found.figure()
    o.save("none")
    assert made_of(organism("llama", 2), tmp_path, max_repeats=2, out="p.json").verdict == "no-repeats"
    out, _ = typed("patch --model none --out p.json --json made.json --max-repeats 8", 1)
    assert "no neurons are known that a norm spike" in " ".join(out.split()) and not Path("p.json").exists()
    with refused("no patch was made"):
        _ = PatchResult.load("made.json").patch
