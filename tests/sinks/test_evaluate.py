"""A patch that is given: the same numbers counted by hand, and what it says of spikes that a patch leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attack_kit import text_file
from organisms import Organism, organism

from sinkscope.hooks.edit import SinkPatch
from sinkscope.results.parts import Neuron
from sinkscope.sinks.patch import PatchResult, copies_rows
from sinkscope.sinks.patch import patch as measured

pytestmark = pytest.mark.few_texts


def loud(o: Organism) -> SinkPatch:
    """A patch that changes what the model says a lot."""
    return SinkPatch(sites=o.truth.neurons, calibrated=dict.fromkeys(o.truth.neurons, 3.0))


def evaluated(o: Organism, folder: Path, patch, **changes) -> PatchResult:
    options = {"text": text_file(o, folder), "pieces": 5, "length": 24, "max_repeats": 8}
    return measured(o.model, file=patch, tokenizer=o.tokenizer, **(options | changes))


def two_spikes(**changes) -> PatchResult:
    """A patch of the late of two spikes: the early one stays, one of two words reaches it, and text attends to it."""
    fields = {
        "along": [[[0.1, 0.9], [0.8, 0.9]], [[0.1, 0.9], [0.1, 0.1]], [[0.1, 0.9], [0.8, 0.9]]],
        "one_copy": [[0.0, 0.0], [0.0, 0.0]],
        "attention": [[[0.1, 0.9], [0.9, 0.9]], [[0.1, 0.9], [0.4, 0.2]], [[0.1, 0.9], [0.9, 0.9]]],
        "one_more": [[0.1, 0.0], [0.2, 0.1], [0.1, 0.0]],
    }
    arrays = {name: torch.tensor(values) for name, values in (fields | changes).items()}
    rows = copies_rows(("a", "b"), ("layers 1-2", "layers 4-5"), **arrays)
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
