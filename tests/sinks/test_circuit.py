"""The circuit against planted ones, and its words against its numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from attack_kit import text_file
from covering import slow
from organisms import Organism, organism

from sinkscope.results.parts import Head
from sinkscope.sinks.circuit.circuit import COPIES, MARKS, Circuit, circuit

pytestmark = pytest.mark.few_texts


def traced(o: Organism, folder: Path, **options) -> Circuit:
    text = text_file(o, folder, 6, seed=9)
    return circuit(o.model, tokenizer=o.tokenizer, text=text, **{"max_repeats": 8, **options})


SLOWER = [slow(*case) for case in (("gpt_oss", 1), ("gemma2", 2), ("mixtral", 1))]


@pytest.mark.parametrize(("family", "seed"), [("llama", 3), *SLOWER])
def test_an_ordinary_circuit_is_found_from_the_mark_to_the_readers(family, seed, tmp_path):
    o = organism(family, seed)
    truth = o.truth
    word = o.tokenizer.decode([o.tokens_of(1)[0]])
    found = traced(o, tmp_path, token=word, max_repeats=120) if family == "llama" else traced(o, tmp_path)
    heads = {MARKS: truth.group_heads[truth.groups[1]][0]}
    if family == "llama":  # another token is marked by a head of its own
        heads[COPIES] = truth.group_heads[1][0]
    for role, head in heads.items():
        (claim,) = found.of(role)
        assert claim.subject == (Head(truth.marking_layer, head),) and claim.verdict == "needed"
    (made,) = found.of("makes")
    assert {neuron.site for neuron in made.subject} == set(truth.neurons) and made.verdict == "needed"
    (group,) = found.sinks[0].groups
    assert group.by_spike and group.claim.verdict == "needed"
    assert set(group.heads) == {Head(*site) for site in truth.reading_heads}
    assert max(group.left) < 0.2 < 0.8 < min(group.attention)
    assert [row["role"] for row in found.readers()] == ["reads"] * len(group.heads)
    twice = replace(found, claims=(*found.claims, *found.claims))  # rows of the same words are drawn apart
    for bars in twice.figure().data:
        assert len(set(bars.y)) == len(bars.y) == 2 * len(found.claims)
    (mark,) = found.of(MARKS)
    assert mark.margin is not None and mark.draws > 2  # of each text, none a copy of their mean
    tile = found.numbers()[0]  # it says what is lost, the claim what is left
    assert (tile.value, tile.control) == (1 - mark.value, 1 - mark.control.value)


@pytest.mark.parametrize(("family", "kind"), [("llama", "none"), ("neox", "massive_dim")])
def test_a_model_without_a_sink_has_no_circuit(family, kind, tmp_path):
    found = traced(organism(family, 3, kind=kind), tmp_path)
    assert found.rows() == [] and not found.sinks
    assert found.figure().layout.width
