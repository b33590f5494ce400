"""`patch`: planted neurons, the proof and the cost against slower ways, what is said, and the commands."""

from __future__ import annotations

import functools
import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from attack_kit import setup_of, text_file
from organisms import Organism
from organisms import organism as new_organism
from plain_hooks import attention, residuals

from sinkscope.hooks.edit import SinkPatch
from sinkscope.hooks.edit.base import under
from sinkscope.measure.margin import margin_of
from sinkscope.models.text import text_rows
from sinkscope.results.result import Result
from sinkscope.results.row import row_of
from sinkscope.sinks.patch import AFTER, PatchResult, copies_rows, random_patch, verdict_of
from sinkscope.sinks.patch import patch as measured
from sinkscope.sinks.spikes.find import sinks_of, spike_of
from sinkscope.sinks.tokens import held_out

pytestmark = pytest.mark.few_texts

organism = functools.cache(new_organism)  # only read where nothing else is said


def made_of(o: Organism, folder: Path, **changes) -> PatchResult:
    options = {"max_repeats": 2 * o.truth.repeats_expected, "pieces": 6, "length": 48, "text": text_file(o, folder, 16)}
    return measured(o.model, tokenizer=o.tokenizer, **(options | changes))


def check_made(o: Organism, made: PatchResult) -> None:
    """It is a patch of the planted neurons, and random ones change nothing."""
    norm = made.proof[0]
    assert (made.verdict, {one.site for one in made.sites}) == ("made", set(o.truth.neurons))
    assert norm.get("patched") < 0.5 <= min(norm.numbers["intact"].by_text) and norm.get("one_copy") < 0.5
    assert norm.numbers["control"].by_text == pytest.approx(norm.numbers["intact"].by_text, rel=0.05)


def test_patch_is_the_planted_experts(tmp_path):
    o = organism("mixtral", 6)
    check_made(o, made_of(o, tmp_path))


def test_the_proof_is_what_the_saved_patch_does(tmp_path):
    """States of the model itself under the loaded patch: the second way to the numbers of the table."""
    o = organism("llama", 5)
    made = made_of(o, tmp_path)
    check_made(o, made)
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
    again = made_of(o, tmp_path, file=patch)
    assert again.proof == made.proof and again.findings() == made.findings()


def test_perplexity_of_each_row_is_that_of_single_texts(tmp_path, monkeypatch):
    """Of the intact model, under a loud patch, and under the random control; four texts at a time."""
    monkeypatch.setattr("sinkscope.sinks.patch.PIECES", 4)
    o = organism("llama", 2)
    patch = SinkPatch(sites=o.truth.neurons, calibrated=dict.fromkeys(o.truth.neurons, 3.0))
    setup = setup_of(o, text=text_file(o, tmp_path), seed=4)
    change = measured.on(setup, file=patch, pieces=5, length=24, max_repeats=8).proof[-1]
    losses = []
    for edit in (None, patch, random_patch(setup, patch)):
        with under(edit, setup.target), torch.no_grad():
            for row in held_out(setup, 5, 24):
                logits = o.model(row[None]).logits[0].log_softmax(-1)
                losses.append(-float(logits[range(1, 23), row[2:]].mean()))
    each = torch.tensor(losses).view(3, 5)
    plain, patched, drawn = each.mean(1).exp().tolist()
    assert change.get("perplexity") == pytest.approx(plain, rel=1e-5)
    assert change.get("patched") == pytest.approx(patched / plain - 1, rel=1e-3)
    assert change.get("control") == pytest.approx(drawn / plain - 1, rel=1e-4, abs=1e-6)
    margin = margin_of((each[1] - each[0]).numpy()) * patched / plain
    assert change.margin("patched") == pytest.approx(margin, rel=1e-3)
    assert abs(change.get("patched")) > 10 * abs(change.get("control"))


# --- what is said ---

EARLY, LATE = "layers 1-2", "layers 4-5"
NORM, ATTENTION, NEXT = "norm of copies", "attention to copies", "one more copy"


def test_rows_say_what_is_repaired_and_what_is_not():
    """A patch of the late of two spikes: the early one stays, one of two words reaches it, and text attends to it.

    A spike's words alone count for it; what copies do not break in the intact model is not said to be repaired.
    """
    intact = [[0.1, 0.9], [0.8, 0.9], [0.1, 0.9], [0.9, 0.9], [0.1, 0.0]]  # norms, attention, one more copy; by word
    patched = [[0.1, 0.9], [0.1, 0.1], [0.1, 0.9], [0.4, 0.2], [0.2, 0.1]]

    def rows(patched=patched, intact=intact, one_copy=0.0):
        read = torch.tensor([intact, patched, intact])
        return copies_rows(("a", "b"), (EARLY, LATE), read, torch.full((2, 2), one_copy))

    table = {(row.name, row.about): row for row in rows()}
    assert {key: row.note for key, row in table.items()} == {
        (NORM, EARLY): "not repaired", (NORM, LATE): "repaired", (ATTENTION, EARLY): "not repaired",
        (ATTENTION, LATE): "repaired", (NEXT, ""): "not repaired",
    }  # fmt: skip
    assert table[NORM, EARLY].texts == ("b",) and table[ATTENTION, LATE].texts == ("a", "b")
    assert table[ATTENTION, LATE].get("patched") == pytest.approx(0.3) and table[NORM, EARLY].get("intact") > 0.89
    half = rows([patched[0], [0.8, 0.1], *patched[2:]])  # one of two words still reaches it
    assert half[1].note == "not repaired"
    assert {row.note for row in rows(one_copy=0.9)} == {""}  # one copy does as much
    assert rows(intact=[*intact[:4], [0.9, 0.9]])[-1].note == ""


@pytest.mark.parametrize(
    ("notes", "change", "limit", "verdict"),
    [
        (("repaired", "repaired"), 0.02, 0.03, "made"),
        (("", ""), 0.0, 0.01, "no-repeats"),
        (("not repaired", "repaired"), 0.0, 0.01, "not-repaired"),
        (("repaired", "not repaired"), 0.0, 0.01, "not-repaired"),
        (("repaired", "repaired"), 0.02, 0.01, "refused"),
        (("repaired", "repaired"), np.nan, 0.01, "refused"),  # an infinite perplexity is no harmless one
    ],
)
def test_a_patch_is_made_if_all_is_repaired_and_nothing_harmed(notes, change, limit, verdict):
    zero = {"intact": 0.0, "patched": 0.0}
    copies = [row_of("copies", name, note, **zero) for name, note in zip((NORM, ATTENTION), notes, strict=True)]
    cost = row_of("held-out text", "change of the perplexity", patched=change)
    found = PatchResult(verdict="given", reason="", words=3, repeats=9, proof=(*copies, cost))
    assert verdict_of(found, limit)[0] == verdict


# --- the commands ---


def test_a_patch_is_written_and_read_again(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    o = organism("llama", 2)
    o.save("model")
    text_file(o, tmp_path, 16)
    few = "--model model --text words.txt --pieces 4 --length 24 --max-repeats 250"
    out, err = typed(f"patch {few} --out out/patch.json --json made.json")
    assert err == "JSON: made.json\n" and "words reach at most 0% of the spike" in " ".join(out.split())
    made = Result.load("made.json")
    assert [site.site for site in made.patch.sites] == list(o.truth.neurons)
    evaluated = Result.from_dict(json.loads(typed(f"patch {few} --file out/patch.json --json -").out))
    assert (evaluated.verdict, evaluated.sites) == ("given", made.sites)
    typed(f"patch {few} --file out/patch.json --out p.json", 2)


def test_a_model_without_a_spike_has_a_cost_only_and_no_file(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    o = organism("llama", 0, kind="none")
    found = made_of(o, tmp_path, file=SinkPatch(layer=1, neurons=[3]), max_repeats=8)
    assert "has nothing to repair: the first token has no spike" in found.conclusion()
    assert [row.name for row in found.proof] == ["change of the perplexity"] and found.figure()
    o.save("none")
    out, _ = typed("patch --model none --out p.json --json made.json --max-repeats 8", 1)
    made = Result.load("made.json")
    assert "no neurons are known that a norm spike" in " ".join(out.split()) and not Path("p.json").exists()
    with pytest.raises(Exception, match="no patch was made"):
        _ = made.patch
