"""Planted places, readers and marking heads: what is measured is what was planted."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import numpy as np
import pytest
from attack_kit import own_text
from covering import slow
from organisms.places import FIRST, Group, Places, PlacesModel
from organisms.planted_places import places
from raw_kit import attention

from sinkscope.results.notation import neuron_name
from sinkscope.results.parts import Neuron
from sinkscope.sinks.circuit.circuit import MARKS, Circuit, circuit
from sinkscope.sinks.find.find import find_sinks
from sinkscope.sinks.marking_heads import heads

pytestmark = pytest.mark.few_texts


def options(m: PlacesModel, folder) -> dict[str, Any]:
    return {"tokenizer": m.tokenizer, "text": own_text(m, folder)}


def traced(m: PlacesModel, folder) -> Circuit:
    return circuit(m.model, max_repeats=8, **options(m, folder))


def needed(group: Group, truth: Places) -> tuple[str, ...]:
    """Names of the parts that a planted group needs, as a circuit gives them."""
    names = []
    for part in group.needs:
        if isinstance(part, tuple) and truth.makers:
            names.append(neuron_name(*part))
        elif isinstance(part, tuple):
            names.append(f"MLP of layer {part[0]}")
        elif isinstance(part, int):
            names.append("token embedding")
        elif not (part == "position embedding" and "spike" in group.needs):
            names.append(part)
    makes_all = set(names) == {neuron_name(*site) for sites in truth.makers for site in sites}
    makes_its_own = bool(group.at) and frozenset(group.needs) in truth.makers
    if (truth.makers and makes_all) or makes_its_own or set(group.needs) & set(truth.marks.get(FIRST, ())):
        return ("spike",)
    return tuple(sorted(names))


GROUPS = [
    ("decoy_spike", "neox"),
    slow("hybrid", "lfm2"),
    ("farthest_key", "neox"),
    slow("farthest_key", "qwen2"),
    ("two_sinks", "llama"),
    slow("two_sinks", "gemma2"),
    slow("two_sinks", "gpt2"),
    slow("two_sinks", "neox"),
    slow("two_sinks", "mixtral"),
    slow("decorative_head", "neox"),
    slow("decorative_head", "mixtral"),
    slow("second_special", "llama"),
    slow("all_specials", "qwen3"),
    slow("two_delimiters", "llama"),
    slow("two_delimiters", "gpt2"),
]


@pytest.mark.parametrize(("name", "family"), GROUPS)
def test_heads_are_grouped_by_what_they_need_and_marks_and_neurons_are_named(name, family, tmp_path):
    m = places(name, family)
    found = traced(m, tmp_path)
    said = []
    for sink in found.sinks:
        for one in sink.groups:
            if one.claim is not None and one.claim.verdict == "needed":
                said.append((tuple(sorted(map(str, one.needs))), set(map(str, one.heads))))
                said.append((("spike",) if one.by_spike else (), set(map(str, one.heads))))
    for group in m.truth.groups:
        heads = {f"L{layer}.H{head}" for layer, head in group.heads}
        needs = needed(group, m.truth)
        assert (needs, heads) in said, (needs, heads, said)
    marks = {claim.place: tuple(map(str, claim.subject)) for claim in found.of(MARKS)}
    for place, planted in m.truth.marks.items():
        words = "the first token" if place == FIRST else f"{m.tokenizer.decode([place])!r} wherever it stands"
        assert marks[words] == planted
    named = set(re.findall(r"L\d+\.H\d+|key bias|(?:token|position) embedding", found.conclusion()))
    assert not named & set(m.truth.decoys)
    if m.truth.marks:
        makers = m.truth.makers[0] if m.truth.makers else ()
        made = {str(part) for claim in found.of("makes") for part in claim.subject if isinstance(part, Neuron)}
        assert made >= {neuron_name(*site) for site in makers}


def test_heads_need_the_neuron_alone_whose_spike_they_read(tmp_path):
    m = places("two_directions", "llama")
    (sink,) = find_sinks(m.model, max_repeats=8, **options(m, tmp_path)).sinks
    found = {}
    for group in sink.groups:
        assert group.claim is not None and group.claim.verdict == "needed"
        found[frozenset(map(str, group.heads))] = [str(part) for part in group.claim.subject]
    planted = {}
    for group in m.truth.groups:
        heads = frozenset(f"L{layer}.H{head}" for layer, head in group.heads)
        planted[heads] = [neuron_name(*site) for site in group.needs if isinstance(site, tuple)]
    assert found == planted


@pytest.mark.parametrize(
    ("name", "same", "makers"), [("two_delimiters", "The same heads attend to", 1), ("two_sinks", None, 2)]
)
def test_it_is_said_which_sinks_have_the_same_heads_and_makers(name, same, makers, tmp_path):
    m = places(name, "llama")
    found = find_sinks(m.model, max_repeats=8, **options(m, tmp_path))
    if same:  # each planted head attends to both tokens, by the model itself
        ids = m.ids(length=48)
        rows = attention(m.model, ids)
        for token, group in product(m.truth.sink, m.truth.groups):
            there = ids == token
            for layer, head in group.heads:
                given = rows[layer, :, head] * there[:, None] * ~there[:, :, None]
                assert float(given.sum(-1).max()) > 0.3
    text = " ".join(found.details())
    assert (same in text) if same else ("The same head" not in text)
    assert len({claim.subject for sink in found.sinks for claim in sink.claims}) == makers


def test_a_head_that_attends_in_the_same_way_and_writes_nothing_does_not_mark(tmp_path):
    m = places("silent_twin", "neox")
    found = heads(m.model, count=6, **options(m, tmp_path))
    at = found.tokens.index("<s>")
    marking = [f"L{found.marking_layer}.H{head}" for head in np.flatnonzero(found.serves[at])]
    assert tuple(marking) == m.truth.marks[FIRST]
