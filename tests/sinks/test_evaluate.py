"""patch_eval, and the harness inside the patch: the same numbers counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attack_kit import setup_of, text_file
from organisms import Organism, organism

from sinkscope.errors import SinkscopeError
from sinkscope.hooks.edit import SinkPatch
from sinkscope.hooks.edit.base import under
from sinkscope.opening.live import target_of
from sinkscope.results.parts import sites_of
from sinkscope.sinks.held_out import held_out
from sinkscope.sinks.patch.evaluate import PatchEvaluation, errors_of, patch_eval
from sinkscope.sinks.patch.patches import random_patch


def loud(o: Organism) -> SinkPatch:
    """A patch that changes what the model says a lot."""
    return SinkPatch(sites=o.truth.neurons, calibrated=dict.fromkeys(o.truth.neurons, 3.0))


def evaluated(o: Organism, folder: Path, patch, **changes) -> PatchEvaluation:
    options = {"text": text_file(o, folder), "pieces": 5, "length": 24}
    return patch_eval(o.model, patch, tokenizer=o.tokenizer, **(options | changes))


def test_perplexity_of_each_row_is_that_of_single_texts(tmp_path, monkeypatch):
    """Of the intact model, of the patched one, and under the random control; two texts at a time."""
    monkeypatch.setattr("sinkscope.sinks.patch.evaluate.PIECES", 2)
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
    assert [one.perplexity for one in found.read] == pytest.approx(perplexities, rel=1e-5)
    errors = errors_of(each)
    assert errors.tolist() == pytest.approx(((each[1:] - each[0]).std(1) / 5**0.5).tolist(), rel=1e-3)
    none, row, random_row = found.rows()
    assert none["change"] == 0 and row["change"] == pytest.approx(patched / plain - 1, rel=1e-3)
    assert abs(row["change"]) > 10 * abs(random_row["change"])
    assert sites_of(found.neurons) == tuple(o.truth.neurons)
    assert random_row["change"] == pytest.approx(drawn / plain - 1, rel=1e-4, abs=1e-6)
    assert row["two_errors"] == pytest.approx(2 * float(errors[0]) * patched / plain, rel=1e-3)


def test_held_out_text_is_not_the_text_of_neutral_values(tmp_path):
    o = organism("llama", 2)
    path = tmp_path / "text.txt"
    path.write_text("poem book " * 300 + "cat dog " * 200)  # 2,048 characters are 409 words
    made = setup_of(o, text=path)
    early, late = (set(o.tokenizer(w, add_special_tokens=False)["input_ids"]) for w in ("poem book", "cat dog"))
    assert set(made.ids[:, 1:].flatten().tolist()) == early
    ids = held_out(made, 500, 25).flatten().tolist()
    assert sum(t in late for t in ids) > 370
    assert 170 < sum(t in early for t in ids) <= 191


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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"patch": None}, "no patch given: make one with `sinkscope patch make"),
        ({"patch": "none.json"}, "cannot read none.json"),
        ({"text": "short.txt"}, "give a longer --text"),
    ],
)
def test_bad_input(options, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("poem book " * 150)
    with pytest.raises(SinkscopeError, match=says):
        evaluated(organism("llama", 2), tmp_path, **({"patch": SinkPatch(layer=1, neurons=[0])} | options))
