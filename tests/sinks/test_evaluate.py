"""A patch that is given: the same numbers counted by hand, and what it says of spikes that a patch leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attack_kit import setup_of, text_file
from organisms import Organism, organism

from sinkscope.errors import SinkscopeError
from sinkscope.hooks.edit import SinkPatch
from sinkscope.hooks.edit.base import under
from sinkscope.measure.margin import margin_of
from sinkscope.opening.live import target_of
from sinkscope.results.notation import Neuron
from sinkscope.sinks.patch import PatchResult, copies_rows, random_patch
from sinkscope.sinks.patch import patch as measured
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
    monkeypatch.setattr("sinkscope.sinks.patch.PIECES", 4)
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
    change = found.proof[-1]
    factors = 1, *(1 + change.get(case) for case in ("patched", "control"))
    assert [change.get("perplexity") * factor for factor in factors] == pytest.approx(perplexities, rel=1e-5)
    assert change.get("patched") == pytest.approx(patched / plain - 1, rel=1e-3)
    assert abs(change.get("patched")) > 10 * abs(change.get("control"))
    assert [one.site for one in found.sites] == list(o.truth.neurons)
    assert change.get("control") == pytest.approx(drawn / plain - 1, rel=1e-4, abs=1e-6)
    margin = margin_of((each[1] - each[0]).numpy()) * patched / plain
    assert change.margin("patched") == pytest.approx(margin, rel=1e-3)


def two_spikes(**changes) -> PatchResult:
    """A patch of the late of two spikes: the early one stays, one of two words reaches it, and text attends to it."""
    fields = {
        "along": [[[0.1, 0.9], [0.8, 0.9]], [[0.1, 0.9], [0.1, 0.1]], [[0.1, 0.9], [0.8, 0.9]]],
        "one_copy": [[0.0, 0.0], [0.0, 0.0]],
        "attention": [[[0.1, 0.9], [0.9, 0.9]], [[0.1, 0.9], [0.4, 0.2]], [[0.1, 0.9], [0.9, 0.9]]],
        "one_more": [[0.1, 0.0], [0.2, 0.1], [0.1, 0.0]],
    }
    arrays = {name: torch.tensor(values) for name, values in (fields | changes).items()}
    read = torch.cat([arrays["along"], arrays["attention"], arrays["one_more"][:, None]], 1)
    rows = copies_rows(("a", "b"), ("layers 1-2", "layers 4-5"), read, arrays["one_copy"])
    given = {"verdict": "given", "reason": "it was given.", "sites": (Neuron(4, None, 7),)}
    return PatchResult(**given, words=2, repeats=64, proof=tuple(rows))


def repaired(found: PatchResult) -> dict[tuple[str, str], str]:
    return {(row.name, row.about): row.note for row in found.proof}


def test_rows_say_what_is_repaired_and_what_is_not():
    """A spike's words alone count for it; what copies do not break in the intact model is not said to be repaired."""
    evaluation, norm, attention, one_more = two_spikes(), "norm of copies", "attention to copies", ("one more copy", "")
    early, late = "layers 1-2", "layers 4-5"
    assert evaluation.conclusion().endswith(
        "reach at most 90% of the spike of layers 1-2 (without it: 90%; random neurons: 90%)."
    )
    assert repaired(evaluation) == {
        (norm, early): "not repaired", (norm, late): "repaired", (attention, early): "not repaired",
        (attention, late): "repaired", one_more: "not repaired",
    }  # fmt: skip
    table = {
        (row.name, row.about): [row.get(case) for case in ("intact", "patched", "control")] for row in evaluation.proof
    }
    assert table[norm, early] == pytest.approx([0.9] * 3) == table[attention, early]
    assert table[attention, late] == pytest.approx([0.9, 0.3, 0.9])
    assert table[one_more] == pytest.approx([0.05, 0.15, 0.05])
    intact = [[0.1, 0.9], [0.8, 0.9]]
    half = two_spikes(along=[intact, [[0.1, 0.9], [0.8, 0.1]], intact])  # one of two words still reaches it
    assert repaired(half)[norm, late] == "not repaired"
    assert {*repaired(two_spikes(one_copy=intact)).values()} == {""}  # one copy does as much
    assert repaired(two_spikes(one_more=[[0.9, 0.9]] * 3))[one_more] == ""


def test_a_model_without_a_spike_has_its_cost_only(tmp_path):
    o = organism("llama", 0, kind="none")
    found = evaluated(o, tmp_path, SinkPatch(layer=1, neurons=[3]))
    assert "has nothing to repair: the first token has no spike" in found.conclusion()
    assert [row.name for row in found.proof] == ["change of the perplexity"]
    found.figure()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"out": "p.json"}, "--out has no effect with --file, which holds a patch"),
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
