"""A patch that is given: the same numbers counted by hand, and what it says of spikes that a patch leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from attack_kit import setup_of, text_file
from organisms import Organism, organism

from sinkscope.errors import SinkscopeError
from sinkscope.hooks.edit import SinkPatch
from sinkscope.hooks.edit.base import under
from sinkscope.measure.margin import margin_of
from sinkscope.opening.live import target_of
from sinkscope.results.parts import Neuron
from sinkscope.sinks.patch import PatchResult
from sinkscope.sinks.patch import patch as measured
from sinkscope.sinks.patch_proof import AfterCopies, OrdinaryText, PatchProof, Perplexity, random_patch
from sinkscope.sinks.tokens import held_out

pytestmark = pytest.mark.few_texts


def loud(o: Organism) -> SinkPatch:
    """A patch that changes what the model says a lot."""
    return SinkPatch(sites=o.truth.neurons, calibrated=dict.fromkeys(o.truth.neurons, 3.0))


def evaluated(o: Organism, folder: Path, patch, **changes) -> PatchResult:
    options = {"text": text_file(o, folder), "pieces": 5, "length": 24, "max_repeats": 8}
    return measured(o.model, file=patch, tokenizer=o.tokenizer, **(options | changes))


def test_perplexity_of_each_row_is_that_of_single_texts(tmp_path, monkeypatch):
    """Of the intact model, of the patched one, and under the random control; four texts at a time."""
    monkeypatch.setattr("sinkscope.sinks.patch_proof.PIECES", 4)
    o = organism("llama", 2)
    patch = loud(o)
    patch.save(tmp_path / "patch.json")
    found = evaluated(o, tmp_path, tmp_path / "patch.json", seed=4)
    made = setup_of(o, text=text_file(o, tmp_path), seed=4)
    ids = held_out(made, 5, 24)

    @torch.no_grad()
    def loss(row):
        logits = o.model(row[None]).logits[0].log_softmax(-1)
        return -float(logits[range(1, 23), row[2:]].mean())

    each = []
    for edit in (None, patch, random_patch(made, patch)):
        with under(edit, target_of(o.model, o.tokenizer)):
            each.append([loss(row) for row in ids])
    each = torch.tensor(each)
    plain, patched, drawn = perplexities = each.mean(1).exp().tolist()
    ordinary = found.proof.ordinary
    assert [one.perplexity for one in ordinary.perplexity] == pytest.approx(perplexities, rel=1e-5)
    none, row, random_row = ordinary.perplexity
    assert (none.change, none.margin) == (0, 0) and row.change == pytest.approx(patched / plain - 1, rel=1e-3)
    assert abs(row.change) > 10 * abs(random_row.change)
    assert [one.site for one in found.sites] == list(o.truth.neurons)
    assert random_row.change == pytest.approx(drawn / plain - 1, rel=1e-4, abs=1e-6)
    assert row.margin == pytest.approx(margin_of((each[1] - each[0]).numpy()) * patched / plain, rel=1e-3)
    assert found.rows()[-1]["patched"] == row.change
    with torch.no_grad():
        intact = o.model(ids[:4]).logits
        with under(patch, target_of(o.model, o.tokenizer)):
            change = o.model(ids[:4]).logits - intact
    assert ordinary.largest_change == pytest.approx(float(change.abs().max()), rel=1e-4)


def test_random_patch_is_as_many_others_of_the_same_place(tmp_path):
    o = organism("mixtral", 1)
    text = text_file(o, tmp_path)
    patch = SinkPatch(sites=[*o.truth.neurons, (*o.truth.neurons[0][:-1], 0)])

    def drawn(seed: int):
        return random_patch(setup_of(o, text=text, seed=seed), patch).checked_sites

    sites = drawn(1)
    assert len(sites) == len(patch.checked_sites) and not set(sites) & set(patch.checked_sites)
    assert {(s.layer, s.expert) for s in sites} == {(s.layer, s.expert) for s in patch.checked_sites}
    assert sites == drawn(1) != drawn(2)


def proof_of_two(**changes) -> PatchProof:
    """A patch of the late of two spikes: the early one stays, one of two words reaches it, and text attends to it."""
    along = np.zeros((5, 2, 2))
    along[:3] = [[[0.1, 0.9], [0.8, 0.9]], [[0.1, 0.9], [0.1, 0.1]], [[0.1, 0.9], [0.8, 0.9]]]
    attention = np.array([[[0.1, 0.9], [0.9, 0.9]], [[0.1, 0.9], [0.4, 0.2]], [[0.1, 0.9], [0.9, 0.9]]])
    rows = tuple(Perplexity(name, 20.0, 0.0, None) for name in ("none", "patch", "random patch"))
    fields = {
        "words": ("a", "b"),
        "repeats": 64,
        "spikes": ("layers 1-2", "layers 4-5"),
        "along": along,
        "following": AfterCopies(attention, np.array([[0.1, 0.0], [0.2, 0.1], [0.1, 0.0]])),
        "ordinary": OrdinaryText(4, 24, rows, 0.5, 0.01, "a"),
    }
    return PatchProof(**(fields | changes))


def given(proof: PatchProof, *sites: Neuron) -> PatchResult:
    return PatchResult(verdict="given", reason="it was given.", sites=sites, proof=proof)


def test_the_conclusion_says_what_is_repaired_and_what_is_not():
    """A spike's words alone count for it; what copies do not break in the intact model is not said to be repaired."""
    evaluation = given(proof_of_two(), Neuron(4, None, 7))
    said = "norm and attention in layers 4-5, but not norm and attention in layers 1-2 and the next token"
    assert evaluation.conclusion() == f"At copies, the patch of L4.N7 repairs {said} (random neurons repair nothing)."
    table = {
        (row["reading"], row["spike"]): (row["intact"], row["patched"], row["random"]) for row in evaluation.rows()
    }
    assert table["last copy", "layers 1-2"] == (0.9, 0.9, 0.9) == table["attention to copies", "layers 1-2"]
    assert table["attention to copies", "layers 4-5"] == pytest.approx((0.9, 0.3, 0.9))
    assert table["one more copy", None] == pytest.approx((0.05, 0.15, 0.05))
    proof = proof_of_two()
    proof.along[2] = proof.along[1]  # random neurons do the same
    assert "(random neurons repair norm in layers 4-5)" in given(proof).conclusion()
    half = proof_of_two()
    half.along[1, 1, 0] = 0.8  # one of two words still reaches it
    assert "repairs attention in layers 4-5, but not" in given(half).conclusion()
    at_once = proof_of_two()
    at_once.along[3] = at_once.along[0]
    assert given(replace(at_once, following=None)).conclusion() == (
        "There is nothing to repair: of 2 words, none has a spike only after 64 copies."
    )
    repeats_before = replace(proof_of_two().following, one_more=np.full((3, 2), 0.9))
    assert "the next token" not in given(proof_of_two(following=repeats_before)).conclusion()


def test_a_model_without_a_spike_has_its_cost_only(tmp_path):
    o = organism("llama", 0, kind="none")
    found = evaluated(o, tmp_path, SinkPatch(layer=1, neurons=[3]))
    assert "has nothing to repair: the first token has no spike" in found.conclusion()
    assert [row["reading"] for row in found.rows()] == ["change of the perplexity"]
    found.figure()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"out": "p.json"}, "--out has no effect with --file, which holds a patch"),
        ({"spike": 1}, "--spike has no effect with --file"),
        ({"patch": "none.json"}, "cannot read none.json"),
        ({"text": "short.txt", "length": 100}, "give a longer --text"),
        ({"max_repeats": 2040}, "--max-repeats 2040 and 17 tokens around them"),  # BOS, and the text that follows
    ],
)
def test_bad_input(options, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("poem book " * 150)
    with pytest.raises(SinkscopeError, match=says):
        evaluated(organism("llama", 2), tmp_path, **({"patch": SinkPatch(layer=1, neurons=[0])} | options))
