"""`patch`: planted neurons, the proof against slower ways, refusals, and the commands."""

from __future__ import annotations

import functools
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import numpy as np
import pytest
import torch
from attack_kit import setup_of, text_file
from covering import slow
from organisms import Organism
from organisms import organism as new_organism
from raw_kit import attention, residuals

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import plain
from sinkscope.hooks.edit import SinkPatch
from sinkscope.models.text import text_rows
from sinkscope.results.result import Result
from sinkscope.sinks.first_tokens import spike_of
from sinkscope.sinks.patch import PatchResult, Verdict, verdict_of
from sinkscope.sinks.patch import patch as measured
from sinkscope.sinks.patch_proof import AFTER, PatchProof, Reading
from sinkscope.sinks.spikes.find import sinks_of

pytestmark = pytest.mark.few_texts

organism = functools.cache(new_organism)  # only read where nothing else is said


def made_of(o: Organism, folder: Path, **changes) -> PatchResult:
    most = 2 * (o.truth.repeats_expected or 50)
    options = {"max_repeats": most, "pieces": 6, "length": 48, "text": text_file(o, folder, 16)}
    return measured(o.model, tokenizer=o.tokenizer, **(options | changes))


@functools.cache
def made_once(family: str, seed: int, kind: str = "sink") -> tuple[Organism, PatchResult]:
    o = organism(family, seed, kind=kind)
    with TemporaryDirectory() as folder:
        return o, made_of(o, Path(folder))


@pytest.mark.parametrize(
    ("family", "kind", "seed"),
    [
        ("llama", "sink", 5),
        ("mixtral", "up", 6),
        slow("gemma2", "spread", 12),
    ],
)
def test_patch_is_the_planted_neurons(family, kind, seed):
    o, made = made_once(family, seed, kind)
    proof = made.proof
    assert (made.verdict, {one.site for one in made.sites}) == ("made", set(o.truth.neurons))
    intact, patched, control = proof.along[:3, 0]
    assert (patched < 0.5).all() and (intact >= 0.5).all() and len(proof.words) > 0
    np.testing.assert_allclose(control, intact, rtol=0.05)  # random neurons change nothing
    patch, copies, cost = made.findings()
    assert patch.get("share") > 0.9 and patch.get("control") < 0.05 and copies.get("share") > 0.5
    assert patch.texts == proof.words
    assert patch.numbers["share"].by_text == pytest.approx(tuple(1 - patched / intact))
    assert (cost.get("share"), cost.get("control")) == tuple(one.change for one in proof.ordinary.perplexity[1:])
    assert all(len(said.split()) <= 30 for said in (made.conclusion(), *made.details()))


def test_the_proof_is_what_the_saved_patch_does(tmp_path):
    """States of the model itself under the loaded patch: the second way to the numbers of the table."""
    o, made = made_once("llama", 5)
    proof = made.proof
    made.patch.save(tmp_path / "patch.json")
    patch, setup = SinkPatch.load(tmp_path / "patch.json"), setup_of(o, text=text_file(o, tmp_path, 16))
    spike = spike_of(setup).spike
    ids = [o.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in proof.words]
    rows = torch.cat([o.repeated(proof.repeats, token) for token in ids])
    for condition, edit in enumerate((None, patch)):
        with nullcontext() if edit is None else edit.on(o.model):
            last = residuals(o.model, rows)[spike.peak, :, -1]
        assert proof.along[condition, 0] == pytest.approx(spike.along(last).numpy(), rel=1e-3, abs=1e-4)
    ordinary = text_rows(o.tokenizer, setup.halves.report, 1, AFTER, None)
    after = torch.cat([rows, ordinary.expand(len(rows), -1)], 1)
    end, layers = rows.shape[1], slice(spike.layers[0] + 1, spike.layers[1] + 2)
    reading = attention(o.model, sinks_of(setup).survey.ids)[layers, ..., 1:, 0].mean((1, 3)) > 0.3  # layer head
    for condition, edit in enumerate((None, patch)):
        with nullcontext() if edit is None else edit.on(o.model), torch.no_grad():
            given = attention(o.model, after)[layers, :, :, end:, 1:end].sum(-1).mean((1, 3))[reading].mean()
            chances = o.model(after).logits[range(len(rows)), end - 1].softmax(-1)[range(len(rows)), ids]
        assert read(proof, "attention").values[condition] == pytest.approx(float(given), rel=1e-3, abs=1e-5)
        assert proof.following.one_more[condition] == pytest.approx(chances.numpy(), rel=1e-3, abs=1e-6)
    few = {"max_repeats": 2 * o.truth.repeats_expected, "pieces": 6, "length": 48, "text": text_file(o, tmp_path, 16)}
    again = measured(o.model, file=patch, tokenizer=o.tokenizer, **few)
    assert plain(again.proof) == plain(proof) and again.findings() == made.findings()  # whether it is made or given


def read(proof: PatchProof, what: str, spike: int = 0) -> Reading:
    return [one for one in proof.readings() if one.what == what][spike]


def test_only_words_that_need_repair_prove_it():
    """A word that does not reach the spike intact is no proof, and an infinite perplexity is no harmless one."""
    _, made = made_once("llama", 5)
    proof = made.proof
    along = proof.along.copy()
    along[:, 0, 0] = 0.25
    some = replace(made, proof=replace(proof, along=along))
    assert verdict_of(some.proof, 0.01)[0] == "made"
    assert f"copies of {len(proof.words) - 1} of {len(proof.words)} words reach at most " in some.conclusion()
    none = replace(proof, along=np.broadcast_to(along[:, :, :1], along.shape))
    assert verdict_of(none, 0.01)[0] == "no-repeats"
    along = proof.along.copy()
    along[3] = along[0]
    at_once = replace(proof, along=along)
    assert verdict_of(at_once, 0.01)[0] == "no-repeats"  # what one copy does at once is not what repetition does
    none, patched, random = proof.ordinary.perplexity

    def with_change(change: float) -> PatchProof:
        perplexity = none, replace(patched, change=change), random
        return replace(proof, ordinary=replace(proof.ordinary, perplexity=perplexity))

    assert verdict_of(with_change(np.nan), 0.01)[0] == "refused"
    refused = "refused", "the perplexity of held-out text rises by 2.00%, and the limit is 1.00%."
    assert verdict_of(with_change(0.02), 0.01) == refused
    assert verdict_of(with_change(0.02), 0.03)[0] == "made"
    returns = proof.along.copy()
    returns[1, 0, 1] = returns[0, 0, 1]
    assert verdict_of(replace(proof, along=returns), 0.01)[0] == "not-repaired"
    with pytest.raises(SinkscopeError, match="it harms"):
        _ = replace(made, verdict="refused", reason="it harms").patch


# --- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_make_then_eval(here, typed):
    o = organism("llama", 2)
    o.save("model")
    text_file(o, here, 16)
    few = "--model model --text words.txt --pieces 4 --length 24 --max-repeats 250"
    out, err = typed(f"patch {few} --out out/patch.json --json made.json")
    assert err == "JSON: made.json\n" and "words reach at most 0% of the spike" in " ".join(out.split())
    made = Result.load("made.json")
    assert isinstance(made, PatchResult)
    sites = SinkPatch.load("out/patch.json").checked_sites
    assert sites == made.patch.checked_sites and [site.site for site in sites] == list(o.truth.neurons)
    evaluated = json.loads(typed(f"patch {few} --file out/patch.json --json -").out)
    assert evaluated["result"]["verdict"] == "given"
    sites = [(neuron["layer"], neuron["neuron"]) for neuron in evaluated["result"]["sites"]]
    assert sites == list(o.truth.neurons)


def test_what_makes_no_file_ends_with_status_1(here, typed):
    organism("llama", 0, kind="none").save("none")
    out, err = typed("patch --model none --out p.json --json made.json --max-repeats 8", 1)
    made = Result.load("made.json")
    made.figure()
    assert (
        "no neurons are known that a norm spike" in " ".join(out.split())
        and err == "JSON: made.json\n"
        and not Path("p.json").exists()
    )
    assert [replace(made, verdict=one).exit_code for one in get_args(Verdict)] == [0, 0, 1, 1, 1, 1]
