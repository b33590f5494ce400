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
from sinkscope.hooks.edit import SinkPatch
from sinkscope.models.text import text_rows
from sinkscope.results.result import Result
from sinkscope.results.row import row_of
from sinkscope.sinks.patch import AFTER, PatchResult, Verdict, copies_rows, verdict_of
from sinkscope.sinks.patch import patch as measured
from sinkscope.sinks.spikes.find import sinks_of, spike_of

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
    assert (made.verdict, {one.site for one in made.sites}) == ("made", set(o.truth.neurons))
    norm = made.proof[0]
    assert norm.get("patched") < 0.5 <= min(norm.numbers["intact"].by_text) and len(norm.texts) > 0
    assert norm.numbers["control"].by_text == pytest.approx(norm.numbers["intact"].by_text, rel=0.05)
    assert norm.get("one_copy") < 0.5
    assert all(len(said.split()) <= 30 for said in (made.conclusion(), *made.details()))


def test_the_proof_is_what_the_saved_patch_does(tmp_path):
    """States of the model itself under the loaded patch: the second way to the numbers of the table."""
    o, made = made_once("llama", 5)
    norm, given_to, likely = made.proof[:3]
    assert (norm.name, given_to.name, likely.name) == ("norm of copies", "attention to copies", "one more copy")
    made.patch.save(tmp_path / "patch.json")
    patch, setup = SinkPatch.load(tmp_path / "patch.json"), setup_of(o, text=text_file(o, tmp_path, 16))
    spike = spike_of(setup).spike
    ids = [o.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in norm.texts]
    rows = torch.cat([o.repeated(made.repeats, token) for token in ids])
    ordinary = text_rows(o.tokenizer, setup.halves.report, 1, AFTER, None)
    after = torch.cat([rows, ordinary.expand(len(rows), -1)], 1)
    end, layers = rows.shape[1], slice(spike.layers[0] + 1, spike.layers[1] + 2)
    reading = attention(o.model, sinks_of(setup).survey.ids)[layers, ..., 1:, 0].mean((1, 3)) > 0.3  # layer head
    for case, edit in {"intact": None, "patched": patch}.items():
        with nullcontext() if edit is None else edit.on(o.model), torch.no_grad():
            last = spike.along(residuals(o.model, rows)[spike.peak, :, -1])
            given = attention(o.model, after)[layers, :, :, end:, 1:end].sum(-1).mean((1, 3))[reading].mean()
            chances = o.model(after).logits[range(len(rows)), end - 1].softmax(-1)[range(len(rows)), ids]
        assert norm.numbers[case].by_text == pytest.approx(last.tolist(), rel=1e-3, abs=1e-4)
        assert given_to.get(case) == pytest.approx(float(given), rel=1e-3, abs=1e-5)
        assert likely.numbers[case].by_text == pytest.approx(chances.tolist(), rel=1e-3, abs=1e-6)
    few = {"max_repeats": 2 * o.truth.repeats_expected, "pieces": 6, "length": 48, "text": text_file(o, tmp_path, 16)}
    again = measured(o.model, file=patch, tokenizer=o.tokenizer, **few)
    assert again.proof == made.proof and again.findings() == made.findings()  # whether it is made or given


def test_only_words_that_need_repair_prove_it():
    """A word that does not reach the spike intact is no proof, and an infinite perplexity is no harmless one."""
    _, made = made_once("llama", 5)
    cost = made.proof[-1]

    def with_copies(intact, patched=(0.1, 0.1, 0.1), one_copy=(0.1, 0.1, 0.1), attention=(0.9, 0.1)):
        along, given = torch.tensor([[intact], [patched], [intact]]), torch.tensor(attention)[[0, 1, 0], None, None]
        read = torch.cat([along, given.expand(3, 1, 3), torch.zeros(3, 1, 3)], 1)
        return replace(
            made, words=3, proof=(*copies_rows("abc", ("layers 1-2",), read, torch.tensor([one_copy])), cost)
        )

    some = with_copies((0.25, 0.9, 0.8))
    assert verdict_of(some, 0.01)[0] == "made"
    assert "copies of 2 of 3 words reach at most " in some.conclusion()
    assert verdict_of(with_copies((0.25, 0.25, 0.4)), 0.01)[0] == "no-repeats"
    at_once = with_copies((0.9, 0.9, 0.8), one_copy=(0.9, 0.9, 0.8))
    assert verdict_of(at_once, 0.01)[0] == "no-repeats"  # what one copy does at once is not what repetition does
    assert verdict_of(with_copies((0.9, 0.9, 0.8), (0.1, 0.9, 0.1)), 0.01)[0] == "not-repaired"
    assert verdict_of(with_copies((0.9, 0.9, 0.8), attention=(0.9, 0.5)), 0.01)[0] == "not-repaired"

    def with_change(change: float) -> PatchResult:
        row = row_of(cost.table, cost.name, patched=change)
        return replace(some, proof=(*some.proof[:-1], row))

    assert verdict_of(with_change(np.nan), 0.01)[0] == "refused"
    refused = "refused", "the perplexity of held-out text rises by 2.00%, and the limit is 1.00%."
    assert verdict_of(with_change(0.02), 0.01) == refused
    assert verdict_of(with_change(0.02), 0.03)[0] == "made"
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
